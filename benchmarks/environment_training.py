"""Train four environments, each from a tiny model that is poor at it, and measure the rise.

Usage: python benchmarks/environment_training.py [--rows blackjack,hangman] [--steps N]
       [--output DIR]

Every row goes through the whole loop: a vLLM server on the CPU, the trajectory service, the
environment's own `serve` and the GRPO trainer. The model is made as the demo makes its own
(`example_trainer/demo`): a tokenizer taught on conversations of this environment and about a
million random weights, which first imitate a poor player for a minute. It is not the demo's model,
which knows nothing but sums. What is measured, before and after, is what the environment's own
`evaluate` finds, sampled at temperature 1 as rollouts are; `start` is the floor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # in this folder `environments` would be a benchmark, not the package

from benchmarks.demo_runs import names_of  # noqa: E402
from benchmarks.environment_training_parts.arithmetic import arithmetic  # noqa: E402
from benchmarks.environment_training_parts.blackjack import blackjack  # noqa: E402
from benchmarks.environment_training_parts.curves import write_curves  # noqa: E402
from benchmarks.environment_training_parts.hangman import hangman  # noqa: E402
from benchmarks.environment_training_parts.lesson import Lesson  # noqa: E402
from benchmarks.environment_training_parts.tool_calls import tool_calling  # noqa: E402
from benchmarks.environment_training_parts.training import Trained, train  # noqa: E402
from example_trainer.demo.settings import DemoPaths  # noqa: E402
from example_trainer.launch.report import RunProgress  # noqa: E402

LESSONS: dict[str, Callable[[Path, int], Lesson]] = {
    "arithmetic": arithmetic,
    "blackjack": blackjack,
    "hangman": hangman,
    "tool_calling": tool_calling,
}
LAST_STEPS = 5


def main() -> None:
    """Train the rows that were asked for, write curves and figures, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=names_of(LESSONS), default=list(LESSONS), help=", ".join(LESSONS)
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="trainer steps; default: those of the row")
    parser.add_argument("--output", type=Path, help="folder for runs, curves and figures.json")
    args = parser.parse_args()
    # Python repeats these for other people's packages when it compiles them, on the first run.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    output = args.output or Path("training_runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    figures: dict[str, dict[str, Any]] = {}
    for name in args.rows:
        paths = DemoPaths(output.resolve() / name)
        paths.logs.mkdir(parents=True)
        lesson = LESSONS[name](paths.output, args.seed)
        if args.steps:
            lesson = replace(lesson, settings=replace(lesson.settings, steps=args.steps))
        Console().rule(name)
        with RunProgress() as progress:
            figures[name] = _figures(lesson, train(lesson, paths, progress), paths)
        text = json.dumps(figures, indent=2)
        (output / "figures.json").write_text(text + "\n", encoding="utf-8")
        write_curves(figures, output / "curves.png")
    Console().print(_table(figures))
    for name, row in figures.items():
        text = f"{name}: {row['measure']}; curve in {row['curve']}"
        Console().print(text, highlight=False, soft_wrap=True)


def _figures(lesson: Lesson, trained: Trained, paths: DemoPaths) -> dict[str, Any]:
    start, end = trained.start, trained.end
    rewards = [point.reward for point in trained.points]
    return {
        "measure": lesson.measure,
        "episodes": len(end.values),
        "start": start.mean,
        "end": end.mean,
        "rise": end.mean - start.mean,
        "start_standard_error": start.standard_error,
        "end_standard_error": end.standard_error,
        "rise_standard_error": math.hypot(start.standard_error, end.standard_error),
        "steps": lesson.settings.steps,
        "trajectories_per_step": lesson.settings.sequences_per_step,
        "first_rewards": statistics.fmean(rewards[:LAST_STEPS]),
        "last_rewards": statistics.fmean(rewards[-LAST_STEPS:]),
        "start_metrics": start.metrics,
        "end_metrics": end.metrics,
        "seed": lesson.settings.seed,
        "seconds": trained.seconds,
        "curve": str(paths.curve),
        "reward_label": lesson.reward.label,
        "rewards": [list(point) for point in trained.points],
    }


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="four environments, before and after training")
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


if __name__ == "__main__":
    main()
