"""The Markdown table an evaluation prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["display_metrics_table", "format_metrics_table"]

COLUMNS = ("Groups", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")


def format_metrics_table(task_name: str | None, metrics: Mapping[str, Any]) -> str:
    """Return the Markdown table of an evaluation's metrics.

    Args:
        task_name: first column of every row.
        metrics: name to value; a value that is not a number is shown as it is.

    Returns:
        One header, one rule and one row per metric, columns as wide as needed.
    """
    rows = [list(COLUMNS)]
    for name, value in metrics.items():
        direction = "↑" if "correct" in name or "acc" in name else ""
        label = name.removeprefix("eval/").replace("_", " ")
        shown = _format_value(value)
        rows.append([str(task_name), "1", "none", "", label, direction, shown, "±", "0.0000"])
    widths = [max(1, *(len(row[i]) for row in rows)) for i in range(len(COLUMNS))]
    lines = [_format_row(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def display_metrics_table(
    task_name: str | None, metrics: Mapping[str, Any], start_time: float, end_time: float
) -> None:
    """Print the table of an evaluation's metrics with its title and duration.

    Args:
        task_name: named in the title and in every row.
        metrics: name to value; may be empty.
        start_time: seconds since the epoch.
        end_time: seconds since the epoch.
    """
    text = (
        f"\nEvaluation results: {task_name}\n"
        f"{format_metrics_table(task_name, metrics)}\n"
        f"Evaluation took {end_time - start_time:.2f} seconds"
    )
    print(text)  # noqa: T201 - printing is what callers ask this function for


def _format_row(cells: list[str], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"


def _format_value(value: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value).replace("\n", " ")
    return f"{number:.4f}" if math.isfinite(number) else str(number)
