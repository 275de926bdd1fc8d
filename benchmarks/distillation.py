"""Distil the demo's model from a better one, without rewards; measure what it learns.

Every row starts from the same warmed-up student and goes through the whole loop: a vLLM server, the
service, an environment that asks a second vLLM server about every group, and the trainer, whose
policy loss is switched off. The floor is a student that is its own teacher.

Usage: python benchmarks/distillation.py [--rows itself,cross_entropy] [--steps N] [--json FILE]
       [--student FOLDER --teacher FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # in this folder `environments` would be a benchmark, not the package

from benchmarks.demo_runs import names_of, run_demo  # noqa: E402
from benchmarks.distillation_parts.teacher import ENVIRONMENT, serve_teacher  # noqa: E402
from example_trainer.demo.settings import DemoSettings  # noqa: E402

TOP_K = 8
ENDS = 3
"""Steps the divergence at the start and at the end is a mean of."""


@dataclass(frozen=True)
class Row:
    """One way to be taught."""

    loss: str
    is_own_teacher: bool = False


ROWS: dict[str, Row] = {
    "itself": Row("cross_entropy", is_own_teacher=True),
    "cross_entropy": Row("cross_entropy"),
    "reverse_kl": Row("reverse_kl"),
}


def main() -> None:
    """Run the rows that were asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=names_of(ROWS), default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=40, help="trainer steps of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--student", type=Path, help="a warmed-up tiny model")
    parser.add_argument("--teacher", type=Path, help="a better one; default: both made first")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if (args.student is None) != (args.teacher is None):
        parser.error("give both --student and --teacher, or neither")
    with TemporaryDirectory() as folder:
        settings = replace(DemoSettings(), seed=args.seed)
        student, teacher = args.student, args.teacher
        if student is None:
            paths = run_demo(settings, Path(folder) / "start").paths
            student, teacher = paths.tiny_model, paths.checkpoints / "final_model"
        settings = replace(settings, steps=args.steps, warmed_up_model=student.resolve())
        figures = {}
        for name in args.rows:
            own = ROWS[name].is_own_teacher
            figures[name] = _distil(
                settings,
                teacher=(student if own else teacher).resolve(),
                loss=ROWS[name].loss,
                folder=Path(folder) / name,
            )
            Console().print(f"{name}: {figures[name]}", highlight=False, soft_wrap=True)
    Console().print(_table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _distil(settings: DemoSettings, *, teacher: Path, loss: str, folder: Path) -> dict[str, float]:
    with serve_teacher(settings, teacher, log_path=folder.with_suffix(".log")) as served:
        accuracy = served.accuracy(settings)
        run = run_demo(
            replace(
                settings,
                environment_door=ENVIRONMENT,
                environment_sections=served.sections(top_k=TOP_K),
                trainer_flags=("--policy-coef=0", "--distill-coef=1", f"--distill-loss={loss}"),
            ),
            folder,
        )
    before, after = run.result.before.accuracy, run.result.after.accuracy
    divergences = [float(step["distill/kl"]) for step in run.steps]
    return {
        "before": before,
        "teacher": accuracy,
        "after": after,
        "rise": after - before,
        "divergence_at_start": statistics.mean(divergences[:ENDS]),
        "divergence_at_end": statistics.mean(divergences[-ENDS:]),
        "taught": _taught_share(run.steps),
        "seconds": run.result.seconds,
    }


def _taught_share(steps: Sequence[dict[str, Any]]) -> float:
    """Return the share of the completions' tokens for which there was a teacher's answer."""
    taught = sum(step.get("distill/token_count", 0.0) for step in steps)
    return float(taught / sum(step["train/trained_tokens"] for step in steps))


def _table(figures: dict[str, dict[str, float]]) -> Table:
    table = Table(title="held-out accuracy of a student taught by another model, without rewards")
    for column in ("loss", "student before", "teacher", "student after", "rise"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for column in ("divergence at start", "at end", "tokens taught", "seconds"):
        table.add_column(column, justify="right")
    for name, row in figures.items():
        table.add_row(
            name,
            *(f"{row[column]:.1%}" for column in ("before", "teacher", "after")),
            f"{row['rise']:+.1%}",
            f"{row['divergence_at_start']:.3f}",
            f"{row['divergence_at_end']:.3f}",
            f"{row['taught']:.0%}",
            f"{row['seconds']:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
