"""Summarise an environment's buffers under their metric names; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atroposlib.utils.metrics import get_std_min_max_avg

__all__ = ["completion_length_metrics", "duration_metrics"]

COUNT_NAMES = {
    "succeeded_task_duration": "train/items_sent_to_api",
    "failed_task_duration": "train/items_rejected",
}
"""Buffers whose length is a metric of its own."""


def completion_length_metrics(lengths: Sequence[int], *, max_token_len: int) -> dict[str, Any]:
    """Summarise completion lengths.

    Args:
        lengths: one count of trained tokens per trajectory.
        max_token_len: the trainer's limit; `_p95` is the fraction of lengths above 95% of it.
    """
    if not lengths:
        return {}
    metrics: dict[str, Any] = {}
    get_std_min_max_avg("train/completion_lengths", lengths, metrics)
    metrics["train/completion_lengths"] = metrics.pop("train/completion_lengths_mean")
    num_long = sum(1 for length in lengths if length > 0.95 * max_token_len)
    metrics["train/completion_lengths_p95"] = num_long / len(lengths)
    return metrics


def duration_metrics(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Summarise one performance buffer as `train_perf/<name>_mean`, `_std`, `_max`, `_min`.

    Args:
        name: the buffer's name; those of `COUNT_NAMES` add their number of values.
        values: seconds, or counts.
    """
    metrics: dict[str, Any] = {}
    get_std_min_max_avg(f"train_perf/{name}", values, metrics)
    if name in COUNT_NAMES:
        metrics[COUNT_NAMES[name]] = len(values)
    return metrics
