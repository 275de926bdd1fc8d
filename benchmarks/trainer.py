"""Measure an optimizer step of the trainer, and of TRL's GRPOTrainer with the same batch.

Each contender is a separate process with the same model, token ids and scores. It takes the same
optimizer steps: AdamW in float32, the DAPO denominator, no KL and no dropout. Completions are
prepared in advance. Processes alternate over the repeats, and the medians count, since other
processes may use the machine. For the same reason, each process has one thread by default.

Workloads: `plain` completions of similar lengths, `heavy-tailed` lengths, and a `shared prefix`
of 384 tokens with 8 completions of about 128.

Contenders:

- TRL's GRPOTrainer. It pads a batch to its longest prompt and completion, and computes logprobs
  without storing logits. It has no packed or padding-free rows, and its Liger and hub kernels need
  a GPU.
- ours with packed rows, and with its defaults, where packed rows compute equal prefixes once.

All have 8 sequences per forward pass, TRL's default; ours has them on average.

Only the step is timed: forward, loss, backward, clipping, optimizer. The time in which TRL prepares
a batch (reward, advantages, padding) is excluded, ours is included. The first gradients are
compared entry by entry, at equal distances in every tensor. Peak memory is the maximum resident set
during the steps; `above the model` excludes the memory used before the first step.

Both use gradient checkpointing, as is the default of both; `--no-checkpointing` turns it off.
Needs TRL, which is part of the extra `dev`.

Usage: python benchmarks/trainer.py [--workload plain] [--repeats 3] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from trainer_parts.models import MODEL_SIZES, write_model
from trainer_parts.step_log import GradientGap, gradient_gap
from trainer_parts.tasks import Measured, StepTask, run_in_process
from trainer_parts.workload import CPU_WORKLOADS, Workload

_SPEED_TARGET, _MEMORY_TARGET = 1.5, 0.7
_SAME_GRADIENT = 1e-3
"""Largest relative difference of float32 gradients that counts as equal."""


class Contender(NamedTuple):
    """A trainer with its settings."""

    module: str
    layout: str = "default"


CONTENDERS = {
    "TRL": Contender("trl_steps"),
    "ours, packed": Contender("our_steps", "packed"),
    "ours, default": Contender("our_steps"),
}


def run_once(
    contender: Contender, folder: Path, workload: Workload, *, checkpointing: bool, threads: int
) -> Measured:
    """Run one contender in another process; return its results."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    task = StepTask(
        model=str(folder / "model"),
        folder=str(work),
        workload=workload,
        layout=contender.layout,
        checkpointing=checkpointing,
    )
    return run_in_process(task, ["-m", f"trainer_parts.{contender.module}"], threads=threads)


def measure(
    folder: Path, workload: Workload, *, repeats: int, checkpointing: bool, threads: int
) -> dict[str, dict[str, Any]]:
    """Return the median figures of every contender, and its gap to TRL's first gradient."""
    runs: dict[str, list[Measured]] = {name: [] for name in CONTENDERS}
    for _ in range(repeats):
        for name, contender in CONTENDERS.items():
            found = run_once(
                contender, folder, workload, checkpointing=checkpointing, threads=threads
            )
            runs[name].append(found)
    reference = next(iter(runs.values()))[0].gradient
    return {
        name: {
            figure: statistics.median(run.figures[figure] for run in found)
            for figure in found[0].figures
        }
        | {"gradient_gap": gradient_gap(found[0].gradient, reference)._asdict()}
        for name, found in runs.items()
    }


def ratios_of(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return speed and memory of our contenders, divided by TRL's."""
    theirs = results["TRL"]
    return {
        name: {
            "speed": theirs["step_s"] / found["step_s"],
            "cpu_speed": theirs["step_cpu_s"] / found["step_cpu_s"],
            "peak_memory": found["peak_mib"] / theirs["peak_mib"],
            "memory_above_model": found["peak_above_model_mib"] / theirs["peak_above_model_mib"],
        }
        for name, found in results.items()
        if found is not theirs
    }


def show(workload: Workload, results: dict[str, dict[str, Any]]) -> None:
    """Print the table of a workload and the ratios."""
    console = Console(width=120)
    table = Table(
        "contender", "tokens/s", "step s", "CPU s", "peak MiB", "above the model MiB",
        "gradient, max difference", "relative", title=workload.describe(),
    )  # fmt: skip
    for name, found in results.items():
        gap = GradientGap(**found["gradient_gap"])
        table.add_row(
            name,
            f"{found['tokens_per_s']:,.0f}",
            f"{found['step_s']:.2f}",
            f"{found['step_cpu_s']:.2f}",
            f"{found['peak_mib']:,.0f}",
            f"{found['peak_above_model_mib']:,.0f}",
            f"{gap.max_abs:.1e}",
            f"{gap.relative:.1e}",
        )
    console.print(table)
    for name, ratio in ratios_of(results).items():
        console.print(
            f"{name}: {ratio['speed']:.2f} x TRL's tokens/s (target {_SPEED_TARGET}), "
            f"{ratio['cpu_speed']:.2f} x by CPU time, {ratio['peak_memory']:.2f} x its peak memory "
            f"(target {_MEMORY_TARGET}), {ratio['memory_above_model']:.2f} x above the model"
        )
        if results[name]["gradient_gap"]["relative"] > _SAME_GRADIENT:
            console.print(
                f"[red]{name}: the gradient differs from TRL's; the results are not comparable"
            )


def main() -> None:
    """Measure every contender and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload", choices=list(CPU_WORKLOADS), help="only this one (default: all)"
    )
    parser.add_argument("--steps", type=int, default=2, help="timed optimizer steps of a process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each contender")
    parser.add_argument(
        "--no-checkpointing", action="store_true", help="train without gradient checkpointing"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each contender")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    names = [arguments.workload] if arguments.workload else list(CPU_WORKLOADS)
    everything: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", MODEL_SIZES["cpu"])
        for name in names:
            workload = CPU_WORKLOADS[name]._replace(steps=arguments.steps)
            results = measure(
                Path(folder),
                workload,
                repeats=arguments.repeats,
                checkpointing=not arguments.no_checkpointing,
                threads=arguments.threads,
            )
            show(workload, results)
            everything[name] = {
                "workload": workload._asdict(),
                "results": results,
                "ratios": ratios_of(results),
            }
            if arguments.json:
                arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
