"""A feed whose batches survive the death of the trainer: trained once, whenever it is killed.

    service --lease--> journal --> optimiser step --> checkpoint, sync --> acknowledge

What decides whether a batch was trained is on our disk, not in the service: the newest checkpoint
says which step is done, and the journal holds the batches of the steps after it.

The batches trained since the last checkpoint, on disk, so that a killed run can repeat them.

    journal/ run.json          which run writes here
             step_<n>.batch    the batch of optimiser step n, whole: groups and hand-out token
             step_<n>/         a checkpoint, written where the records had become too large
             refused_<k>.batch a batch that could not be honoured; never read again

A record is written, flushed and renamed into place before its batch is trained. It is deleted once
a checkpoint of step n or later is on disk. Where those are far apart, or not wanted at all, the
records would grow for the whole run: once they take as much as a checkpoint would, one is written
here in their place.

What the loop needs of whatever batches come from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError
from example_trainer.api import TrajectoryFeed
from example_trainer.checkpointing import (
    drop_checkpoints_before,
    has_unnamed_checkpoint,
    write_file,
)

__all__ = [
    "JOURNAL_DIRECTORY",
    "SMALLEST_LIMIT_BYTES",
    "BatchJournal",
    "BatchMark",
    "DurableFeed",
    "GroupFeed",
    "checkpoint_bytes",
]

JOURNAL_DIRECTORY = "journal"
SMALLEST_LIMIT_BYTES = 2**30
"""The records may take as much in any case."""
_RECORD = re.compile(r"step_(\d+)\.batch")
_REFUSED = re.compile(r"refused_(\d+)\.batch")
_MOST_REFUSED_KEPT = 16
"""The newest; whoever sends such batches must not fill the disk."""


class _Record(msgspec.Struct, frozen=True):
    run_id: str
    step: int
    batch_id: str | None
    groups: list[dict[str, Any]]


def checkpoint_bytes(model: Any, *, trained_only: bool) -> int:
    """Return about how much a resumable checkpoint takes: weights, and two moments of each trained.

    Args:
        model: Whose parameters are saved.
        trained_only: Whether adapters are saved without the model they belong to.
    """
    trained = total = 0
    for parameter in model.parameters():
        size: int = parameter.numel() * parameter.element_size()
        total += size
        trained += size if parameter.requires_grad else 0
    return 2 * trained + (trained if trained_only else total)


def _read_run_id(marker: Path) -> str:
    try:
        run_id = json.loads(marker.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--resume: {marker} cannot be read: {error!r}; restore it") from error
    if not isinstance(run_id, str):
        raise ConfigError(f"--resume: {marker}: run_id is {run_id!r:.40}, expected a text")
    return run_id


class BatchJournal:
    """Reads and writes the records of one run.

    Args:
        directory: Where the records are.
        run_id: Records of other runs that used the same directory are passed over.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self.directory = directory
        self.run_id = run_id
        self._sizes = {
            int(match.group(1)): path.stat().st_size
            for path in directory.iterdir()
            if (match := _RECORD.fullmatch(path.name))
        }

    @property
    def size_bytes(self) -> int:
        """How much the records take on disk."""
        return sum(self._sizes.values())

    @classmethod
    def open(cls, save_path: str | Path, *, resume: bool) -> BatchJournal:
        """Continue the run whose journal is there, or start a new run and drop what was there.

        Args:
            save_path: Parent of the journal, where the checkpoints are.
            resume: Whether to continue.

        Raises:
            ConfigError: there is no run to continue, or nothing says which one it is.
        """
        directory = Path(save_path) / JOURNAL_DIRECTORY
        marker = directory / "run.json"
        if resume and marker.is_file():
            return cls(directory, _read_run_id(marker))
        if resume and not has_unnamed_checkpoint(save_path):
            raise ConfigError(
                f"--resume: there is no {marker}, which says which run {save_path} holds; restore "
                "it, name another --save-path, or leave --resume out to start a new run"
            )
        directory.mkdir(parents=True, exist_ok=True)
        run_id = uuid.uuid4().hex
        # From here on the records and checkpoints that are left belong to no run.
        write_file(marker, json.dumps({"run_id": run_id}).encode())
        for path in directory.glob("*.batch*"):
            path.unlink()
        for path in directory.glob("*step_*"):
            shutil.rmtree(path)
        return cls(directory, run_id)

    def path_of(self, step: int) -> Path:
        """Return where the batch of an optimiser step is kept."""
        return self.directory / f"step_{step}.batch"

    def write(self, step: int, batch: LeasedBatch) -> None:
        """Keep the batch of an optimiser step; it is on disk when this returns."""
        record = _Record(self.run_id, step, batch.batch_id, batch.groups)
        content = msgspec.msgpack.encode(record)
        write_file(self.path_of(step), content)
        self._sizes[step] = len(content)

    def read(self, step: int) -> LeasedBatch | None:
        """Return the batch that an earlier life of this run took for a step, None if there is none.

        Raises:
            ConfigError: the record cannot be read.
        """
        path = self.path_of(step)
        if not path.is_file():
            return None
        try:
            record = msgspec.msgpack.decode(path.read_bytes(), type=_Record)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path} is not a batch record: {error}; restore it, or start without --resume"
            ) from error
        if record.run_id != self.run_id:
            return None
        return LeasedBatch(record.groups, record.batch_id)

    def set_aside(self, step: int) -> Path:
        """Take the batch of a step out of the run; returns where it is kept.

        Of those that were taken out the newest are kept.
        """
        self._sizes.pop(step, None)
        names = (path.name for path in self.directory.iterdir())
        numbers = sorted(int(found.group(1)) for found in map(_REFUSED.fullmatch, names) if found)
        number = numbers[-1] + 1 if numbers else 1
        for old in numbers[: max(0, len(numbers) + 1 - _MOST_REFUSED_KEPT)]:
            (self.directory / f"refused_{old}.batch").unlink(missing_ok=True)
        return self.path_of(step).rename(self.directory / f"refused_{number}.batch")

    def count_after(self, step: int) -> int:
        """Return how many steps after `step` have their batch here without a gap."""
        last = step
        while self.read(last + 1) is not None:
            last += 1
        return last - step

    def forget_through(self, step: int) -> None:
        """Delete the records of steps up to `step`: a checkpoint holds what they taught."""
        for done in [known for known in self._sizes if known <= step]:
            self.path_of(done).unlink(missing_ok=True)
            del self._sizes[done]
        drop_checkpoints_before(step, self.directory)


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
