"""Filters and pairings, checked against tables worked out by hand."""

from __future__ import annotations

import pytest

from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.selection import (
    GroupChooser,
    PairRule,
    PreferencePair,
    SelectionRule,
    Span,
    common_prefix_length,
    pair_prompt_length,
    pair_up,
    prompt_lengths,
    select,
    trained_spans,
)

X = -100


class Last:
    """Always draws the last candidate."""

    def randrange(self, stop: int, /) -> int:
        return stop - 1


@pytest.mark.parametrize(
    ("scores", "rule", "chosen"),
    [
        # best first; zero and below are dropped
        ([1, -1, 0, 2], SelectionRule(), [3, 0]),
        # the difference to -1 is 3, 2, 1, 0: the first three exceed 0.5
        ([1, -1, 0, 2], SelectionRule(3, True, 0.5), [3, 0, 2]),
        # strict: 2 - -1 = 3 does not exceed 3
        ([1, -1, 0, 2], SelectionRule(3, True, 3.0), []),
        # the lowest of the whole group counts, although it is itself dropped
        ([0.2, -1, 0.1], SelectionRule(3, False, 1.15), [0]),
        # all negative
        ([-1, -2, -3], SelectionRule(), []),
        ([-1, -2, -3], SelectionRule(2, True), [0, 1]),
        # ties keep their order
        ([1, 1, 1, 1], SelectionRule(2), [0, 1]),
        # ties are never farther apart than anything
        ([1, 1, 1, 1], SelectionRule(2, True, 1e-9), []),
        ([0.0], SelectionRule(), []),
        ([2.0], SelectionRule(), [0]),
        ([1, 2], SelectionRule(0), []),
        ([1, 2], SelectionRule(-1), []),
    ],
)
def test_select(scores: list[float], rule: SelectionRule, chosen: list[int]) -> None:
    selection = select(scores, rule)

    assert selection.chosen == chosen
    assert sum(selection.dropped.values()) == len(scores) - len(chosen)


def test_select_among_eligible_ones_compares_with_the_lowest_of_all() -> None:
    selection = select([3.0, 2.0, -1.0], SelectionRule(3, True, 2.5), eligible=[1])

    assert selection.chosen == [1]  # 2 - -1 = 3 exceeds 2.5


@pytest.mark.parametrize(
    ("scores", "rule", "pairs"),
    [
        # worst two: 1 and 2 (-1, 0). The lower of the best draws first, the last of its candidates
        # (0): 1 - 0 = 1 > 0.5; the best takes what is left.
        ([1, -1, 0, 2], PairRule("best-random", 2), [(3, 1), (0, 2)]),
        # worst two: -1 and 0.9. For 2 both would do, for 1 only -1: both get one.
        ([2, 1, -1, 0.9], PairRule("best-random", 2), [(0, 3), (1, 2)]),
        # strict: 1 - 0.5 is not above 0.5
        ([1, 0.5], PairRule("best-random", 3), []),
        ([1, 0.25], PairRule("best-random", 3), [(0, 1)]),
        # ties, also without any margin
        ([1, 1, 1], PairRule("best-random", 3, True, 0.0), []),
        ([1, 1, 1], PairRule("all-pairs", 3, True, 0.0), []),
        # all negative: no good side, unless asked for
        ([-1, -2], PairRule("best-random", 3), []),
        ([-1, -2], PairRule("best-random", 3, True), [(0, 1)]),
        ([1, 2], PairRule("best-random", 0), []),
        ([1, 2], PairRule("best-random", -1), []),
        ([1.0], PairRule("best-worst", 3), []),
        # best with worst, second with second last, as long as they are far enough apart
        ([1, -1, 0, 2], PairRule("best-worst", 3), [(3, 1), (0, 2)]),
        ([3, 2.8, 2.6, 0], PairRule("best-worst", 3), [(0, 3)]),
        # the widest first: 2 over -1, then 2 over 0 and 1 over -1 in order of the best, 1 over 0
        ([1, -1, 0, 2], PairRule("all-pairs", 9), [(3, 1), (3, 2), (0, 1), (3, 0), (0, 2)]),
        ([1, -1, 0, 2], PairRule("all-pairs", 2), [(3, 1), (3, 2)]),
        ([1, -1, 0, 2], PairRule("one-per-group", 3), [(3, 1)]),
        ([0.4, 0.1], PairRule("one-per-group", 3), []),
    ],
)
def test_pair_up(scores: list[float], rule: PairRule, pairs: list[tuple[int, int]]) -> None:
    pairing = pair_up(scores, rule, Last())

    assert pairing.pairs == [PreferencePair(*pair) for pair in pairs]
    unpaired = len(scores) - len({side for pair in pairs for side in pair})
    assert sum(pairing.dropped.values()) == unpaired


def test_chooser_draws_the_same_for_the_same_group_and_all_there_is() -> None:
    drawn = [GroupChooser(7, f"line {i}").randrange(4) for i in range(200)]

    assert drawn == [GroupChooser(7, f"line {i}").randrange(4) for i in range(200)]
    assert {drawn.count(value) > 20 for value in range(4)} == {True}
    assert drawn != [GroupChooser(8, f"line {i}").randrange(4) for i in range(200)]


@pytest.mark.parametrize(
    ("tokens", "masks", "lengths"),
    [
        # masks tell, although the answers begin alike
        ([[1, 2, 5, 6], [1, 2, 5, 7]], [[X, X, 5, 6], [X, X, 5, 7]], [2, 2]),
        # no common beginning: each prompt ends where its own mask says
        ([[1, 5], [2, 3, 6]], [[X, 5], [X, X, 6]], [1, 2]),
        # no masks: what all begin with
        ([[1, 2, 5], [1, 2, 6, 7]], None, [2, 2]),
        # nothing is masked, or everything: the same
        ([[1, 2, 5], [1, 2, 6]], [[1, 2, 5], [1, 2, 6]], [2, 2]),
        ([[1, 2, 5], [1, 2, 6]], [[X, X, X], [X, X, X]], [2, 2]),
        # one is the beginning of the other: its last token is its completion
        ([[1, 2], [1, 2, 3]], None, [1, 1]),
        ([[1, 2], [3, 4]], None, [0, 0]),
        # a lone trajectory without masks has no prompt
        ([[1, 2]], None, [0]),
        ([[1, 2]], [[X, 2]], [1]),
        # one that is not trained on at all
        ([[1, 5], [1, 6]], [[X, 5], [X, X]], [1, None]),
        # trained from the first token on
        ([[1, 5], [1, 6]], [[X, 5], [1, 6]], [1, 0]),
    ],
)
def test_prompt_lengths(
    tokens: list[list[int]], masks: list[list[int]] | None, lengths: list[int | None]
) -> None:
    group = ExportGroup(tokens=tokens, scores=[0.0] * len(tokens), masks=masks)

    assert prompt_lengths(group) == lengths


def test_prompt_of_a_pair_is_what_both_prompts_begin_with() -> None:
    assert pair_prompt_length([1, 2, 3, 4], [1, 2, 3, 5], chosen_prompt=2, rejected_prompt=2) == 2
    assert pair_prompt_length([1, 2, 9], [1, 7, 9], chosen_prompt=2, rejected_prompt=2) == 1


@pytest.mark.parametrize(
    ("rows", "length"),
    [([], 0), ([[1, 2]], 2), ([[1, 2], [1, 3]], 1), ([[1], [1, 2]], 1), (["Pa", "PaPa"], 2)],
)
def test_common_prefix_length(rows: list[list[int]], length: int) -> None:
    assert common_prefix_length(rows) == length


def test_trained_spans_of_several_turns() -> None:
    spans = trained_spans([X, X, 5, 6, X, 7])

    assert spans == [Span(0, 2, False), Span(2, 4, True), Span(4, 5, False), Span(5, 6, True)]
    assert trained_spans([]) == []
