"""Train the demo's model with each policy loss, and with stale rollouts; measure what it learns.

Every row starts from the same warmed-up model and goes through the whole loop: a vLLM server, the
service, the environment and the trainer. The floor is the accuracy before training.

Usage: python benchmarks/algorithms.py [--rows grpo,gspo,stale] [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # in this folder `environments` would be a benchmark, not the package

from benchmarks.demo_runs import names_of, run_demo  # noqa: E402
from example_trainer.demo.settings import DemoSettings  # noqa: E402

LAST_STEPS = 5

# New weights after every eighth step only: what is trained on is 0 to 7 steps old, and what waits
# in the queue adds to it, so 4 on average.
STALE = ("--algorithm=dapo", "--vllm-restart-interval=8")

ROWS: dict[str, tuple[str, ...]] = {
    "grpo": ("--algorithm=grpo",),
    "dr_grpo": ("--algorithm=dr_grpo",),
    "dapo": ("--algorithm=dapo",),
    "gspo": ("--algorithm=gspo",),
    "cispo": ("--algorithm=cispo",),
    "stale": (*STALE, "--importance-correction=none"),
    "stale_truncated": (*STALE, "--importance-correction=token_truncate"),
}
"""Flags of the trainer by row."""


def main() -> None:
    """Run the rows that were asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=names_of(ROWS), default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=40, help="trainer steps of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a warmed-up tiny model; default: made first")
    parser.add_argument("--json", type=Path, help="write the figures here")
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
    """Make the model all rows start from, by a demo of one step."""
    return run_demo(replace(settings, steps=1), folder / "start").paths.tiny_model


def _train(settings: DemoSettings, folder: Path) -> dict[str, float]:
    result, steps, _ = run_demo(settings, folder)
    return {
        "before": result.before.accuracy,
        "after": result.after.accuracy,
        "rise": result.after.accuracy - result.before.accuracy,
        "last_rewards": statistics.mean(point.reward for point in result.points[-LAST_STEPS:]),
        "mismatch": statistics.mean(_mismatch(step) for step in steps),
        "staleness": statistics.mean(_staleness(step) for step in steps),
        "seconds": result.seconds,
    }


def _mismatch(step: dict[str, Any]) -> float:
    """Mean absolute difference of the trainer's and the sampler's logprob."""
    return float(step.get("alignment/diff_abs_mean", 0.0))


def _staleness(step: dict[str, Any]) -> float:
    """Policy versions between the sampling of a batch and its training, NaN when unknown."""
    return float(step.get("train/staleness_mean", "nan"))


def _table(figures: dict[str, dict[str, float]]) -> Table:
    table = Table(title="held-out accuracy by policy loss")
    table.add_column("loss", no_wrap=True)
    columns = ("before", "after", "rise", "reward at the end", "mismatch", "steps old", "s")
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
