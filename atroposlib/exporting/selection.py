"""Which trajectories of a group become examples to imitate; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["BELOW_ZERO", "Selection", "SelectionRule", "rank", "select"]

BELOW_ZERO = "score not above 0"
TOO_CLOSE = "too close to the lowest score of the group"
BEYOND_BEST = "not among the best of the group"


class SelectionRule(NamedTuple):
    """What a trajectory must satisfy."""

    num_best: int = 3
    """The most that are taken from one group."""
    allow_negative: bool = False
    """Whether scores of 0 and below pass."""
    min_score_diff: float = 0.0
    """What a score must exceed the lowest of its group by; 0 asks for nothing."""


class Selection(NamedTuple):
    """The outcome for one group."""

    chosen: list[int]
    """Positions in the group, best first."""
    refused: dict[str, int]
    """Trajectories that were left out, by reason."""


def rank(scores: Sequence[float]) -> list[int]:
    """Return positions by score, highest first; equal scores keep their order."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def select(
    scores: Sequence[float], rule: SelectionRule, *, eligible: Sequence[int] | None = None
) -> Selection:
    """Choose trajectories of a group.

    Args:
        scores: [G].
        rule: what they must satisfy.
        eligible: positions to choose from, in order; None for all. The lowest score is that of the
            whole group nevertheless.
    """
    chosen = rank(scores)
    if eligible is not None and len(eligible) < len(scores):
        allowed = set(eligible)
        chosen = [i for i in chosen if i in allowed]
    refused: dict[str, int] = {}

    def keep(kept: list[int], reason: str) -> list[int]:
        if len(kept) < len(chosen):
            refused[reason] = len(chosen) - len(kept)
        return kept

    if not rule.allow_negative:
        chosen = keep([i for i in chosen if scores[i] > 0], BELOW_ZERO)
    if rule.min_score_diff > 0:
        lowest = min(scores)
        chosen = keep([i for i in chosen if scores[i] - lowest > rule.min_score_diff], TOO_CLOSE)
    chosen = keep(chosen[: max(0, rule.num_best)], BEYOND_BEST)
    return Selection(chosen, refused)
