"""A feed whose batches survive the death of the trainer: trained once, whenever it is killed.

    service --lease--> journal --> optimiser step --> checkpoint, sync --> acknowledge

What decides whether a batch was trained is on our disk, not in the service: the newest checkpoint
says which step is done, and the journal holds the batches of the steps after it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from atroposlib.api.client import LeasedBatch
from example_trainer.api import TrajectoryFeed
from example_trainer.batch_journal import SMALLEST_LIMIT_BYTES, BatchJournal

__all__ = ["BatchMark", "DurableFeed"]

logger = logging.getLogger(__name__)

_KEPT_MARKS = 1024


class BatchMark(NamedTuple):
    """What tells a batch from every other, also across hand-outs and resets of the service."""

    number: str
    """The service's number of the batch, without the attempt."""
    digest: str
    """Hash of its groups."""

    @classmethod
    def of(cls, batch: LeasedBatch) -> BatchMark | None:
        """Return the mark of a batch; None from a service without leases."""
        if batch.batch_id is None:
            return None
        digest = hashlib.blake2b(msgspec.msgpack.encode(batch.groups), digest_size=16)
        return cls(batch.batch_id.partition("-")[0], digest.hexdigest())


class DurableFeed:
    """Hands out the journal's batches first, then the service's; passes over repeated ones.

    Args:
        feed: The connection to the service.
        journal: Where batches are kept until a checkpoint holds them.
        state: What `state` returned for the checkpoint that is continued; None without one.
        journal_limit_bytes: From this size of its records on a checkpoint has to replace them.
    """

    def __init__(
        self,
        feed: TrajectoryFeed,
        journal: BatchJournal,
        state: Mapping[str, Any] | None = None,
        *,
        journal_limit_bytes: int = SMALLEST_LIMIT_BYTES,
    ) -> None:
        self._feed = feed
        self._journal = journal
        self._journal_limit_bytes = journal_limit_bytes
        self._marks = [BatchMark(*mark) for mark in (state or {}).get("trained", ())]
        self._batch_id: str | None = (state or {}).get("batch_id")

    def settle(self, steps_done: int) -> None:
        """Acknowledge what the checkpoint of so many steps holds, in case it was killed before."""
        self._feed.acknowledge(self._batch_id, steps_done=steps_done)

    def next_batch(self, step: int) -> LeasedBatch:
        """Return the batch of the optimiser step that follows `step` finished ones.

        It is in the journal when this returns.
        """
        batch = self._journal.read(step + 1)
        if batch is None:
            batch = self._new_batch(step)
            self._journal.write(step + 1, batch)
        else:
            logger.info("step %d: its batch was in the journal", step + 1)
        mark = BatchMark.of(batch)
        self._batch_id = batch.batch_id
        if mark is not None:
            self._marks = [*self._marks, mark][-_KEPT_MARKS:]
        return batch

    def _new_batch(self, step: int) -> LeasedBatch:
        while True:
            batch = self._feed.next_batch(step)
            if BatchMark.of(batch) not in self._marks:
                return batch
            logger.warning("batch %s was trained before; passing over it", batch.batch_id)
            self._feed.acknowledge(batch.batch_id, steps_done=step)

    def refuse(self, step: int, batch_id: str | None) -> None:
        """Set the batch of the step after `step` aside: it cannot be trained as things are set.

        The service is told that it makes no step: environments stay until the last one is done.
        """
        path = self._journal.set_aside(step + 1)
        self._feed.acknowledge(batch_id, steps_done=step)
        logger.error(
            "batch %s is refused and kept as %s; --resume goes on without it", batch_id, path
        )

    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None:
        """Tell the service that a batch is trained, and its weights published."""
        self._feed.acknowledge(batch_id, steps_done=steps_done)

    def report_policy(self, version: int) -> None:
        """Tell the service which weights the engine serves now."""
        self._feed.report_policy(version)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint written after training the latest batch has to hold."""
        return {
            "run_id": self._journal.run_id,
            "batch_id": self._batch_id,
            "trained": [list(mark) for mark in self._marks],
        }

    def wants_checkpoint(self) -> bool:
        """Say whether the journal has become so large that a checkpoint has to replace it."""
        return self._journal.size_bytes >= self._journal_limit_bytes

    def saved(self, step: int) -> None:
        """Take note that a checkpoint of `step` is on disk."""
        self._journal.forget_through(step)
