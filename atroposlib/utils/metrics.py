"""Summary statistics of a metric's buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["get_std_min_max_avg"]


def get_std_min_max_avg(
    name: str, data: Sequence[float], metrics_dict: dict[str, Any]
) -> dict[str, Any]:
    """Add the mean, population deviation, maximum and minimum of a buffer to a metrics dict.

    Args:
        name: metric name; the keys are `<name>_mean`, `_std`, `_max` and `_min`.
        data: the values; an empty buffer adds nothing.
        metrics_dict: changed in place.

    Returns:
        `metrics_dict` itself.
    """
    if len(data) == 0:
        return metrics_dict

    import numpy as np

    metrics_dict[f"{name}_mean"] = np.mean(data)
    metrics_dict[f"{name}_std"] = np.std(data)
    metrics_dict[f"{name}_max"] = np.max(data)
    metrics_dict[f"{name}_min"] = np.min(data)
    return metrics_dict
