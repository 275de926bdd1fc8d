"""Distill a better model into the demo's model, without rewards; measure its accuracy.

Each row starts from the same warmed-up student and runs the whole loop: a vLLM server, the service,
an environment that sends each group to the vLLM server of the teacher, and the trainer without a
policy loss. The baseline is a student that is its own teacher.

Usage: python benchmarks/distillation.py [--rows itself,cross_entropy] [--steps N] [--json FILE]
       [--student FOLDER --teacher FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)  # this folder has a module `environments` too

from benchmarks.demo_runs import names_of, run_demo  # noqa: E402
from example_trainer.demo.cli import measure_held_out  # noqa: E402
from example_trainer.demo.settings import (  # noqa: E402
    DemoPaths,
    DemoSettings,
    demo_plan,
    environment_settings,
)
from example_trainer.demo.task import held_out_problems  # noqa: E402
from example_trainer.launch.stack import (  # noqa: E402
    common_variables,
    engine_arguments,
    engine_variables,
)
from example_trainer.processes import (  # noqa: E402
    ManagedProcess,
    find_free_port,
    wait_until_ready,
)

ENVIRONMENT = Path("environments/reasoning_gym_environment/reasoning_gym_teacher_distill.py")
TOP_K = 8
NUM_STEPS_AT_ENDS = 3
"""Steps over which the divergence at the start and at the end is averaged."""


@dataclass(frozen=True)
class Row:
    """Settings of one row."""

    loss: str
    is_own_teacher: bool = False


ROWS: dict[str, Row] = {
    "itself": Row("cross_entropy", is_own_teacher=True),
    "cross_entropy": Row("cross_entropy"),
    "reverse_kl": Row("reverse_kl"),
}


@dataclass(frozen=True)
class Teacher:
    """A model on its own vLLM server."""

    model: Path
    base_url: str

    def sections(self, *, top_k: int) -> dict[str, dict[str, Any]]:
        """Return the sections of the environment's YAML file.

        Args:
            top_k: Most likely tokens per position that the environment requests.
        """
        return {
            "env": {
                "teacher_enabled": True,
                "teacher_top_k": top_k,
                # Groups with equal scores are as useful for distillation as others.
                "ensure_scores_are_not_same": False,
            },
            "teacher": {
                "server_type": "vllm",
                "base_url": self.base_url,
                "model_name": str(self.model),
                "tokenizer_name": str(self.model),
                "api_key": "none",  # pragma: allowlist secret
            },
        }

    def accuracy(self, settings: DemoSettings) -> float:
        """Return the accuracy on the held-out problems of the student."""
        env = environment_settings(settings)
        return measure_held_out(
            self.base_url,
            model_name=str(self.model),
            problems=held_out_problems(env),
            max_tokens=settings.max_tokens // 2,
            on_tick=lambda num_answered: None,
        ).accuracy


@contextmanager
def serve_teacher(settings: DemoSettings, model: Path, *, log_path: Path) -> Iterator[Teacher]:
    """Serve a model with the demo's engine settings.

    Raises:
        ProcessFailedError: vLLM ended, or was not ready in time.
    """
    import torch

    port, on_gpu = find_free_port(), torch.cuda.is_available()
    # vLLM generates one token after the trajectory that the teacher reads.
    room = replace(settings, max_tokens=settings.max_tokens + 1)
    plan = demo_plan(room, DemoPaths(Path()), model=str(model), on_gpu=on_gpu)
    process = ManagedProcess(
        "teacher",
        [sys.executable, *engine_arguments(plan, port=port)],
        log_path=log_path,
        env={**common_variables(plan, os.environ), **engine_variables(plan, os.environ)},
        cwd=REPOSITORY,
    )

    def is_healthy() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    with process:
        wait_until_ready(process, is_healthy, timeout_s=settings.start_limit_s)
        yield Teacher(model, f"http://127.0.0.1:{port}/v1")


def main() -> None:
    """Run the selected rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=names_of(ROWS), default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=40, help="trainer steps per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--student", type=Path, help="a warmed-up tiny model")
    parser.add_argument("--teacher", type=Path, help="a better model; both are created by default")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
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
            figures[name] = _distill(
                settings,
                teacher=(student if own else teacher).resolve(),
                loss=ROWS[name].loss,
                folder=Path(folder) / name,
            )
            Console().print(f"{name}: {figures[name]}", highlight=False, soft_wrap=True)
    Console().print(_table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _distill(settings: DemoSettings, *, teacher: Path, loss: str, folder: Path) -> dict[str, float]:
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
        "divergence_at_start": statistics.mean(divergences[:NUM_STEPS_AT_ENDS]),
        "divergence_at_end": statistics.mean(divergences[-NUM_STEPS_AT_ENDS:]),
        "taught": _taught_fraction(run.steps),
        "seconds": run.result.seconds,
    }


def _taught_fraction(steps: Sequence[dict[str, Any]]) -> float:
    """Return the fraction of trained tokens that have teacher logprobs."""
    taught = sum(step.get("distill/token_count", 0.0) for step in steps)
    return float(taught / sum(step["train/trained_tokens"] for step in steps))


def _table(figures: dict[str, dict[str, float]]) -> Table:
    table = Table(title="held-out accuracy before and after distillation without rewards")
    for column in ("loss", "student before", "teacher", "student after", "change"):
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
