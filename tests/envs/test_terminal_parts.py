"""What the view is made from: recent figures, scores counted, recent errors, harmless text."""

from __future__ import annotations

import logging

import pytest

from atroposlib.envs.live_view import score_bars
from atroposlib.envs.reporting import RunFigures
from atroposlib.envs.run_snapshot import RecentErrors
from atroposlib.utils.text import inert_block, inert_line


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_figures_rates_are_those_of_the_last_minute() -> None:
    clock = Clock()
    figures = RunFigures(now=clock)
    figures.begin()

    for _ in range(200):  # one a second, 10 tokens each
        clock.now += 1.0
        figures.add_group({"scores": [0.0]}, num_tokens=10)

    groups_per_s, tokens_per_s = figures.rates()
    assert groups_per_s == pytest.approx(1.0, rel=0.02)
    assert tokens_per_s == pytest.approx(10.0, rel=0.02)
    assert (figures.num_groups, figures.num_tokens, figures.elapsed_s) == (200, 2000, 200.0)


def test_figures_rates_of_slow_groups_do_not_fall_to_nothing_between_two() -> None:
    clock = Clock()
    figures = RunFigures(now=clock)
    figures.begin()

    for _ in range(20):  # one every five minutes
        clock.now += 300.0
        figures.add_group({"scores": [0.0]}, num_tokens=600)
    clock.now += 100.0

    # Eight groups are kept; they came in 8 * 300 s, and 100 s have passed since.
    assert figures.rates() == (pytest.approx(8 / 2500), pytest.approx(8 * 600 / 2500))


def test_figures_rates_fall_when_nothing_comes_any_more() -> None:
    clock = Clock()
    figures = RunFigures(now=clock)
    figures.begin()
    clock.now += 1.0
    figures.add_group({"scores": [0.0]}, num_tokens=100)

    clock.now += 999.0

    assert figures.rates() == (pytest.approx(0.001), pytest.approx(0.1))


@pytest.mark.parametrize(
    "group", [None, "group", {}, {"scores": None}, {"scores": ["x", None, float("nan")]}]
)
def test_figures_malformed_group_counts_without_scores(group: object) -> None:
    figures = RunFigures()

    figures.add_group(group, num_tokens=0)

    assert figures.num_groups == 1
    assert list(figures.recent_scores) == []


def test_figures_memory_is_bounded() -> None:
    figures = RunFigures(now=lambda: 0.0)
    for _ in range(1000):
        figures.add_group({"scores": [1.0, 2]}, num_tokens=1)
        figures.add_staleness(1)

    assert len(figures.recent_scores) == 512
    assert len(figures.recent_staleness) == 128


def test_score_bars_few_values_are_counted_by_value() -> None:
    assert score_bars([1.0, -1.0, 1.0]) == [("-1", 1), ("1", 2)]


def test_score_bars_many_values_are_counted_by_range_with_the_highest_in_the_last() -> None:
    bars = score_bars([i / 10 for i in range(11)])

    assert [bar.label for bar in bars] == [
        *("0.00 to 0.20", "0.20 to 0.40", "0.40 to 0.60", "0.60 to 0.80", "0.80 to 1.00")
    ]
    assert sum(bar.num_scores for bar in bars) == 11
    assert bars[-1].num_scores == 3  # 0.8, 0.9, 1.0


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300, 1.7e308])
def test_score_bars_extreme_values_are_all_counted(scale: float) -> None:
    scores = [scale * factor for factor in (-1, -0.5, 0.1, 0.2, 0.7, 1)]

    assert sum(bar.num_scores for bar in score_bars(scores)) == len(scores)


def test_recent_errors_equal_ones_are_one_and_the_oldest_goes() -> None:
    errors = RecentErrors(capacity=2)
    log = logging.getLogger("tests.recent_errors")
    log.addHandler(errors)
    log.propagate = False

    for text in ("a", "b", "a", "c"):
        log.warning(text)
    try:
        raise ValueError("no answer")
    except ValueError:
        log.exception("a rollout failed")
    log.info("not kept")
    log.removeHandler(errors)

    assert [(line.text, line.count, line.is_error) for line in errors.lines] == [
        ("c", 1, False),
        ("ValueError: no answer (a rollout failed)", 1, True),
    ]


def test_recent_errors_record_that_cannot_be_formatted_is_left_to_others() -> None:
    errors = RecentErrors()

    errors.handle(logging.LogRecord("n", logging.ERROR, "p", 1, "%d", ("x",), None))

    assert errors.lines == ()


def test_inert_line_is_one_line_no_longer_than_wanted() -> None:
    assert inert_line("a\n\tb \r\n c", max_characters=20) == "a b c"
    assert inert_line("x" * 50, max_characters=10) == "x" * 9 + "…"
    assert inert_line("\n" * 10**6 + "x", max_characters=10) == "…"


def test_inert_block_keeps_lines_and_shows_control_characters() -> None:
    assert (
        inert_block("a\tb\n\x1b[2J é 間 \u202e\x9b\x7f\ud800")
        == "a\tb\n␛[2J é 間 \ufffd\ufffd\ufffd\ufffd"
    )
