"""Numbers made ready to draw: worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.reporting.page import Series, rolling_mean, round_ticks, short_number, thin_out


def test_rolling_mean_looks_back():
    assert rolling_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_thinned_out_points_are_means_of_neighbours():
    series = Series("s", [1, 2, 3, 4, 5], [10, 20, 30, 40, 50])

    assert thin_out(series, max_points=3) == Series("s", [1.5, 3.5, 5], [15, 35, 50])
    assert thin_out(series, max_points=5) is series


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3.0, 11.0, [-5.0, 0.0, 5.0, 10.0, 15.0]),
        (0.0, 0.0, [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]),
    ],
)
def test_ticks_are_round_and_enclose_the_numbers(low, high, ticks):
    assert round_ticks(low, high, most=6) == pytest.approx(ticks)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_any_range(low, span):
    ticks = round_ticks(low, low + span)

    slack = 1e-6 * max(abs(low), span, 1e-9)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.012346, "0.01235"), (1.5, "1.5"), (12345.6, "12,346"), (3.4e-7, "3.4e-07")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text
