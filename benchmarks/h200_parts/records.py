"""Figures, checks and failures of a part, written line by line as they are measured."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PartTask", "Records"]


class PartTask(NamedTuple):
    """Settings of a part."""

    part: str
    module: str
    """Module of this package whose function `part` measures it."""
    device: str
    is_tiny: bool
    folder: str
    """Folder for models and logs of the part."""
    results: str
    """File of the records, one JSON object per line."""
    limit_s: float
    """Seconds after which the part starts nothing further."""
    workloads: Sequence[str] = ()
    """Names of the workloads of steps; none: all."""
    contenders: Sequence[str] = ()
    """Names of the contenders of steps; none: all."""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


class Records:
    """Prints the records of a part and appends them to a file, so that a killed part keeps them."""

    def __init__(self, task: PartTask) -> None:
        self._task = task
        self._started = time.monotonic()
        self.num_failures = 0

    @property
    def seconds_left(self) -> float:
        return self._task.limit_s - (time.monotonic() - self._started)

    def figure(self, name: str, value: float | str | None, unit: str, *, case: str = "") -> None:
        """Record one measured value; None: it cannot be measured on this device."""
        self._write({"figure": name, "case": case, "value": value, "unit": unit})

    def check(self, name: str, *, holds: bool, detail: str, case: str = "") -> None:
        """Record whether a condition holds; one that does not fails the part."""
        self.num_failures += not holds
        self._write({"check": name, "case": case, "holds": holds, "detail": detail})

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Record an error in a case of the part; the next case runs in any event."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary of one measurement
            traceback.print_exc()
            reason = str(error).strip().splitlines() or [""]
            self.check(
                "runs", holds=False, detail=f"{type(error).__name__}: {reason[0][:300]}", case=name
            )

    def _write(self, record: dict[str, Any]) -> None:
        at = round(time.monotonic() - self._started, 1)
        line = json.dumps({"part": self._task.part, **record, "at_s": at})
        print(line, flush=True)
        with Path(self._task.results).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
