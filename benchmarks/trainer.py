"""Measure an optimizer step of the trainer, and of TRL's GRPOTrainer with the same batch.

Each contender is a separate process with the same model, token ids, scores and number of sequences
per forward pass. It runs the same optimizer steps: AdamW in float32, the DAPO denominator, no KL
and no dropout. Completions have heavy-tailed lengths and are prepared in advance.

Only the step is timed: forward, loss, backward, clipping, optimizer. The time in which TRL prepares
a batch (reward, advantages, padding) is excluded, ours is included. The norm of the first gradient
is printed for both; it is equal if both do the same work. Peak memory is the maximum resident set
during the steps; `above the model` excludes the memory used before the first step. The fastest step
counts and is shown with its CPU time, since other processes may use the machine. For the same
reason, each process has one thread by default (`--threads`).

`--checkpointing` enables gradient checkpointing in all contenders. Needs TRL, which is part of the
extra `dev`. Takes about two minutes of one core.

Usage: python benchmarks/trainer.py [--checkpointing] [--threads 1] [--steps 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from trainer_parts.workload import Workload, write_model

_HERE = Path(__file__).resolve().parent
_CONTENDERS = {"TRL": "trl_steps", "ours, padded": "our_steps", "ours, packed": "our_steps"}
_SPEED_TARGET, _MEMORY_TARGET = 1.5, 0.7
_SAME_GRADIENT = 0.01


def measure(
    name: str, folder: Path, workload: Workload, *, checkpointing: bool, threads: int
) -> dict[str, Any]:
    """Run one contender in another process; return its results."""
    result = folder / "result.json"
    task = {
        "model": str(folder / "model"),
        "folder": str(folder / "work"),
        "workload": workload._asdict(),
        "packing": "on" if name == "ours, packed" else "off",
        "gradient_checkpointing": checkpointing,
        "result": str(result),
    }
    command = [sys.executable, "-m", f"trainer_parts.{_CONTENDERS[name]}", json.dumps(task)]
    done = subprocess.run(
        command,
        cwd=_HERE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the table and the targets."""
    console = Console()
    table = Table(
        "contender", "tokens/s", "step s", "CPU s", "peak MiB", "above the model MiB", "gradient"
    )
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['tokens_per_s']:,.0f}",
            f"{found['step_s']:.2f}",
            f"{found['step_cpu_s']:.2f}",
            f"{found['peak_mib']:,.0f}",
            f"{found['peak_above_model_mib']:,.0f}",
            f"{found['first_grad_norm']:.5f}",
        )
    console.print(table)
    theirs = results["TRL"]
    for name in ("ours, padded", "ours, packed"):
        ours = results[name]
        speed = ours["tokens_per_s"] / theirs["tokens_per_s"]
        cpu = theirs["step_cpu_s"] / ours["step_cpu_s"]
        whole = ours["peak_mib"] / theirs["peak_mib"]
        above = ours["peak_above_model_mib"] / theirs["peak_above_model_mib"]
        console.print(
            f"{name}: {speed:.2f} x TRL's tokens/s (target {_SPEED_TARGET}), {cpu:.2f} x by CPU "
            f"time, {whole:.2f} x its peak memory (target {_MEMORY_TARGET}), {above:.2f} x above "
            "the model"
        )
        if not math.isclose(
            ours["first_grad_norm"], theirs["first_grad_norm"], rel_tol=_SAME_GRADIENT
        ):
            console.print(
                f"[red]{name}: the gradient differs from TRL's; the results are not comparable"
            )


def main() -> None:
    """Measure every contender and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="timed optimizer steps")
    parser.add_argument("--checkpointing", action="store_true", help="use gradient checkpointing")
    parser.add_argument("--threads", type=int, default=1, help="threads of each contender")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    workload = Workload(steps=arguments.steps)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", workload)
        for name in _CONTENDERS:
            results[name] = measure(
                name,
                Path(folder),
                workload,
                checkpointing=arguments.checkpointing,
                threads=arguments.threads,
            )
    print(workload.describe())
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"workload": workload._asdict(), **results}, indent=1))


if __name__ == "__main__":
    main()
