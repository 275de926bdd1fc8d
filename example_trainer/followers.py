"""What ranks other than 0 have in place of the service and the engine: nothing that speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atroposlib.api.client import LeasedBatch
from example_trainer.weight_sync import WeightSync

__all__ = ["FollowerFeed", "FollowerSync"]


class FollowerFeed:
    """A feed without batches: they come from rank 0."""

    def next_batch(self, step: int) -> LeasedBatch:
        """Never called on such a rank.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("only rank 0 takes batches from the service")

    def refuse(self, step: int, batch_id: str | None) -> None:
        """Rank 0 does that."""

    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None:
        """Rank 0 does that."""

    def report_policy(self, version: int) -> None:
        """Rank 0 does that."""

    def state(self) -> dict[str, Any]:
        """Return nothing: rank 0 writes the checkpoints."""
        return {}

    def wants_checkpoint(self) -> bool:
        """Return False: rank 0 keeps the journal, and tells what it wants."""
        return False

    def saved(self, step: int) -> None:
        """Rank 0 keeps the journal."""


class FollowerSync:
    """Makes the same steps take part in publishing as on rank 0, whose engine it is.

    Args:
        leader: Rank 0's strategy, of which the flags are taken; nothing of it is called.
    """

    def __init__(self, leader: WeightSync) -> None:
        self.mode = leader.mode
        self.publishes_final = leader.publishes_final

    def check_before_load(self) -> None:
        """Rank 0 does that."""

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Rank 0 does that."""

    def before_step(self, *, sync_follows: bool) -> None:
        """Rank 0 does that."""

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Rank 0 does that; this rank has given it its part of the weights."""

    def check_alive(self) -> None:
        """Rank 0 does that."""

    def returns_processed_logprobs(self) -> bool:
        """Rank 0 asks the engine, and tells what it answered.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("only rank 0 asks the engine")

    def close(self) -> None:
        """Nothing was opened."""
