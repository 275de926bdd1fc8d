"""What the newest requests to one server took: seconds and attempts, and the metrics of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

__all__ = ["RequestStats", "request_metrics"]

T = TypeVar("T")


@dataclass
class RequestStats:
    """Timings of one split (training or evaluation) of one server.

    Attributes:
        max_length: Newest requests kept.
        timings_s: Seconds from the first attempt to the answer, oldest first.
        attempts: Attempts made per answered request, oldest first.
    """

    max_length: int
    timings_s: list[float] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)

    def record(self, *, seconds: float, num_attempts: int) -> None:
        """Add one answered request and forget the oldest beyond `max_length`."""
        _append_bounded(self.timings_s, seconds, self.max_length)
        _append_bounded(self.attempts, num_attempts, self.max_length)

    def timing_metrics(self) -> dict[str, float]:
        """Return `request_time_avg`, `_std` and `_99p` in seconds; empty without data."""
        if not self.timings_s:
            return {}
        timings = np.asarray(self.timings_s)
        return {
            "request_time_avg": float(timings.mean()),
            "request_time_std": float(timings.std()),
            "request_time_99p": float(np.percentile(timings, 99)),
        }


def request_metrics(
    server_name: str | None, *, train: RequestStats, eval_: RequestStats
) -> dict[str, float]:
    """Return the metrics of one server under `server/<name>_...`; only those with data."""
    prefix = f"server/{server_name or 'server'}_"
    metrics = {f"{prefix}{name}": value for name, value in train.timing_metrics().items()}
    metrics |= {f"{prefix}eval_{name}": value for name, value in eval_.timing_metrics().items()}
    if train.attempts:
        metrics[f"{prefix}average_num_attempts"] = float(np.mean(train.attempts))
    if eval_.attempts:
        metrics[f"{prefix}eval_retry_rate"] = float(np.mean(eval_.attempts))
    return metrics


def _append_bounded(values: list[T], value: T, max_length: int) -> None:
    values.append(value)
    del values[:-max_length]
