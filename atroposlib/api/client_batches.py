"""Batches as an iterator, for trainers that have a loop of their own.

    register ─► [ lease ─► the caller trains ─► acknowledge ] ... ─► the run has its steps

A batch is acknowledged when the next one is asked for, or explicitly. The last batch of the run has
no next one: it is acknowledged when `with` is left, or the program ends, without an error. What is
not acknowledged goes back to the service when the iterator is closed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from atroposlib.api.client_rules import LeasedBatch, RetryRule, says_unregistered
from atroposlib.api.client_sync import TrainerClient
from atroposlib.errors import ConfigError, TrajectoryApiError

__all__ = ["BatchIterator", "batches"]

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 5.0
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_MOVED_ON = (404, 409)
_AT_EXIT = RetryRule(attempts=2)
"""Nobody waits for minutes for a program that has done its work."""


class BatchIterator:
    """The batches of one run; made by `batches`, and for `async for` put into `AsyncBatches`.

    One thread at a time may use it. Each entry is a `LeasedBatch`; `docs/wire.md` says what its
    `groups` hold.

    Attributes:
        num_acknowledged: batches acknowledged as trained through this iterator.
    """

    def __init__(
        self,
        client: TrainerClient,
        registration: dict[str, Any],
        *,
        lease_s: float,
        acknowledge: Literal["next", "explicit"],
        idle_limit_s: float | None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_acknowledged = 0
        self._client = client
        self._registration = registration
        self._lease_s = lease_s
        self._acknowledges_at_next = acknowledge == "next"
        self._idle_limit_s = idle_limit_s
        self._sleep = sleep
        self._clock = clock
        self._is_registered = self._is_registered_at_exit = False
        self._is_closed = self._is_ending = False
        self._process_id = os.getpid()
        self._held: dict[str, LeasedBatch] = {}

    @property
    def held(self) -> list[LeasedBatch]:
        """The batches that are neither acknowledged nor given back, oldest first."""
        return list(self._held.values())

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> LeasedBatch:
        """Acknowledge the last batch and wait for the next.

        Raises:
            StopIteration: the run has its steps, this is closed, or nothing came for
                `idle_limit_s`.
            TrajectoryApiError: the service refused, or stayed away for too long.
        """
        batch = self.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def ack(self, batch: LeasedBatch, *, is_trained: bool = True) -> None:
        """Tell the service that a batch is trained; a second time changes nothing.

        One whose lease had run out is noted in the log: others may have got it too.

        Args:
            batch: taken from this iterator.
            is_trained: whether it was an optimizer step; otherwise the batch is done with, and
                the service delivers another in its place. Older services count it all the same.

        Raises:
            TrajectoryApiError: the service stayed away for too long.
        """
        if batch.batch_id is not None and self._held.pop(batch.batch_id, None) is None:
            return
        try:
            self._client.ack(batch.batch_id, steps_done=None if is_trained else 0)
        except TrajectoryApiError as error:
            if error.status not in _MOVED_ON:
                raise
            logger.warning("batch %s is done, its lease was over: %s", batch.batch_id, error)
        else:
            self.num_acknowledged += is_trained

    def nack(self, batch: LeasedBatch) -> None:
        """Give a batch back: it is the next to be delivered; to whom, the service decides."""
        if batch.batch_id is None or self._held.pop(batch.batch_id, None) is None:
            return
        try:
            self._client.nack(batch.batch_id)
        except TrajectoryApiError as error:
            if error.status not in _MOVED_ON:
                raise

    def set_policy_version(self, version: int) -> None:
        """Tell the service which weights the inference engine serves now."""
        self._register()
        self._client.set_policy_version(version)

    def stop_waiting(self) -> None:
        """Let a wait in another thread end at its next request, without a batch."""
        self._is_ending = True

    def close(self) -> None:
        """Give back what is not acknowledged and end; a second call changes nothing."""
        if self._is_closed:
            return
        self._is_closed = self._is_ending = True
        atexit.unregister(self._leave_at_exit)
        try:
            for batch in self.held:
                self.nack(batch)
        except TrajectoryApiError as error:
            logger.warning("a batch comes back when its lease runs out: %s", error)
        self._client.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(is_failed=exc_type is not None)

    def leave(self, *, is_failed: bool = False) -> None:
        """End as `with` does: acknowledge the last batch of the run, give any other back.

        Args:
            is_failed: Whether the batch in hand was not trained to its end; then it is given back
                even if it is the last.
        """
        if not is_failed and self._acknowledges_at_next and not self._is_closed and self._held:
            try:
                self._acknowledge_last()
            except TrajectoryApiError as error:
                logger.warning("the last batch could not be acknowledged: %s", error)
        self.close()

    def _acknowledge_last(self) -> None:
        """Acknowledge what is held if the run has its steps with that."""
        status = self._client.status()
        num_leased = max(len(self._held), status.get("leased_batches", 0))
        if status["current_step"] + num_leased >= self._registration["num_steps"]:
            for batch in self.held:
                self.ack(batch)

    def _leave_at_exit(self) -> None:
        """End where a program without `with` ends; after an uncaught error the batch goes back."""
        if os.getpid() != self._process_id:
            return  # a forked process that never had the batch
        self._client.set_retry(_AT_EXIT)
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self.leave(is_failed=error is not None)

    def next_batch(self) -> LeasedBatch | None:
        """Do what `next` does; None at the end."""
        if self._is_closed:
            return None
        self._register()
        if self._acknowledges_at_next:
            for batch in self.held:
                self.ack(batch)
        if self._is_over():
            return None
        return self._wait()

    def _wait(self) -> LeasedBatch | None:
        pause_s = _SHORTEST_PAUSE_S
        idle_since = self._clock()
        while not self._is_ending:
            asked_at = self._clock()
            batch = self._take(self._patience_s(asked_at - idle_since))
            if batch is not None and batch.groups:
                if batch.batch_id is not None:
                    self._held[batch.batch_id] = batch
                return batch
            now = self._clock()
            is_late = self._idle_limit_s is not None and now - idle_since >= self._idle_limit_s
            if is_late or self._is_over():
                return None
            if now - asked_at < _SHORTEST_PAUSE_S:  # a service that does not know `wait`
                self._sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _patience_s(self, idle_s: float) -> float:
        if self._idle_limit_s is None:
            return _LONGEST_WAIT_S
        return min(_LONGEST_WAIT_S, max(0.0, self._idle_limit_s - idle_s))

    def _take(self, wait_s: float) -> LeasedBatch | None:
        try:
            return self._client.batch(lease_s=self._lease_s, wait_s=wait_s)
        except TrajectoryApiError as error:
            if not says_unregistered(error):
                raise
            logger.warning("the service does not know this run; registering again")
            self._is_registered = False
            self._register()
            return None

    def _register(self) -> None:
        if not self._is_registered:
            step = self._registration["starting_step"] + self.num_acknowledged
            self._client.register(**{**self._registration, "starting_step": step})
            if not self._is_registered_at_exit:
                atexit.register(self._leave_at_exit)
            self._is_registered = self._is_registered_at_exit = True

    def _is_over(self) -> bool:
        # Asked, not counted: others may do steps of this run too.
        return bool(self._client.status()["current_step"] >= self._registration["num_steps"])


def batches(
    base_url: str = "http://localhost:8000",
    *,
    batch_size: int,
    num_steps: int,
    max_token_len: int = 2048,
    starting_step: int = 0,
    lease_s: float = 600.0,
    acknowledge: Literal["next", "explicit"] = "next",
    idle_limit_s: float | None = None,
    service_timeout_s: float = 600.0,
    token: str | None = None,
    **registration: Any,
) -> BatchIterator:
    """Return the batches of a run as an iterator, registering the trainer when first asked.

    Iteration ends when the service says that the run has done `num_steps`. Several processes that
    give the same settings share one run: each gets batches of its own.

    Args:
        base_url: address of the service.
        batch_size: sequences per batch; a batch has exactly as many.
        num_steps: batches of the whole run, what `starting_step` counts included.
        max_token_len: longest sequence environments should send, in tokens.
        starting_step: batches trained before, when a run is continued.
        lease_s: seconds within which a batch is acknowledged, or else it is delivered again.
        acknowledge: `next`: a batch counts as trained when the next one is asked for, the last of
            the run when `with` is left or the program ends without an error; `explicit`: only
            `ack` acknowledges, and several batches may be held at a time.
        idle_limit_s: also end when no batch came for so long; None waits as long as it takes.
        service_timeout_s: how long a service that is away is waited for; the log says so.
        token: shown to a service that asks for one; never logged.
        **registration: further fields of `POST /register`, such as `checkpoint_dir`. `replace=True`
            replaces the settings of a running run, and sets its step to `starting_step`.

    Raises:
        ConfigError: a number is out of bounds, or the address or the token cannot be used.

    Example:
        >>> with batches("http://localhost:8000", batch_size=32, num_steps=100) as stream:
        ...     for batch in stream:
        ...         train(batch.groups)
    """
    for name, value in (("batch_size", batch_size), ("num_steps", num_steps)):
        if value < 1:
            raise ConfigError(f"{name}: {value} is below 1")
    if acknowledge not in ("next", "explicit"):
        raise ConfigError(f"acknowledge: {acknowledge!r} is neither 'next' nor 'explicit'")
    patience = RetryRule(attempts=None, deadline_s=service_timeout_s)
    fields = {
        "wandb_group": "",
        "wandb_project": "",
        "checkpoint_dir": "",
        "save_checkpoint_interval": num_steps,
        **registration,
        "batch_size": batch_size,
        "max_token_len": max_token_len,
        "starting_step": starting_step,
        "num_steps": num_steps,
    }
    return BatchIterator(
        TrainerClient(base_url, retry=patience, token=token),
        fields,
        lease_s=lease_s,
        acknowledge=acknowledge,
        idle_limit_s=idle_limit_s,
    )
