"""Intervals, pass@k and paired tests, with values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs import eval as eval_page
from atroposlib.envs.evaluation_statistics import (
    attempts_of,
    compare_items,
    interval_metrics,
    interval_of,
    mcnemar_p_value,
    numbers_of,
    pass_at_k,
    randomization_p_value,
    uncertainty_metrics,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("num_correct", "num_items", "low", "high"),
    [
        # z² = 3.8415; (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),  # z²/n / (1 + z²/n)
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_wilson_interval_of_known_counts(
    num_correct: int, num_items: int, low: float, high: float
) -> None:
    assert wilson_interval(num_correct, num_items) == pytest.approx((low, high), abs=1e-4)


def test_interval_of_one_binary_value_per_item_is_wilsons() -> None:
    interval = interval_of([[1.0]] * 8 + [[0.0]] * 2)

    assert interval.rule == "wilson"
    assert interval.mean == 0.8
    assert interval.stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 10))
    assert (interval.low, interval.high) == wilson_interval(8, 10)


def test_interval_of_several_samples_is_clustered_by_item() -> None:
    # Three items that are always right, three that are always wrong: twelve samples, six
    # independent.
    rows = [[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 3

    interval = interval_of(rows)

    assert interval.rule == "bootstrap"
    assert interval.mean == 0.5
    assert interval.stderr == pytest.approx(math.sqrt(1.5 / 5) / math.sqrt(6))
    assert interval.stderr > math.sqrt(0.25 / 12)  # that of twelve independent samples
    assert interval == interval_of(rows)


def test_interval_of_a_single_item_with_a_fraction_is_unknown() -> None:
    assert interval_of([[0.4]]).low is None
    assert interval_metrics("a", [[0.4]]) == {}


def test_few_items_have_a_standard_error_and_no_interval() -> None:
    metrics = interval_metrics("a", [[0.2], [0.4], [0.3], [0.7]])

    assert metrics == {"a_stderr": pytest.approx(0.108, abs=1e-3)}
    assert interval_metrics("a", [[1.0], [0.0]]).keys() == {"a_stderr", "a_ci_low", "a_ci_high"}


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=5, max_size=20))
def test_interval_contains_its_mean(rows: list[list[float]]) -> None:
    interval = interval_of(rows)

    assert interval.low is not None
    assert interval.high is not None
    assert interval.low - 1e-9 <= interval.mean <= interval.high + 1e-9


@pytest.mark.parametrize(
    ("m", "c", "k", "expected"),
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 1 - 1 / 6), (4, 0, 4, 0.0), (4, 1, 4, 1.0)],
)
def test_pass_at_k(m: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(m, c, k) == pytest.approx(expected)


def test_pass_at_k_is_the_public_function() -> None:
    assert eval_page.pass_at_k is pass_at_k


@pytest.mark.parametrize(
    ("num_samples", "attempts"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_attempts_are_powers_of_two_and_all(num_samples: int, attempts: list[int]) -> None:
    assert attempts_of(num_samples) == attempts


@pytest.mark.parametrize(
    ("num_gained", "num_lost", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 · 1/2
        (5, 0, 0.0625),  # 2 / 2^5
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (3, 3, 1.0),
    ],
)
def test_mcnemar_of_known_counts(num_gained: int, num_lost: int, expected: float) -> None:
    assert mcnemar_p_value(num_gained=num_gained, num_lost=num_lost) == pytest.approx(expected)
    assert mcnemar_p_value(num_gained=num_lost, num_lost=num_gained) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.5], 1.0),  # both signs are as extreme
        ([0.1, 0.1, 0.1], 0.25),  # 2 of 8 sign patterns
        ([0.0, 0.0], 1.0),
    ],
)
def test_randomization_test_of_few_items(differences: list[float], expected: float) -> None:
    assert randomization_p_value(differences) == pytest.approx(expected, abs=0.02)


def test_comparison_is_over_common_items_and_second_minus_first() -> None:
    first = {"a": [0.0], "b": [1.0], "c": [0.0], "only here": [0.0]}
    second = {"a": [1.0], "b": [1.0], "c": [0.0], "only there": [1.0]}

    found = compare_items(first, second)

    assert found.difference == pytest.approx(1 / 3)
    assert (found.num_items, found.test, found.p_value) == (3, "mcnemar", 1.0)


@pytest.mark.parametrize(("num_items", "has_interval"), [(1, False), (4, False), (5, True)])
def test_difference_of_few_items_has_no_interval(num_items: int, has_interval: bool) -> None:
    old = {str(i): [0.0] for i in range(num_items)}

    found = compare_items(old, {name: [1.0] for name in old})

    assert (found.low, found.high) == ((1.0, 1.0) if has_interval else (None, None))


def test_comparison_of_clear_and_of_no_difference() -> None:
    old = {str(i): [0.1 * (i % 5), 0.2] for i in range(100)}
    new = {name: [value + 0.3 for value in row] for name, row in old.items()}

    better, same = compare_items(old, new), compare_items(old, old)

    assert better.test == "randomization"
    assert better.difference == pytest.approx(0.3)
    assert better.p_value < 0.001
    assert better.low == pytest.approx(0.3)
    assert (same.difference, same.p_value) == (0.0, 1.0)


def test_uncertainty_is_given_for_means_only() -> None:
    values = [{"eval/a": 1.0, "eval/b": 1.0, "eval/other": 1.0}, {"eval/a": 0.0, "eval/b": 1.0}]

    found = uncertainty_metrics(
        {"eval/a": 0.5, "eval/b": 0.7},  # b is not the mean of its values
        item_ids=["one", "two"],
        values=values,
        is_correct=[True, False],
    )

    assert found.keys() == {"eval/a_stderr", "eval/a_ci_low", "eval/a_ci_high"}


def test_pass_at_k_is_reported_with_several_samples() -> None:
    found = uncertainty_metrics(
        {},
        item_ids=["one"] * 4 + ["two"] * 4,
        values=[{}] * 8,
        is_correct=[True, False, False, False, False, False, False, False],
    )

    points = {name: value for name, value in found.items() if name.rpartition("_")[2].isdigit()}
    # Item one: 1/4, 1/2, 1; item two: 0.
    assert points == {"eval/pass_at_1": 0.125, "eval/pass_at_2": 0.25, "eval/pass_at_4": 0.5}


def test_numbers_leave_out_counts_by_name() -> None:
    assert numbers_of({"a": 1, "b": {"c": 2}, "d": "text"}) == {"a": 1}
