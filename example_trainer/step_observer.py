"""What is measured and shown of a step beside its loss: age of its groups, time split, MFU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from example_trainer.compute_use import ComputeUse
from example_trainer.config import TrainingConfig
from example_trainer.group_metrics import group_metrics
from example_trainer.phase_clock import PhaseClock

__all__ = ["StepObserver", "StepView"]


class StepView(Protocol):
    """Whoever shows a run while it goes on."""

    def show_activity(self, text: str) -> None:
        """Take note of what the trainer does now."""

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of a finished step."""


class StepObserver:
    """Collects what one step has to say, and tells a view of it.

    Args:
        config: Settings.
        model: What is trained.
        num_devices: That share a step.
        view: Shows the run; None: nobody watches.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Any,
        *,
        num_devices: int = 1,
        view: StepView | None = None,
    ) -> None:
        self._seq_len = config.seq_len
        self._phases = PhaseClock(config.device)
        self._compute_use = ComputeUse(model, config.device, num_devices=num_devices)
        self._view = view
        self._group_metrics: dict[str, float] = {}
        self._lengths: list[int] = []

    def note(self, activity: str) -> None:
        """Say what the trainer does from now on."""
        if self._view is not None:
            self._view.show_activity(activity)

    def take_groups(self, groups: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Look at the groups of the step that follows `step` finished ones."""
        self._group_metrics = group_metrics(groups, step=step, seq_len=self._seq_len)
        self._lengths = [
            max(0, min(len(tokens), self._seq_len) - 1)
            for group in groups
            for tokens in group["tokens"]
        ]

    def measure(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Count the time of a block as `train/<phase>_time`."""
        return self._phases.measure(phase)

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return what is to be added to the metrics of a step, and begin anew.

        Args:
            metrics: of the step, with `train/trained_tokens` and `train/compute_time`.
        """
        use = self._compute_use.metrics(
            self._lengths,
            num_trained_tokens=metrics["train/trained_tokens"],
            seconds=metrics["train/compute_time"],
        )
        return {**self._group_metrics, **self._phases.take_metrics(), **use}

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        if self._view is not None:
            self._view.show_step(step, metrics)
