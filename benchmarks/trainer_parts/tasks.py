"""Tasks of the contenders, and their results, across the border of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_parts.workload import Workload

__all__ = ["Measured", "StepTask", "main_of", "read_measured", "run_in_process", "write_measured"]


class StepTask(NamedTuple):
    """Steps that a contender takes."""

    model: str
    """Folder of the model."""
    folder: str
    """Folder for files of the contender."""
    workload: Workload
    layout: str = "default"
    """Layout of the sequences in our trainer: `default`, `padded`, `packed` or `shared`."""
    checkpointing: bool = True
    device: str = "cpu"

    def to_json(self) -> str:
        """Return the task as the argument of a process."""
        return json.dumps(self._asdict() | {"workload": self.workload._asdict()})

    @classmethod
    def from_json(cls, text: str) -> StepTask:
        """Read a task."""
        fields = json.loads(text)
        return cls(**fields | {"workload": Workload(**fields["workload"])})


class Measured(NamedTuple):
    """Results of a contender."""

    figures: dict[str, Any]
    gradient: dict[str, Any]
    """Sampled entries of the first gradient, by parameter."""


def write_measured(task: StepTask, found: Measured) -> None:
    """Write results to the folder of the task."""
    folder = Path(task.folder)
    torch.save(found.gradient, folder / "gradient.pt")
    (folder / "figures.json").write_text(json.dumps(found.figures))


def read_measured(task: StepTask) -> Measured:
    """Read the results that a process wrote to the folder of its task."""
    folder = Path(task.folder)
    figures = json.loads((folder / "figures.json").read_text())
    return Measured(figures, torch.load(folder / "gradient.pt"))


def run_in_process(task: StepTask, command: Sequence[str], *, threads: int) -> Measured:
    """Run a task as the last argument of a command of this interpreter; return its results.

    Raises:
        RuntimeError: The command failed; the message has its output.
    """
    done = subprocess.run(
        [sys.executable, *command, task.to_json()],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return read_measured(task)


def main_of(measure: Callable[[StepTask], Measured]) -> None:
    """Run the task in `sys.argv[1]` and write the results."""
    task = StepTask.from_json(sys.argv[1])
    write_measured(task, measure(task))
