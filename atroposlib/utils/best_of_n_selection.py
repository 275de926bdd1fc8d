"""Selection of one of several completions by two criteria; pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["select_best_index"]


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """Return the index with the best primary score; the secondary breaks exact ties.

    Remaining ties go to the earliest candidate.

    Raises:
        ValueError: there are no scores, or the numbers of scores differ.
    """
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(
            "need one primary and one secondary score for at least one candidate, got "
            f"{len(primary_scores)} and {len(secondary_scores)}"
        )
    primary_sign = 1 if primary_higher_is_better else -1
    secondary_sign = -1 if secondary_lower_is_better else 1
    return max(
        range(len(primary_scores)),
        key=lambda i: (
            primary_sign * primary_scores[i],
            secondary_sign * secondary_scores[i],
            -i,
        ),
    )
