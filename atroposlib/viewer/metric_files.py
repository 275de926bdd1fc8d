"""What environments dropped, by reason, from the metrics files they write beside a run."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from atroposlib.utils.json_text import decode_line

__all__ = ["drops_in_metrics"]

_PREFIX = "drops/"
_READ_BYTES = 4 * 2**20
_MAX_FILES = 50


def drops_in_metrics(folder: Path) -> dict[str, float]:
    """Return counts by reason, over the last lines of every `metrics.jsonl` under a folder.

    Counts of one file grow with the run, so that its last line that has them counts.
    """
    total: Counter[str] = Counter()
    for path in sorted(folder.rglob("metrics.jsonl"))[:_MAX_FILES]:
        latest: dict[str, float] = {}
        for line in _last_lines(path):
            latest.update(_drops(line))
        for reason, count in latest.items():
            total[f"{path.parent.name}: {reason}"] += count  # type: ignore[assignment]
    return dict(total)


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def _drops(line: bytes) -> dict[str, float]:
    if _PREFIX.encode() not in line:
        return {}
    try:
        metrics = decode_line(line)
    except (ValueError, RecursionError):
        return {}
    found: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        before, prefix, reason = str(name).partition(_PREFIX)
        if prefix and isinstance(value, int | float):
            found[f"{before}{reason}"] = float(value)
    return found
