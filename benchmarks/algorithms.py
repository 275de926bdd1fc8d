"""Train the demo's model with each policy loss, and with stale rollouts; measure its accuracy.

Each row starts from the same warmed-up model and runs the whole loop: a vLLM server, the service,
the environment and the trainer. The baseline is the accuracy before training.

Usage: python benchmarks/algorithms.py [--rows grpo,gspo,stale] [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # this folder has a module `environments` too

from benchmarks.demo_runs import names_of, run_demo  # noqa: E402
from example_trainer.demo.settings import DemoSettings  # noqa: E402

LAST_STEPS = 5

# New weights after every eighth step only: rollouts are 0 to 7 steps old when sampled, plus their
# time in the queue; 4 steps on average.
STALE = ("--algorithm=dapo", "--vllm-restart-interval=8")

ROWS: dict[str, tuple[str, ...]] = {
    "grpo": ("--algorithm=grpo",),
    "dr_grpo": ("--algorithm=dr_grpo",),
    "dapo": ("--algorithm=dapo",),
    "gspo": ("--algorithm=gspo",),
    "cispo": ("--algorithm=cispo",),
    "two_updates": ("--num-iterations=2",),
    "four_updates": ("--num-iterations=4",),
    "stale": (*STALE, "--importance-correction=none"),
    "stale_truncated": (*STALE, "--importance-correction=token_truncate"),
}
"""Flags of the trainer by row."""


def main() -> None:
    """Run the selected rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=names_of(ROWS), default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=40, help="trainer steps per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a warmed-up tiny model; created by default")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        settings = replace(DemoSettings(), seed=args.seed, steps=args.steps)
        model = args.model or _warmed_up(settings, Path(folder))
        figures = {}
        for name in args.rows:
            figures[name] = _train(
                replace(settings, warmed_up_model=model, trainer_flags=ROWS[name]),
                Path(folder) / name,
            )
            Console().print(f"{name}: {figures[name]}", highlight=False)
    Console().print(_table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _warmed_up(settings: DemoSettings, folder: Path) -> Path:
    # The demo saves the warmed-up model before its only step.
    return run_demo(replace(settings, steps=1), folder / "start").paths.tiny_model


def _train(settings: DemoSettings, folder: Path) -> dict[str, float]:
    result, steps, _ = run_demo(settings, folder)
    return {
        "before": result.before.accuracy,
        "after": result.after.accuracy,
        "rise": result.after.accuracy - result.before.accuracy,
        "last_rewards": statistics.mean(point.reward for point in result.points[-LAST_STEPS:]),
        "mismatch": _mean_of(steps, "alignment/diff_abs_mean", missing=0.0),
        "staleness": _mean_of(steps, "train/staleness_mean", missing=math.nan),
        "seconds": result.seconds,
    }


def _mean_of(steps: Sequence[dict[str, Any]], metric: str, *, missing: float) -> float:
    return statistics.mean(float(step.get(metric, missing)) for step in steps)


def _table(figures: dict[str, dict[str, float]]) -> Table:
    table = Table(title="held-out accuracy by policy loss")
    table.add_column("loss", no_wrap=True)
    columns = ("before", "after", "change", "last rewards", "mismatch", "staleness", "s")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in figures.items():
        table.add_row(
            name,
            f"{row['before']:.1%}",
            f"{row['after']:.1%}",
            f"{row['rise']:+.1%}",
            f"{row['last_rewards']:.2f}",
            f"{row['mismatch']:.3f}",
            f"{row['staleness']:.1f}",
            f"{row['seconds']:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
