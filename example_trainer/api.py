"""The trainer's client of the trajectory service, and the journal of its batches.

    service --lease--> journal --> optimizer step --> checkpoint, sync --> acknowledge

The trainer's disk decides whether a batch was trained: the newest checkpoint gives the last step
done, and the journal holds the batches of the steps after it.

    journal/ run.json          which run writes here
             step_<n>.batch    the batch of optimizer step n: groups and lease token
             step_<n>/         a checkpoint, written when the records had become too large
             refused_<k>.batch a batch that was rejected; never read again

A record is written, flushed and renamed into place before its batch is trained, and deleted once a
checkpoint of step n or later is on disk. If checkpoints are rare or disabled, the records grow
until they take as much space as a checkpoint; one is then written in their place.
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
from typing import Any, NamedTuple

import msgspec

from atroposlib.api.client import LeasedBatch, RetryRule, TrainerClient, says_unregistered
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.text import without_secrets
from example_trainer.checkpointing import (
    drop_checkpoints_before,
    has_unnamed_checkpoint,
    write_file,
)
from example_trainer.config import TrainingConfig

__all__ = [
    "JOURNAL_DIRECTORY",
    "SMALLEST_LIMIT_BYTES",
    "BatchJournal",
    "BatchMark",
    "DurableFeed",
    "TrajectoryFeed",
    "check_atropos_api",
    "checkpoint_bytes",
    "get_batch",
    "open_client",
    "register_trainer",
    "registration_of",
]

logger = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_SHORTEST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_SECONDS_BETWEEN_NOTES = 30.0
_LET_GO = (404, 409)
_ENVIRONMENT_CHECKPOINT_STEPS = 3
"""Steps between checkpoints of the environments, which are small, where ours go by minutes."""


def open_client(url: str, *, patience_s: float | None = None) -> TrainerClient:
    """Return a client that shows the token in `ATROPOS_API_TOKEN`, if there is one.

    Args:
        url: Address of the service.
        patience_s: Seconds that each request waits for an unreachable service; None: a few retries.
    """
    retry = (
        None
        if patience_s is None
        else RetryRule(attempts=None, max_delay_s=5.0, deadline_s=patience_s)
    )
    return TrainerClient(url, retry=retry, token=os.environ.get("ATROPOS_API_TOKEN"))


def registration_of(config: TrainingConfig, *, starting_step: int = 0) -> dict[str, Any]:
    """Return the body of `POST /register` for a run that has done `starting_step` steps."""
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


class TrajectoryFeed:
    """Delivers one batch of groups per optimizer step, waiting as long as it takes.

    A service that was restarted empty is registered with again. How long an unreachable service is
    waited for is the client's rule (`open_client`).
    """

    def __init__(
        self,
        client: TrainerClient,
        config: TrainingConfig,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config
        self._sleep = sleep
        self._clock = clock
        self._policy_version: int | None = None
        self._is_registered = False

    def connect(self) -> None:
        """Wait until the service answers, saying so.

        Raises:
            TrajectoryApiError: it did not within `service_timeout_s`.
        """
        next_note_s = 0.0

        def note(waited_s: float) -> None:
            nonlocal next_note_s
            if waited_s >= next_note_s:
                logger.info(
                    "waiting for the service at %s (run-api)",
                    without_secrets(self._config.atropos_url),
                )
                next_note_s = waited_s + _SECONDS_BETWEEN_NOTES

        self._client.wait_until_up(self._config.service_timeout_s, on_wait=note)

    def register(self, step: int) -> None:
        """Tell the service about this run, `step` optimiser steps into it.

        Under `replace_run` the first call takes over a run with other settings; a service that
        forgot this one later is not asked to, since it may serve another run by then.
        """
        body = registration_of(self._config, starting_step=step)
        if self._config.replace_run and not self._is_registered:
            body["replace"] = True
        self._client.register(**body)
        self._is_registered = True

    def report_policy(self, version: int) -> None:
        """Tell the service that the engine serves the weights of `version` optimizer steps.

        Raises:
            TrajectoryApiError: the service refused, or stayed away.
        """
        self._policy_version = version
        self._client.set_policy_version(version)

    def next_batch(self, step: int) -> LeasedBatch:
        """Wait for the next batch and lease it.

        The service is asked to answer once there is one; a service that answers at once is asked
        again after growing pauses.

        Args:
            step: Optimiser steps done, told to a service that has forgotten this run.

        Raises:
            TrajectoryApiError: the service refused, or stayed away.
        """
        poll_s = _SHORTEST_POLL_S
        next_note_s = self._clock() + _SECONDS_BETWEEN_NOTES
        while True:
            asked_at = self._clock()
            batch = self._take(step)
            if batch is not None and batch.groups:
                return batch
            if self._clock() >= next_note_s:
                logger.info("step %d: no full batch yet; %s", step + 1, self._why_no_batch(step))
                next_note_s = self._clock() + _SECONDS_BETWEEN_NOTES
            if self._clock() - asked_at < _LONG_POLL_S / 2:
                self._sleep(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def acknowledge(self, batch_id: str | None, *, steps_done: int) -> None:
        """Tell the service that a batch is trained, or refused; may be repeated.

        A service that has let the batch go meanwhile is told nothing: that it is trained stands in
        the checkpoints, and a batch that comes twice is recognised.

        Args:
            batch_id: Its hand-out token; None, from a service without leases, is passed over.
            steps_done: Optimizer steps done; a service that has counted as many counts no other.

        Raises:
            TrajectoryApiError: the service stayed away.
        """
        try:
            self._client.ack(batch_id, steps_done=steps_done)
        except TrajectoryApiError as error:
            if error.status not in _LET_GO:
                raise
            logger.warning("batch %s is done, its lease was over: %s", batch_id, error)

    def _why_no_batch(self, step: int) -> str:
        """Say what to look at; older services count refused batches as steps."""
        service_step = int(self._client.status()["current_step"])
        if service_step <= step:
            return "are environments running?"
        return (
            f"the service counts {service_step} steps, this trainer has done {step}: environments "
            "may have ended too early, start them again with --env.end_with_trainer false"
        )

    def _take(self, step: int) -> LeasedBatch | None:
        try:
            return self._client.batch(lease_s=self._config.lease_s, wait_s=_LONG_POLL_S)
        except TrajectoryApiError as error:
            if not says_unregistered(error):
                raise
            logger.warning("the service does not know this run; registering again")
            self.register(step)
            if self._policy_version is not None:
                self._client.set_policy_version(self._policy_version)
            return None


def check_atropos_api(url: str, timeout: float = 30) -> bool:
    """Say whether the service answers within `timeout` seconds."""
    with open_client(url) as client:
        try:
            client.wait_until_up(timeout)
        except TrajectoryApiError:
            return False
    return True


def register_trainer(config: TrainingConfig) -> int:
    """Register a fresh run and return the uuid the service answers.

    Raises:
        TrajectoryApiError: the service refused, or could not be reached.
    """
    with open_client(config.atropos_url) as client:
        return client.register(**registration_of(config))


def get_batch(url: str = "http://localhost:8000") -> dict[str, Any]:
    """Ask once for a batch: `{"batch": groups}`, or `{"batch": None}` when none is ready.

    Raises:
        TrajectoryApiError: the service refused, or could not be reached.
    """
    with open_client(url) as client:
        return {"batch": client.batch()}


JOURNAL_DIRECTORY = "journal"
SMALLEST_LIMIT_BYTES = 2**30
"""The records may take as much in any case."""
_RECORD = re.compile(r"step_(\d+)\.batch")
_REFUSED = re.compile(r"refused_(\d+)\.batch")
_MOST_REFUSED_KEPT = 16
"""The newest ones: such batches must not fill the disk."""


class _Record(msgspec.Struct, frozen=True):
    run_id: str
    step: int
    batch_id: str | None
    groups: list[dict[str, Any]]


def checkpoint_bytes(model: Any, *, trained_only: bool) -> int:
    """Return about how much a resumable checkpoint takes: weights, and two moments of each trained.

    `trained_only`: adapters are saved without the model they belong to.
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
    """Reads and writes the records of one run; passes over those of others in its directory."""

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
        """Wait for the batch of the optimiser step that follows `step` finished ones.

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
        self._journal.forget_through(step)
