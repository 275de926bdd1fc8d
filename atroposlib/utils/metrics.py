"""Summary statistics of a metric's buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["get_std_min_max_avg"]


def get_std_min_max_avg(
    name: str, data: Sequence[float], metrics_dict: dict[str, Any]
) -> dict[str, Any]:
    """Add `<name>_mean`, `_std` (population), `_max` and `_min` of the values to `metrics_dict`.

    Returns:
        `metrics_dict`, changed in place; unchanged without values.
    """
    if len(data) == 0:
        return metrics_dict

    import numpy as np

    metrics_dict[f"{name}_mean"] = np.mean(data)
    metrics_dict[f"{name}_std"] = np.std(data)
    metrics_dict[f"{name}_max"] = np.max(data)
    metrics_dict[f"{name}_min"] = np.min(data)
    return metrics_dict
