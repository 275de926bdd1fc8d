"""Rewards of turns into advantages of tokens; pure.

    rewards [G][T] ─► turn_advantages ─► [G][T] ─► token_advantages ─► [L] for each sequence

Worked example, two rollouts, discount 1, normalised by "returns":

    rewards      [0, 1]     [0]
    returns      [1, 1]     [0]        mean 2/3, deviation √2/3
    advantages   [0.71, 0.71]  [-1.41]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.advantages import (
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
)

__all__ = ["Normalization", "TurnSpan", "discounted_return", "token_advantages", "turn_advantages"]

Normalization = Literal["returns", "rewards", "none"]
"""What is set in relation to the group: the discounted returns, the rewards before they are
summed, or nothing."""

MIN_DEVIATION = 1e-8
"""A group whose rewards differ by less carries no signal."""


class TurnSpan(NamedTuple):
    """Where one turn's sampled tokens lie in a sequence."""

    turn: int
    """Index of the turn in its rollout."""
    start: int
    """Position of its first token."""
    end: int
    """Position behind its last token."""


def discounted_return(rewards: Sequence[float], *, discount: float = 1.0) -> float:
    """Return the sum of all rewards of a rollout, later ones discounted once per turn."""
    return sum(reward * discount**step for step, reward in enumerate(rewards))


def turn_advantages(
    rewards: Sequence[Sequence[float]],
    *,
    discount: float = 1.0,
    normalization: Normalization = "returns",
) -> list[list[float]]:
    """Turn the rewards of the turns of a group into one advantage per turn.

    A turn is credited with its own reward and the later ones, discounted. Set in relation to the
    group, equal rewards yield zeros: such a group carries no signal.

    Args:
        rewards: [G][T] one finite reward per turn; rollouts may differ in their number of turns.
        discount: weight of the next turn's return, 0 to 1.
        normalization: `returns` subtracts the mean of the returns of all turns of the group and
            divides by their population deviation; `rewards` does so with the rewards, before
            they are summed (process supervision); `none` gives the returns.

    Returns:
        [G][T] advantages.

    Raises:
        GroupError: a reward is not finite.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.3, for `rewards`.
    Differs in allowing a discount.
    """
    for i, row in enumerate(rewards):
        for step, reward in enumerate(row):
            if not np.isfinite(reward):
                raise GroupError(f"rewards[{i}][{step}]: {reward} is not a finite number")
    if not any(rewards):
        return [[] for _ in rewards]
    if normalization == "rewards":
        if compute_stats(rewards)["var"] ** 0.5 < MIN_DEVIATION:
            return [[0.0] * len(row) for row in rewards]
        rows = compute_grpo_process_supervision_advantages(rewards, discount, MIN_DEVIATION)
        return [row.tolist() for row in rows]
    returns = [
        compute_discounted_returns(np.asarray(row, dtype=np.float64), discount).tolist()
        for row in rewards
    ]
    return returns if normalization == "none" else _standardized(returns)


def _standardized(rows: list[list[float]]) -> list[list[float]]:
    stats = compute_stats(rows)
    deviation = stats["var"] ** 0.5
    if deviation < MIN_DEVIATION:
        return [[0.0] * len(row) for row in rows]
    return [[(value - stats["mean"]) / deviation for value in row] for row in rows]


def token_advantages(
    masks: Sequence[int], spans: Sequence[TurnSpan], advantages: Sequence[float]
) -> list[float]:
    """Give every sampled token the advantage of its turn.

    Args:
        masks: [L] `IGNORE_INDEX` where a token is not trained on.
        spans: the turns of this sequence.
        advantages: [T] by turn of the rollout.

    Returns:
        [L] advantages, 0.0 on masked tokens.
    """
    row = [0.0] * len(masks)
    for span in spans:
        value = advantages[span.turn]
        labels = masks[span.start : span.end]
        row[span.start : span.end] = [value if m != IGNORE_INDEX else 0.0 for m in labels]
    return row
