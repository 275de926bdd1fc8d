"""One picture of all rows: the reward while training, and what was measured before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from example_trainer.reporting.page import rolling_mean

__all__ = ["write_curves"]

_COLUMNS = 2
_ROW_INCHES = 3.2
_MEAN_STEPS = 10


def write_curves(figures: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw a panel per row as a PNG.

    Args:
        figures: By row: `rewards` ([steps] of step and reward), `reward_label`, and mean and
            standard error of the measurements before and after.
        path: The picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_lines = -(-len(figures) // _COLUMNS)
    figure = Figure(figsize=(10, _ROW_INCHES * num_lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(num_lines, _COLUMNS, squeeze=False).flat)
    for axes in panels:
        axes.axis("off")
    for axes, (name, row) in zip(panels, figures.items(), strict=False):
        axes.axis("on")
        _draw(axes, name, row)
    figure.savefig(path, dpi=90)


def _draw(axes: Any, name: str, row: Mapping[str, Any]) -> None:
    steps = [step for step, _ in row["rewards"]]
    rewards = [reward for _, reward in row["rewards"]]
    axes.plot(steps, rewards, color="#9db4c0", linewidth=1, label="one step")
    label = f"mean of {_MEAN_STEPS} steps"
    axes.plot(steps, rolling_mean(rewards, _MEAN_STEPS), color="#253237", linewidth=2, label=label)
    axes.errorbar(
        [0, row["steps"]],
        [row["start"], row["end"]],
        yerr=[row["start_standard_error"], row["end_standard_error"]],
        fmt="o",
        color="#c2571a",
        capsize=4,
        label="measured before and after",
    )
    axes.set(title=name, xlabel="trainer step", ylabel=row["reward_label"])
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
