"""What the loop needs of whatever batches come from."""

from __future__ import annotations

from typing import Any, Protocol

from atroposlib.api.client import LeasedBatch

__all__ = ["GroupFeed"]


class GroupFeed(Protocol):
    """Where batches come from."""

    def next_batch(self, step: int) -> LeasedBatch:
        """Wait for the batch of the optimiser step that follows `step` finished ones."""

    def refuse(self, step: int, batch_id: str | None) -> None:
        """Take that batch back: it cannot be honoured, and is no step."""

    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None:
        """Tell whoever sent the batch that it is trained, as the last of `steps_done` steps."""

    def report_policy(self, version: int) -> None:
        """Take note that the engine serves the weights of so many optimiser steps."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint made after training the latest batch has to hold, as JSON."""

    def wants_checkpoint(self) -> bool:
        """Say whether what is kept for lack of a checkpoint has grown too large."""

    def saved(self, step: int) -> None:
        """Take note that a checkpoint of so many optimiser steps is on disk."""
