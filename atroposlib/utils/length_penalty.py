"""The linear length penalty, for groups of only right answers."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["length_factor", "penalize_length"]


def length_factor(num_tokens: int, *, max_tokens: int, free_fraction: float) -> float:
    """Return the factor of a score: 1 up to `free_fraction` of the limit, then linearly down to 0.

    Args:
        num_tokens: L, prompt included.
        max_tokens: the limit, at least 1.
        free_fraction: fraction of the limit without a penalty, in [0, 1].
    """
    free = free_fraction * max_tokens
    if num_tokens <= free:
        return 1.0
    if num_tokens >= max_tokens:
        return 0.0
    return 1.0 - (num_tokens - free) / (max_tokens - free)


def penalize_length(
    scores: Sequence[float], lengths: Sequence[int], *, max_tokens: int, free_fraction: float
) -> list[float]:
    """Return [G] scores, multiplied by the `length_factor` of [G] lengths."""
    return [
        score * length_factor(length, max_tokens=max_tokens, free_fraction=free_fraction)
        for score, length in zip(scores, lengths, strict=True)
    ]
