"""The trainer's end of the trajectory service: registering, polling, surviving an outage."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from atroposlib.api.client import LeasedBatch, TrainerClient
from atroposlib.errors import TrajectoryApiError
from atroposlib.utils.text import without_secrets
from example_trainer.config import TrainingConfig

__all__ = [
    "BatchClient",
    "TrajectoryFeed",
    "check_atropos_api",
    "get_batch",
    "open_client",
    "register_trainer",
    "registration_of",
]

logger = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_SHORTEST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_LONGEST_RETRY_S = 10.0
_SECONDS_BETWEEN_NOTES = 30.0
_LET_GO = (404, 409)
_ENVIRONMENT_CHECKPOINT_STEPS = 3
"""Steps between checkpoints of the environments, which are small, where ours go by minutes."""

Result = TypeVar("Result")


class BatchClient(Protocol):
    """What the feed needs of `TrainerClient`."""

    def register(self, **registration: Any) -> int:
        """Register the trainer and return its uuid."""

    def batch(self, *, lease_s: float, wait_s: float) -> LeasedBatch | None:
        """Take the next batch, waiting so long for one; None when there is none yet."""

    def ack(self, batch_id: str | None, *, steps_done: int | None = None) -> None:
        """Acknowledge a leased batch, of a trainer that has done so many steps."""

    def status(self) -> dict[str, Any]:
        """Return the step of the service, `current_step`, and what it tells besides."""

    def set_policy_version(self, version: int) -> bool:
        """Report which weights the engine serves; False when the service does not ask for it."""

    def wait_until_up(
        self, timeout_s: float, on_wait: Callable[[float], None] | None = None
    ) -> None:
        """Wait until the service answers."""


def open_client(url: str) -> TrainerClient:
    """Return a client that shows the token in `ATROPOS_API_TOKEN`, if there is one."""
    return TrainerClient(url, token=os.environ.get("ATROPOS_API_TOKEN"))


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
    """Delivers one batch of groups per optimiser step, waiting as long as it takes.

    An unreachable service is waited for up to `config.service_timeout_s` seconds per outage; a
    service that was restarted empty is registered with again.

    Args:
        client: Connection to the service.
        config: Settings.
        sleep: Waits that many seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: BatchClient,
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
        self._is_policy_told = True
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
        forgot this one later is not asked to, for it may serve somebody else by then.
        """
        body = registration_of(self._config, starting_step=step)
        if self._config.replace_run and not self._is_registered:
            body["replace"] = True
        self._client.register(**body)
        self._is_registered = True

    def report_policy(self, version: int) -> None:
        """Tell the service which weights the engine serves now; one that is away is told later.

        Args:
            version: Optimiser steps behind those weights.

        Raises:
            TrajectoryApiError: the service refused.
        """
        self._policy_version = version
        self._is_policy_told = False
        self._tell_policy()

    def _tell_policy(self) -> None:
        if self._is_policy_told or self._policy_version is None:
            return
        try:
            self._client.set_policy_version(self._policy_version)
        except TrajectoryApiError as error:
            if not _is_outage(error):
                raise
            logger.warning("the service does not know the policy version yet: %s", error)
        else:
            self._is_policy_told = True

    def next_batch(self, step: int) -> LeasedBatch:
        """Wait for the next batch and lease it.

        The service is asked to answer once there is one; a service that answers at once is asked
        again after growing pauses.

        Args:
            step: Optimiser steps done, told to a service that has forgotten this run.

        Raises:
            TrajectoryApiError: the service refused, or stayed away for `service_timeout_s`.
        """
        poll_s = _SHORTEST_POLL_S
        next_note_s = self._clock() + _SECONDS_BETWEEN_NOTES
        while True:
            self._tell_policy()
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
            TrajectoryApiError: the service stayed away for `service_timeout_s`.
        """
        try:
            self._outlasting(lambda: self._client.ack(batch_id, steps_done=steps_done))
        except TrajectoryApiError as error:
            if error.status not in _LET_GO:
                raise
            logger.warning("batch %s is done, its lease was over: %s", batch_id, error)

    def _why_no_batch(self, step: int) -> str:
        """Say what to look at; older services count refused batches as steps."""
        try:
            service_step = int(self._client.status()["current_step"])
        except TrajectoryApiError:
            service_step = step
        if service_step <= step:
            return "are environments running?"
        return (
            f"the service counts {service_step} steps, this trainer has done {step}: environments "
            "may have ended too early, start them again with --env.end_with_trainer false"
        )

    def _take(self, step: int) -> LeasedBatch | None:
        """Ask once; outlast an outage."""
        try:
            return self._outlasting(
                lambda: self._client.batch(lease_s=self._config.lease_s, wait_s=_LONG_POLL_S)
            )
        except TrajectoryApiError as error:
            if not _is_unregistered(error):
                raise
            logger.warning("the service does not know this run; registering again")
            self.register(step)
            self._is_policy_told = False
            return None

    def _outlasting(self, request: Callable[[], Result]) -> Result:
        """Repeat a request while the service is away."""
        retry_s = _SHORTEST_POLL_S
        gone_since: float | None = None
        while True:
            try:
                return request()
            except TrajectoryApiError as error:
                if _is_unregistered(error) or not _is_outage(error):
                    raise
                now = self._clock()
                if gone_since is None:
                    gone_since = now
                    logger.warning(
                        "the service at %s is away, trying again: %s",
                        without_secrets(self._config.atropos_url),
                        error,
                    )
                if now - gone_since >= self._config.service_timeout_s:
                    raise TrajectoryApiError(
                        f"the service at {without_secrets(self._config.atropos_url)} stayed away "
                        f"for {self._config.service_timeout_s:g} s: {error}",
                        status=error.status,
                    ) from error
                self._sleep(error.retry_after_s or retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)


def _is_unregistered(error: TrajectoryApiError) -> bool:
    # The service answers 200 with status "error"; the client passes its sentence on.
    return "not registered" in str(error).lower()


def _is_outage(error: TrajectoryApiError) -> bool:
    return error.status is None or error.status in (429, 502, 503, 504)


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
