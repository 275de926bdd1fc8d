"""The Markdown table an evaluation prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["display_metrics_table", "format_metrics_table"]

_ENDS = ("_stderr", "_ci_low", "_ci_high")
COLUMNS = ("Groups", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")


def format_metrics_table(task_name: str | None, metrics: Mapping[str, Any]) -> str:
    """Return the Markdown table of metrics, one row each, with `task_name` as first column.

    The standard error of a metric is its `<name>_stderr`, which has no row of its own; neither have
    the ends of its interval. It is empty if only other metrics have one, and 0 if none has.
    """
    has_errors = any(name.endswith("_stderr") for name in metrics)
    unknown = "" if has_errors else 0.0
    rows = [list(COLUMNS)]
    for name, value in metrics.items():
        if any(name.endswith(end) and name.removesuffix(end) in metrics for end in _ENDS):
            continue
        direction = "↑" if "correct" in name or "acc" in name else ""
        label = name.removeprefix("eval/").replace("_", " ")
        shown = _format_value(value)
        stderr = _format_value(metrics.get(f"{name}_stderr", unknown))
        rows.append([str(task_name), "1", "none", "", label, direction, shown, "±", stderr])
    widths = [max(1, *(len(row[i]) for row in rows)) for i in range(len(COLUMNS))]
    lines = [_format_row(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def display_metrics_table(
    task_name: str | None, metrics: Mapping[str, Any], start_time: float, end_time: float
) -> None:
    """Print the table of metrics with a title and the duration; times are in seconds."""
    text = (
        f"\nEvaluation results: {task_name}\n"
        f"{format_metrics_table(task_name, metrics)}\n"
        f"Evaluation took {end_time - start_time:.2f} seconds"
    )
    print(text)  # noqa: T201 - the purpose of this function


def _format_row(cells: list[str], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"


def _format_value(value: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value).replace("\n", " ")
    return f"{number:.4f}" if math.isfinite(number) else str(number)
