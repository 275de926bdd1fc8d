"""Train a tiny model in each of six environments, and measure the improvement.

Usage: python benchmarks/environment_training.py [--rows blackjack,hangman] [--steps N]
       [--output DIR]

Each row runs the whole loop: a vLLM server on the CPU, the trajectory service, the environment's
`serve` and the GRPO trainer. The model is created as in the demo (`example_trainer/demo`): a
tokenizer trained on conversations of the environment, and about a million random weights, which
first imitate a scripted policy for a minute. The environment's `evaluate` measures the model before
and after, at temperature 1 like rollouts; `start` is the baseline.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # this folder has a module `environments` too

from benchmarks.demo_runs import names_of  # noqa: E402
from benchmarks.environment_training_parts.tasks import TASKS, TrainingTask  # noqa: E402
from benchmarks.environment_training_parts.training import Trained, train  # noqa: E402
from example_trainer.demo.settings import DemoPaths  # noqa: E402
from example_trainer.launch.report import RunProgress  # noqa: E402
from example_trainer.reporting.page import rolling_mean  # noqa: E402

LAST_STEPS = 5
CURVE_COLUMNS = 2
CURVE_INCHES = 3.2
CURVE_MEAN_STEPS = 10


def main() -> None:
    """Train the selected rows, write curves and results, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=names_of(TASKS), default=list(TASKS), help=", ".join(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="trainer steps; the default depends on the row")
    parser.add_argument("--output", type=Path, help="folder of runs, curves and figures.json")
    args = parser.parse_args()
    # Python warns about third-party packages when it compiles them, in the first run.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    output = args.output or Path("training_runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    figures: dict[str, dict[str, Any]] = {}
    for name in args.rows:
        paths = DemoPaths(output.resolve() / name)
        paths.logs.mkdir(parents=True)
        task = TASKS[name](paths.output, args.seed)
        if args.steps:
            task = replace(task, settings=replace(task.settings, steps=args.steps))
        Console().rule(name)
        with RunProgress() as progress:
            figures[name] = _figures(task, train(task, paths, progress), paths)
        text = json.dumps(figures, indent=2)
        (output / "figures.json").write_text(text + "\n", encoding="utf-8")
        write_curves(figures, output / "curves.png")
    Console().print(_table(figures))
    for name, row in figures.items():
        text = f"{name}: {row['measure']}; curve in {row['curve']}"
        Console().print(text, highlight=False, soft_wrap=True)


def _figures(task: TrainingTask, trained: Trained, paths: DemoPaths) -> dict[str, Any]:
    start, end = trained.start, trained.end
    rewards = [point.reward for point in trained.points]
    return {
        "measure": task.measure,
        "episodes": len(end.values),
        "start": start.mean,
        "end": end.mean,
        "rise": end.mean - start.mean,
        "start_standard_error": start.standard_error,
        "end_standard_error": end.standard_error,
        "rise_standard_error": math.hypot(start.standard_error, end.standard_error),
        "steps": task.settings.steps,
        "trajectories_per_step": task.settings.sequences_per_step,
        "first_rewards": statistics.fmean(rewards[:LAST_STEPS]),
        "last_rewards": statistics.fmean(rewards[-LAST_STEPS:]),
        "start_metrics": start.metrics,
        "end_metrics": end.metrics,
        "seed": task.settings.seed,
        "seconds": trained.seconds,
        "curve": str(paths.curve),
        "reward_label": task.reward.label,
        "rewards": [list(point) for point in trained.points],
    }


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="six environments, before and after training")
    table.add_column("environment", no_wrap=True)
    for column in ("episodes", "start", "end", "rise", "steps", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in figures.items():
        table.add_row(
            name,
            str(row["episodes"]),
            f"{row['start']:.3f}",
            f"{row['end']:.3f}",
            f"{row['rise']:+.3f} ± {row['rise_standard_error']:.3f}",
            str(row["steps"]),
            f"{row['seconds']:.0f}",
        )
    return table


def write_curves(figures: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the rewards of each row, and the measurements before and after, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_lines = -(-len(figures) // CURVE_COLUMNS)
    figure = Figure(figsize=(10, CURVE_INCHES * num_lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(num_lines, CURVE_COLUMNS, squeeze=False).flat)
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
    label = f"mean of {CURVE_MEAN_STEPS} steps"
    axes.plot(
        steps, rolling_mean(rewards, CURVE_MEAN_STEPS), color="#253237", linewidth=2, label=label
    )
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


if __name__ == "__main__":
    main()
