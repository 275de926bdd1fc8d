"""Parse the JSONL metrics of a run and prepare its series for drawing; pure.

JSONL lines -> records, one per step -> series -> smoothed and thinned out, with round ticks
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "STEP_SIGN",
    "RunRecords",
    "Series",
    "read_records",
    "rolling_mean",
    "round_ticks",
    "series_of",
    "short_number",
    "thin_out",
]


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
    """Return a series shortened to a maximum length by averaging consecutive points."""
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


STEP_SIGN = "train/loss"
"""A record of an optimiser step has it, and no other record has."""


class RunRecords(NamedTuple):
    """The newest run recorded in a metrics file."""

    steps: Sequence[Mapping[str, Any]]
    """One record per optimiser step, in order; each has `step`."""
    num_unreadable: int
    """Lines that hold no record; a file that is still being written may end in one."""


def read_records(lines: Iterable[str]) -> RunRecords:
    """Read the newest run of a metrics file.

    Of two records of a step the later one counts. A file to which a second run was appended begins
    again at its first step, and what stood before is left out.

    Args:
        lines: of the file.
    """
    by_step: dict[int, Mapping[str, Any]] = {}
    num_unreadable = 0
    first: int | None = None
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            num_unreadable += 1
            continue
        if STEP_SIGN not in record:
            continue
        if first is None or step <= first:
            by_step, first = {}, step
        by_step[step] = record
    return RunRecords([by_step[step] for step in sorted(by_step)], num_unreadable)


def series_of(steps: Sequence[Mapping[str, Any]], key: str, name: str) -> Series | None:
    """Return one metric over the steps that have a finite number for it; None without any.

    Args:
        steps: records with `step`.
        key: of the metric.
        name: of the line in a legend.
    """
    points = [
        (float(record["step"]), float(record[key]))
        for record in steps
        if isinstance(record.get(key), int | float) and math.isfinite(record[key])
    ]
    if not points:
        return None
    return Series(name, [x for x, _ in points], [y for _, y in points])
