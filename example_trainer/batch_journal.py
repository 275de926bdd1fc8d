"""The batches trained since the last checkpoint, on disk, so that a killed run can repeat them.

    journal/ run.json          which run writes here
             step_<n>.batch    the batch of optimiser step n, whole: groups and hand-out token
             step_<n>/         a checkpoint, written where the records had become too large
             refused_<k>.batch a batch that could not be honoured; never read again

A record is written, flushed and renamed into place before its batch is trained. It is deleted once
a checkpoint of step n or later is on disk. Where those are far apart, or not wanted at all, the
records would grow for the whole run: once they take as much as a checkpoint would, one is written
here in their place.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError
from example_trainer.checkpointing import (
    drop_checkpoints_before,
    has_unnamed_checkpoint,
    write_file,
)

__all__ = ["JOURNAL_DIRECTORY", "SMALLEST_LIMIT_BYTES", "BatchJournal", "checkpoint_bytes"]

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
