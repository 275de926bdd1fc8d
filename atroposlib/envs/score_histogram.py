"""Scores counted by value or by range; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ScoreBar", "score_bars"]


class ScoreBar(NamedTuple):
    """How many scores have one value, or lie in one range."""

    label: str
    """The value, or where the range begins and ends."""
    num_scores: int


def score_bars(scores: Sequence[float], *, max_bars: int = 5) -> list[ScoreBar]:
    """Count scores by value when they have few values, else by equal ranges, lowest first.

    Args:
        scores: finite numbers.
        max_bars: most values counted one by one, and the number of ranges otherwise.

    Example:
        score_bars([1.0, -1.0, 1.0]) == [ScoreBar("-1", 1), ScoreBar("1", 2)]
    """
    by_value = Counter(scores)
    if len(by_value) <= max_bars:
        return [ScoreBar(f"{value:.4g}", by_value[value]) for value in sorted(by_value)]
    low, high = min(by_value), max(by_value)
    width = high / max_bars - low / max_bars  # the difference itself may be too large
    counts = [0] * max_bars
    for value, count in by_value.items():
        # The highest value belongs to the last range; a width of 0 is that of denormal numbers.
        position = int(value / width - low / width) if width else 0
        counts[min(position, max_bars - 1)] += count
    is_plain = width >= 0.05 and max(abs(low), abs(high)) < 1000
    edges = [format(low + width * i, ".2f" if is_plain else ".3g") for i in range(max_bars + 1)]
    return [ScoreBar(f"{edges[i]} to {edges[i + 1]}", count) for i, count in enumerate(counts)]
