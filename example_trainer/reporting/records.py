"""The metrics of a run as they lie in its JSONL file, one record per step; pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from example_trainer.reporting.series import Series

__all__ = ["STEP_SIGN", "RunRecords", "read_records", "series_of"]

STEP_SIGN = "train/loss"
"""A record of an optimiser step has it, and no other record has."""


class RunRecords(NamedTuple):
    """What a metrics file says of its newest run."""

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
