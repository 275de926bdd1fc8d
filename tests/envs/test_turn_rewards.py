from __future__ import annotations

import math

import pytest

from atroposlib.envs.multi_turn_env import (
    TurnSpan,
    discounted_return,
    token_advantages,
    turn_advantages,
)
from atroposlib.errors import GroupError


def test_discounted_return_weighs_later_rewards_less() -> None:
    # 1 + 0.5 * 2 + 0.25 * 4
    assert discounted_return([1.0, 2.0, 4.0], discount=0.5) == 3.0
    assert discounted_return([1.0, 2.0, 4.0]) == 7.0
    assert discounted_return([]) == 0.0


def test_raw_advantages_are_the_returns_of_each_turn() -> None:
    # from the end: 4; 2 + 0.5*4 = 4; 1 + 0.5*4 = 3
    raw = turn_advantages([[1.0, 2.0, 4.0], [-1.0]], discount=0.5, normalization="none")

    assert raw == [[3.0, 4.0, 4.0], [-1.0]]


def test_normalized_returns_are_standardized_over_all_turns_of_the_group() -> None:
    # returns [1, 1] and [0]: mean 2/3, variance (1/9 + 1/9 + 4/9) / 3 = 2/9
    win, loss = turn_advantages([[0.0, 1.0], [0.0]])

    assert win == pytest.approx([1 / 3 / math.sqrt(2 / 9)] * 2)
    assert loss == pytest.approx([-2 / 3 / math.sqrt(2 / 9)])
    assert sum(win + loss) == pytest.approx(0.0)


def test_normalized_rewards_are_standardized_before_they_are_summed() -> None:
    # rewards 0, 1, 0: mean 1/3, deviation sqrt(2)/3, so -1/sqrt(2), sqrt(2), -1/sqrt(2)
    low, high = -1 / math.sqrt(2), math.sqrt(2)

    win, loss = turn_advantages([[0.0, 1.0], [0.0]], discount=0.5, normalization="rewards")

    assert win == pytest.approx([low + 0.5 * high, high])
    assert loss == pytest.approx([low])


@pytest.mark.parametrize("normalization", ["returns", "rewards"])
def test_group_without_differences_has_no_advantages(normalization: str) -> None:
    rows = turn_advantages([[0.5], [0.5]], normalization=normalization)  # type: ignore[arg-type]

    assert rows == [[0.0], [0.0]]


@pytest.mark.parametrize("normalization", ["returns", "rewards", "none"])
def test_rollouts_without_turns_have_empty_rows(normalization: str) -> None:
    assert turn_advantages([[], []], normalization=normalization) == [[], []]  # type: ignore[arg-type]


def test_reward_that_is_no_number_is_refused_with_its_place() -> None:
    with pytest.raises(GroupError, match=r"rewards\[1\]\[0\]: nan"):
        turn_advantages([[1.0], [math.nan]])


def test_tokens_take_the_advantage_of_their_turn_and_masked_ones_zero() -> None:
    #        p     p     c  c  e  p     c  c
    masks = [-100, -100, 7, 8, 2, -100, 9, 2]

    row = token_advantages(masks, [TurnSpan(0, 2, 5), TurnSpan(1, 6, 8)], [0.5, -1.5])

    assert row == [0.0, 0.0, 0.5, 0.5, 0.5, 0.0, -1.5, -1.5]


def test_masked_token_inside_a_turn_stays_zero() -> None:
    assert token_advantages([7, -100, 8], [TurnSpan(1, 0, 3)], [9.0, 2.0]) == [2.0, 0.0, 2.0]
