"""The trainer's client of the trajectory service, and the journal of its batches.

    service --lease--> journal --> optimizer step --> checkpoint, sync --> acknowledge

The trainer's disk decides whether a batch was trained: the newest checkpoint gives the last step
done, and the journal holds the batches of the steps after it.

    journal/ run.json          which run writes here
             step_<n>.batch    the batch of optimizer step n: groups and lease token
             step_<n>/         a checkpoint, written when the records had become too large
             refused_<k>.batch a batch that was rejected; never read again

    recorded/            with `record_run`: all that a repetition of the run needs
             run.json    which run writes here
             start_<n>.json    settings of a process that began after step n
             step_<n>.batch    the batch of optimizer step n
             step_<n>.weights  a checksum of the weights after step n

A record of the journal is written, flushed and renamed into place before its batch is trained, and
deleted once a checkpoint of step n or later is on disk. If checkpoints are rare or disabled, the
records grow until they take as much space as a checkpoint; one is then written in their place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from atroposlib.api.client import (
    LeasedBatch,
    RetryRule,
    TrainerClient,
    current_step,
    says_unregistered,
)
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.text import without_secrets
from atroposlib.utils.writable import write_file
from example_trainer.checkpointing import (
    drop_checkpoints_before,
    has_unnamed_checkpoint,
)
from example_trainer.config import TrainingConfig

__all__ = [
    "JOURNAL_DIRECTORY",
    "RECORD_DIRECTORY",
    "SMALLEST_LIMIT_BYTES",
    "BatchJournal",
    "BatchMark",
    "BatchService",
    "DurableFeed",
    "TrainingRecord",
    "TrajectoryFeed",
    "check_atropos_api",
    "checkpoint_bytes",
    "get_batch",
    "open_client",
    "read_batch",
    "register_trainer",
    "registration_of",
]

logger = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_SHORTEST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_SECONDS_BETWEEN_LOG_LINES = 30.0
_LEASE_ENDED = (404, 409)
_ENVIRONMENT_CHECKPOINT_STEPS = 3
"""Steps between checkpoints of the environments if the trainer's own are scheduled by minutes."""


def open_client(url: str, *, patience_s: float | None = None) -> TrainerClient:
    """Return a client that sends the token in `ATROPOS_API_TOKEN`, if it is set.

    Each request waits `patience_s` seconds for an unreachable service; None: a few retries.
    """
    retry = (
        None
        if patience_s is None
        else RetryRule(attempts=None, max_delay_s=5.0, deadline_s=patience_s)
    )
    return TrainerClient(url, retry=retry, token=os.environ.get("ATROPOS_API_TOKEN"))


def registration_of(config: TrainingConfig, *, starting_step: int = 0) -> dict[str, Any]:
    """Return the body of `POST /register` for a run that has completed `starting_step` steps."""
    interval = config.checkpoint_interval
    if interval is None:
        interval = _ENVIRONMENT_CHECKPOINT_STEPS
    return {
        "wandb_group": config.wandb_group or "",
        "wandb_project": config.wandb_project or "",
        "batch_size": config.sequences_per_step,
        "max_token_len": config.seq_len,
        "checkpoint_dir": config.save_path,
        "save_checkpoint_interval": interval or config.training_steps,
        "starting_step": starting_step,
        "num_steps": config.training_steps,
    }


class BatchService(Protocol):
    """Where the batches of a run come from: the service, or the record of an earlier run."""

    def connect(self) -> None: ...
    def register(self, step: int) -> None: ...
    def report_policy(self, version: int) -> None: ...
    def next_batch(self, step: int) -> LeasedBatch: ...
    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None: ...


class TrajectoryFeed:
    """Delivers one batch of groups per optimizer step, without a limit on the waiting time.

    If the service has lost this run in a restart, the feed registers again. The client limits the
    time to wait for an unreachable service (`open_client`). With a `run_id`, each step has one key,
    by which the service returns a batch that it sent to an earlier process of this run in vain.
    """

    def __init__(
        self,
        client: TrainerClient,
        config: TrainingConfig,
        *,
        run_id: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._config = config
        self._sleep = sleep
        self._clock = clock
        self._policy_version: int | None = None
        self._is_registered = False

    def connect(self) -> None:
        """Wait until the service answers, and log the wait.

        Raises:
            TrajectoryApiError: it did not answer within `service_timeout_s`.
        """
        url = without_secrets(self._config.atropos_url)
        next_log_s = 0.0

        def on_wait(waited_s: float) -> None:
            nonlocal next_log_s
            if waited_s >= next_log_s:
                logger.info("waiting for the service at %s (run-api)", url)
                next_log_s = waited_s + _SECONDS_BETWEEN_LOG_LINES

        self._client.wait_until_up(self._config.service_timeout_s, on_wait=on_wait)

    def register(self, step: int) -> None:
        """Register this run, which has completed `step` optimizer steps.

        A step needs no exact number of sequences, so that groups of any sizes are delivered.
        With `replace_run`, the first call replaces a run that has other settings. Later calls do
        not: a service that has lost this run may serve another one by then.
        """
        body = registration_of(self._config, starting_step=step) | {"short_batches": True}
        if self._config.replace_run and not self._is_registered:
            body["replace"] = True
        self._client.register(**body)
        self._is_registered = True

    def report_policy(self, version: int) -> None:
        """Report that the engine serves the weights after `version` optimizer steps.

        Raises:
            TrajectoryApiError: the service rejected the request or is unreachable.
        """
        self._policy_version = version
        self._client.set_policy_version(version)

    def next_batch(self, step: int) -> LeasedBatch:
        """Wait for the next batch and lease it; `step` optimizer steps are completed.

        Requests are long polls. A service without long polling is polled at growing intervals.

        Raises:
            TrajectoryApiError: the service rejected the request or is unreachable.
        """
        poll_s = _SHORTEST_POLL_S
        next_log_s = self._clock() + _SECONDS_BETWEEN_LOG_LINES
        while True:
            sent_at = self._clock()
            batch = self._take(step)
            if batch is not None and batch.groups:
                return batch
            if self._clock() >= next_log_s:
                logger.info("step %d: no full batch yet; %s", step + 1, self._why_no_batch(step))
                next_log_s = self._clock() + _SECONDS_BETWEEN_LOG_LINES
            if self._clock() - sent_at < _LONG_POLL_S / 2:
                self._sleep(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None:
        """Acknowledge a batch that was trained or rejected; idempotent.

        An expired lease is only logged: the checkpoints record that the batch was trained, and a
        batch that is delivered twice is recognized.

        Args:
            batch_id: Lease token; None, from a service without leases, is ignored.
            steps_done: Optimizer steps completed; the service counts each step once.

        Raises:
            TrajectoryApiError: the service is unreachable.
        """
        try:
            self._client.ack(batch_id, steps_done=steps_done)
        except TrajectoryApiError as error:
            if error.status not in _LEASE_ENDED:
                raise
            logger.warning("batch %s was acknowledged after its lease ended: %s", batch_id, error)

    def _why_no_batch(self, step: int) -> str:
        status = self._client.status()
        stalls = status.get("stalls")
        if stalls and isinstance(stalls, list):
            found = (stall if isinstance(stall, dict) else {} for stall in stalls)
            return "; ".join(str(stall.get("message")) for stall in found)
        # Services of earlier versions count rejected batches as steps.
        service_step = current_step(status, self._config.atropos_url)
        if service_step <= step:
            return "are environments running?"
        return (
            f"the service counts {service_step} steps, this trainer has done {step}: environments "
            "may have ended too early; restart them with --env.end_with_trainer false"
        )

    def _take(self, step: int) -> LeasedBatch | None:
        key = None if self._run_id is None else f"{self._run_id}-{step + 1}"
        try:
            batch = self._client.batch(lease_s=self._config.lease_s, wait_s=_LONG_POLL_S, key=key)
        except TrajectoryApiError as error:
            if not says_unregistered(error):
                raise
            logger.warning("the service has no record of this run; registering again")
            self.register(step)
            if self._policy_version is not None:
                self._client.set_policy_version(self._policy_version)
            return None
        # The loss has no use for opaque columns, which may be larger than all other fields.
        for group in batch.groups if batch is not None else ():
            group.pop("columns", None)
        return batch


def check_atropos_api(url: str, timeout: float = 30) -> bool:
    """Return whether the service answers within `timeout` seconds."""
    with open_client(url) as client:
        try:
            client.wait_until_up(timeout)
        except TrajectoryApiError:
            return False
    return True


def register_trainer(config: TrainingConfig) -> int:
    """Register a new run and return the uuid that the service assigns.

    Raises:
        TrajectoryApiError: the service rejected the request or is unreachable.
    """
    with open_client(config.atropos_url) as client:
        return client.register(**registration_of(config))


def get_batch(url: str = "http://localhost:8000") -> dict[str, Any]:
    """Request a batch once: `{"batch": groups}`, or `{"batch": None}` if none is ready.

    Raises:
        TrajectoryApiError: the service rejected the request or is unreachable.
    """
    with open_client(url) as client:
        return {"batch": client.batch()}


JOURNAL_DIRECTORY = "journal"
SMALLEST_LIMIT_BYTES = 2**30
"""Lower bound of the size at which a checkpoint replaces the records."""
_RECORD = re.compile(r"step_(\d+)\.batch")
_REFUSED = re.compile(r"refused_(\d+)\.batch")
_MOST_REFUSED_KEPT = 16
"""Rejected batches kept on disk, the newest."""


class _BatchRecord(msgspec.Struct, frozen=True):
    run_id: str
    step: int
    batch_id: str | None
    groups: list[dict[str, Any]]


def checkpoint_bytes(model: Any, *, trained_only: bool) -> int:
    """Return the approximate size of a checkpoint: weights, and two moments per trained weight.

    `trained_only`: frozen weights are not saved, as with adapters.
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
        raise ConfigError(f"--resume: {marker}: run_id is {run_id!r:.40}, expected a string")
    return run_id


def _read_record(path: Path) -> _BatchRecord:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_BatchRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a batch record: {error}; restore it, or start without --resume"
        ) from error


def read_batch(path: Path) -> LeasedBatch:
    """Return the batch in a record of any run.

    Raises:
        ConfigError: the record cannot be read.
    """
    record = _read_record(path)
    return LeasedBatch(record.groups, record.batch_id)


class BatchJournal:
    """Reads and writes the records of one run; ignores those of other runs in its directory."""

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
        return sum(self._sizes.values())

    @staticmethod
    def exists(save_path: str | Path) -> bool:
        """Whether `open` can resume a run of this directory."""
        marker = Path(save_path) / JOURNAL_DIRECTORY / "run.json"
        return marker.is_file() or has_unnamed_checkpoint(save_path)

    @classmethod
    def open(cls, save_path: str | Path, *, resume: bool) -> BatchJournal:
        """Open the journal of the run to resume, or start a new run with an empty journal.

        Raises:
            ConfigError: there is no run to resume, or its id is unknown.
        """
        directory = Path(save_path) / JOURNAL_DIRECTORY
        marker = directory / "run.json"
        if resume and marker.is_file():
            return cls(directory, _read_run_id(marker))
        if resume and not has_unnamed_checkpoint(save_path):
            raise ConfigError(
                f"--resume: {marker} is missing, which contains the id of the run in {save_path}; "
                "restore it, choose another --save-path, or omit --resume to start a new run"
            )
        directory.mkdir(parents=True, exist_ok=True)
        run_id = uuid.uuid4().hex
        # Remaining records and checkpoints belong to no run from here on.
        write_file(marker, json.dumps({"run_id": run_id}).encode())
        for path in directory.glob("*.batch*"):
            path.unlink()
        for path in directory.glob("*step_*"):
            shutil.rmtree(path)
        return cls(directory, run_id)

    def path_of(self, step: int) -> Path:
        return self.directory / f"step_{step}.batch"

    def write(self, step: int, batch: LeasedBatch) -> None:
        """Record the batch of an optimizer step; it is on disk when this returns."""
        record = _BatchRecord(self.run_id, step, batch.batch_id, batch.groups)
        content = msgspec.msgpack.encode(record)
        write_file(self.path_of(step), content)
        self._sizes[step] = len(content)

    def read(self, step: int) -> LeasedBatch | None:
        """Return the batch that this run recorded for a step, None if there is none.

        Raises:
            ConfigError: the record cannot be read.
        """
        path = self.path_of(step)
        if not path.is_file():
            return None
        record = _read_record(path)
        if record.run_id != self.run_id:
            return None
        return LeasedBatch(record.groups, record.batch_id)

    def set_aside(self, step: int) -> Path:
        """Rename the batch of a step to `refused_<k>.batch` and return its path."""
        self._sizes.pop(step, None)
        names = (path.name for path in self.directory.iterdir())
        numbers = sorted(int(found.group(1)) for found in map(_REFUSED.fullmatch, names) if found)
        number = numbers[-1] + 1 if numbers else 1
        for old in numbers[: max(0, len(numbers) + 1 - _MOST_REFUSED_KEPT)]:
            (self.directory / f"refused_{old}.batch").unlink(missing_ok=True)
        return self.path_of(step).rename(self.directory / f"refused_{number}.batch")

    def count_after(self, step: int) -> int:
        """Return the number of consecutive steps after `step` that have a record."""
        last = step
        while self.read(last + 1) is not None:
            last += 1
        return last - step

    def forget_through(self, step: int) -> None:
        """Delete the records and checkpoints of steps that a checkpoint of `step` covers."""
        for done in [known for known in self._sizes if known <= step]:
            self.path_of(done).unlink(missing_ok=True)
            del self._sizes[done]
        drop_checkpoints_before(step, self.directory)


RECORD_DIRECTORY = "recorded"
_WEIGHTS = ".weights"


class TrainingRecord:
    """Keeps the batches, settings and weight checksums of one run, for `atropos-replay run`.

    Args:
        save_path: The `save_path` of the run.
        run_id: Id of the run; the record of another run is deleted.
    """

    def __init__(self, save_path: str | Path, run_id: str) -> None:
        self.directory = Path(save_path) / RECORD_DIRECTORY
        marker = self.directory / "run.json"
        if not marker.is_file() or _read_run_id(marker) != run_id:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
            write_file(marker, json.dumps({"run_id": run_id}).encode())

    def note_start(self, step: int, settings: Mapping[str, Any], *, weights: str) -> None:
        """Record the settings of a process that starts after optimizer step `step`."""
        write_file(self.directory / f"start_{step}.json", json.dumps(settings, indent=1).encode())
        self.note_weights(step, weights)

    def note_batch(self, step: int, path: Path) -> None:
        """Keep the record `path` of the batch of a step; it may be a repetition of the step."""
        kept = self.directory / path.name
        kept.unlink(missing_ok=True)
        try:
            kept.hardlink_to(path)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, kept)

    def note_weights(self, step: int, checksum: str) -> None:
        """Record the weights after a step, and log if a resumed run repeats it differently."""
        path = self.directory / f"step_{step}{_WEIGHTS}"
        if path.is_file() and path.read_text(encoding="utf-8") != checksum:
            logger.warning("step %d is repeated with other weights than before the restart", step)
        write_file(path, checksum.encode())


_NOT_RECORDED = (OverflowError, RecursionError)


def recordable(batch: LeasedBatch) -> LeasedBatch:
    """Return a batch as the journal can hold it: without large integers and deeply nested values.

    JSON, thus any `messages`, may have integers beyond 64 bits; they become floats, or text beyond
    those. A field that is nested too deeply becomes None, and is logged.
    """
    try:
        msgspec.msgpack.encode(batch.groups)
        return batch
    except _NOT_RECORDED:
        groups = [
            {name: _recordable_field(name, value) for name, value in group.items()}
            for group in batch.groups
        ]
        return batch._replace(groups=groups)


def _recordable_field(name: str, value: Any) -> Any:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        try:
            return _within_64_bits(value)
        except RecursionError:
            pass
    except RecursionError:
        pass
    else:
        return value
    logger.warning("the field %.60r of a group is left out: it is nested too deeply", name)
    return None


def _within_64_bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _within_64_bits(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_within_64_bits(entry) for entry in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value) if abs(value) < 2**1023 else str(value)
    return value


_KEPT_MARKS = 1024


class BatchMark(NamedTuple):
    """Identity of a batch, the same across redeliveries and restarts of the service."""

    number: str
    """Number of the batch at the service, without the delivery attempt."""
    digest: str
    """Hash of its groups."""

    @classmethod
    def of(cls, batch: LeasedBatch) -> BatchMark | None:
        """Return the mark of a batch; None if the service has no leases."""
        if batch.batch_id is None:
            return None
        digest = hashlib.blake2b(msgspec.msgpack.encode(batch.groups), digest_size=16)
        return cls(batch.batch_id.partition("-")[0], digest.hexdigest())


class DurableFeed:
    """Delivers the batches of the journal, then those of the service; skips repeated ones.

    Args:
        feed: Connection to the service.
        journal: Records of the batches that no checkpoint covers yet.
        state: Return value of `state` for the resumed checkpoint; None without one.
        journal_limit_bytes: Size of the records at which a checkpoint has to replace them.
        record: Keeps the batches beyond the checkpoints; None: they are not kept.
        last_recorded_step: Last optimizer step whose batch was in the journal at the start; steps
            up to it are repeated.
    """

    def __init__(
        self,
        feed: BatchService,
        journal: BatchJournal,
        state: Mapping[str, Any] | None = None,
        *,
        journal_limit_bytes: int = SMALLEST_LIMIT_BYTES,
        record: TrainingRecord | None = None,
        last_recorded_step: int = 0,
    ) -> None:
        self.last_recorded_step = last_recorded_step
        self._record = record
        self._feed = feed
        self._journal = journal
        self._journal_limit_bytes = journal_limit_bytes
        self._marks = [BatchMark(*mark) for mark in (state or {}).get("trained", ())]
        self._batch_id: str | None = (state or {}).get("batch_id")

    def settle(self, steps_done: int) -> None:
        """Acknowledge the last batch of the resumed checkpoint, in case that did not happen."""
        self._feed.acknowledge(self._batch_id, steps_done=steps_done)

    def next_batch(self, step: int) -> LeasedBatch:
        """Wait for the batch of step `step + 1`; it is in the journal when this returns."""
        batch = self._journal.read(step + 1)
        if batch is None:
            batch, mark = self._new_batch(step)
            self._journal.write(step + 1, batch)
        else:
            logger.info("step %d: batch read from the journal", step + 1)
            mark = BatchMark.of(batch)
        if self._record is not None:
            self._record.note_batch(step + 1, self._journal.path_of(step + 1))
        self._batch_id = batch.batch_id
        if mark is not None:
            self._marks = [*self._marks, mark][-_KEPT_MARKS:]
        return batch

    def _new_batch(self, step: int) -> tuple[LeasedBatch, BatchMark | None]:
        while True:
            batch = recordable(self._feed.next_batch(step))
            mark = BatchMark.of(batch)
            if mark not in self._marks:
                return batch, mark
            logger.warning("batch %s was trained before; skipping it", batch.batch_id)
            self._feed.acknowledge(batch.batch_id, steps_done=step)

    def refuse(self, step: int, batch_id: str | None) -> None:
        """Reject the batch of step `step + 1`, which cannot be trained with these settings.

        It is acknowledged without a step, so that the service still expects all steps.
        """
        path = self._journal.set_aside(step + 1)
        self._feed.acknowledge(batch_id, steps_done=step)
        logger.error(
            "batch %s is rejected and kept as %s; --resume continues without it", batch_id, path
        )

    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None:
        self._feed.acknowledge(batch_id, steps_done=steps_done)

    def report_policy(self, version: int) -> None:
        self._feed.report_policy(version)

    def note_weights(self, step: int, checksum: str) -> None:
        """Record the checksum of the weights after a step, if the run is recorded."""
        if self._record is not None:
            self._record.note_weights(step, checksum)

    def state(self) -> dict[str, Any]:
        """Return the JSON object to save in a checkpoint after the latest batch was trained."""
        return {
            "run_id": self._journal.run_id,
            "batch_id": self._batch_id,
            "trained": [list(mark) for mark in self._marks],
        }

    def wants_checkpoint(self) -> bool:
        """Return whether the journal is so large that a checkpoint has to replace it."""
        return self._journal.size_bytes >= self._journal_limit_bytes

    def saved(self, step: int) -> None:
        self._journal.forget_through(step)
