"""Rows of numbers made ready to draw: smoothed, thinned out, with round ticks; pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Series", "rolling_mean", "round_ticks", "short_number", "thin_out"]


class Series(NamedTuple):
    """One line of a chart; x rises, both lists have the same length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    """Finite numbers."""


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Return at each place the mean of the last `window` values up to it."""
    recent: deque[float] = deque(maxlen=window)
    means = []
    for value in values:
        recent.append(value)
        means.append(sum(recent) / len(recent))
    return means


def thin_out(series: Series, *, max_points: int) -> Series:
    """Return a series of at most so many points, each the mean of as many neighbours."""
    size = -(-len(series.xs) // max_points)
    if size <= 1:
        return series
    starts = range(0, len(series.xs), size)
    return Series(
        series.name,
        [_mean(series.xs[start : start + size]) for start in starts],
        [_mean(series.ys[start : start + size]) for start in starts],
    )


def round_ticks(low: float, high: float, *, most: int = 5) -> list[float]:
    """Return round numbers, evenly spaced, from at or below `low` to at or above `high`.

    Args:
        low: smallest number to show.
        high: largest; not below `low`.
        most: how many intervals there are at most.
    """
    if not high - low > max(abs(high) * 1e-9, 1e-300):
        half = max(abs(high) / 2, 1e-300) if high else 0.5
        low, high = low - half, high + half
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (power * factor for factor in (1, 2, 2.5, 5, 10, 20))
    for step in steps:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def short_number(value: float) -> str:
    """Write a number in a few characters: 0.0123, 1.5, 12,345, 3.4e-07."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e7 or size < 1e-4:
        return f"{value:.2g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size < 1 else f"{value:.5g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
