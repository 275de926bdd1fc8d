"""`atropos-replay run`: train a recorded run again and compare the weights after each step.

    recorded/ start_0.json ──► the same settings, seed and initial weights
              step_<n>.batch ──► the trainer's own loop ──► step_<n>.weights of the new run
              step_<n>.weights ◄──────── compared ─────────────────┘

The new run has neither a service nor an engine, and trains from the first step without a pause: a
recorded run that was killed and resumed has the weights of one that was not. On the CPU the weights
are equal bit by bit, with the same version of torch and the same number of threads.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    print_output,
)
from example_trainer.api import RECORD_DIRECTORY, read_batch
from example_trainer.config import TrainingConfig

__all__ = [
    "RecordedRun",
    "RecordedService",
    "RecordingEndedError",
    "WeightsDifferError",
    "main",
    "repeat",
]

logger = logging.getLogger(__name__)

_COMMAND = "atropos-replay run"
_UNRELATED = frozenset(
    (
        *("resume", "resume_or_start", "replace_run", "save_path"),
        *("atropos_url", "service_timeout_s", "lease_s", "engine_timeout_s"),
        *("checkpoint_interval", "checkpoint_minutes", "keep_checkpoints", "metrics_path", "quiet"),
        *("use_wandb", "wandb_project", "wandb_group", "use_tensorboard", "log_dir", "benchmark"),
        *("vllm_port", "vllm_host", "engine_urls", "engine", "vllm_restart_interval"),
        *("training_steps", "debug_loading"),
    )
)
"""Settings that do not change the weights, so that a resumed process may have others.
`training_steps` does if the learning rate follows a schedule, which `RecordedRun` checks."""


class WeightsDifferError(AtroposError):
    """The weights of a repeated step are not those that were recorded."""


class RecordingEndedError(AtroposError):
    """Every recorded step was repeated."""


class RecordedRun:
    """The record of one run.

    Args:
        folder: The `save_path` of the run.

    Attributes:
        num_steps: Steps that can be repeated.
        processed_logprobs: Whether the engine's logprobs were after temperature scaling.

    Raises:
        ConfigError: there is no record from the first step on, or its settings changed.
    """

    def __init__(self, folder: Path) -> None:
        self.directory = folder / RECORD_DIRECTORY
        start = self.directory / "start_0.json"
        if not start.is_file():
            raise ConfigError(
                f"{folder} has no record of a run from its first step: {start} is missing; train "
                "with --record-run"
            )
        first = _read_json(start)
        self.settings: dict[str, Any] = first["settings"]
        self.processed_logprobs = bool(first["processed_logprobs"])
        self.torch_version = str(first["torch"])
        self.torch_threads = int(first["torch_threads"])
        self.num_steps = 0
        while self.weights_after(self.num_steps + 1) is not None:
            self.num_steps += 1
        if not self.num_steps:
            raise ConfigError(f"{self.directory} has no complete step to repeat")
        for other in self.directory.glob("start_*.json"):
            self._refuse_other_settings(other, _read_json(other))

    def weights_after(self, step: int, *, directory: Path | None = None) -> str | None:
        """Return the checksum of the weights after a step; None if there is none."""
        path = (directory or self.directory) / f"step_{step}.weights"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def batch_of(self, step: int) -> LeasedBatch:
        """Return the batch of a step.

        Raises:
            ConfigError: it is missing or cannot be read.
        """
        path = self.directory / f"step_{step}.batch"
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing: the run was not recorded at that step; --record-run must be "
                "given at every start"
            )
        return read_batch(path)

    def config(self, output: Path, *, device: str | None) -> TrainingConfig:
        """Return the settings with which the run is repeated."""
        changes: dict[str, Any] = {
            "save_path": str(output),
            "resume": False,
            "resume_or_start": False,
            "record_run": True,
            "checkpoint_interval": 0,
            "metrics_path": None,
            "use_wandb": False,
            "use_tensorboard": False,
            "logprobs_mode": "processed" if self.processed_logprobs else "raw",
        }
        if device is not None:
            changes["device"] = device
        try:
            return TrainingConfig(**self.settings | changes)
        except ValueError as error:
            raise ConfigError(
                f"{self.directory} has settings that this version does not accept: {error}"
            ) from error

    def _refuse_other_settings(self, path: Path, start: dict[str, Any]) -> None:
        ignored = _UNRELATED
        if self.settings["lr_schedule"] != "constant":
            ignored = ignored - {"training_steps"}
        changed = [
            f"{name} was {self.settings.get(name)!r} and became {value!r}"
            for name, value in start["settings"].items()
            if name not in ignored and value != self.settings.get(name)
        ]
        if changed:
            raise ConfigError(
                f"{path}: the settings changed when the run was resumed, so it cannot be repeated "
                f"as one run: {'; '.join(changed)}"
            )


class RecordedService:
    """Delivers the batches of a recorded run, and compares the weights after each step.

    Args:
        run: The recorded run.
        output: `save_path` of the new run.
        num_steps: Steps to repeat.
        on_step: Called with a line about each step whose weights are equal.
    """

    def __init__(
        self, run: RecordedRun, output: Path, num_steps: int, *, on_step: Callable[[str], None]
    ) -> None:
        self._on_step = on_step
        self._run = run
        self._output = output / RECORD_DIRECTORY
        self._num_steps = num_steps
        self._last_asked = -1

    def connect(self) -> None: ...

    def register(self, step: int) -> None: ...

    def report_policy(self, version: int) -> None: ...

    def next_batch(self, step: int) -> LeasedBatch:
        """Return the recorded batch of the step after `step`.

        Raises:
            RecordingEndedError: `num_steps` were repeated.
            ConfigError: the batch of the step was rejected, or repeats that of another step.
        """
        if step == self._last_asked:
            raise ConfigError(
                f"the recorded batch of step {step + 1} cannot be trained on, or is that of an "
                "earlier step; restore the record"
            )
        self._last_asked = step
        if step == 0:
            self._compare(0)
        if step >= self._num_steps:
            raise RecordingEndedError(f"{step} recorded steps were repeated")
        return self._run.batch_of(step + 1)

    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None:
        """Compare the weights after a step with the recorded ones.

        Raises:
            WeightsDifferError: they differ.
        """
        if steps_done:
            self._compare(steps_done)
            self._on_step(f"step {steps_done}: {self._run.weights_after(steps_done)}, equal")

    def _compare(self, step: int) -> None:
        recorded = self._run.weights_after(step)
        repeated = self._run.weights_after(step, directory=self._output)
        if recorded != repeated:
            when = f"after step {step}" if step else "before the first step"
            raise WeightsDifferError(
                f"the weights {when} differ: recorded {recorded}, repeated {repeated}"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _ = found["settings"]["lr_schedule"], found["processed_logprobs"], found["torch_threads"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}; restore it") from error
    return dict(found)


def repeat(
    folder: Path,
    output: Path,
    *,
    device: str | None = None,
    num_steps: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> int:
    """Repeat a recorded run and return the number of steps whose weights are equal.

    `report` is called with a line about each of them. Other arguments are those of the command.

    Raises:
        ConfigError: the run cannot be repeated.
        WeightsDifferError: the weights differ; the message names the first step.
    """
    import torch

    from example_trainer.trainers import train

    run = RecordedRun(folder)
    if torch.__version__ != run.torch_version:
        logger.warning(
            "recorded with torch %s, repeated with %s: the weights may differ",
            run.torch_version,
            torch.__version__,
        )
    torch.set_num_threads(run.torch_threads)
    steps = run.num_steps if num_steps is None else min(num_steps, run.num_steps)
    service = RecordedService(run, output, steps, on_step=report)
    with contextlib.suppress(RecordingEndedError):
        train(run.config(output, device=device), recorded=service)
    return steps


def main(argv: Sequence[str] | None = None) -> None:
    """Repeat a run; exit with 0 if all weights are equal, 1 if not, 2 if it cannot be repeated."""
    parser = CommandParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("run", type=Path, metavar="FOLDER", help="--save-path of the recorded run")
    parser.add_argument("--output", type=Path, help="folder of the new run (FOLDER/repeated)")
    parser.add_argument("--device", help="device of the new run (default: as recorded)")
    parser.add_argument("--steps", type=int, help="maximum number of steps (default: all)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    output = arguments.output or arguments.run / "repeated"
    try:
        steps = repeat(
            arguments.run,
            output,
            device=arguments.device,
            num_steps=arguments.steps,
            report=print_output,
        )
    except AtroposError as error:
        end_command(_COMMAND, error, code=exit_code_of(error))
    print_output(f"{steps} steps repeated; the weights are equal after each of them")


if __name__ == "__main__":
    main()
