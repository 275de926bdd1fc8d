"""The trainer's end of the trajectory service: registering, polling, surviving an outage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from atroposlib.api.client import TrainerClient
from atroposlib.errors import TrajectoryApiError
from example_trainer.config import TrainingConfig

__all__ = [
    "BatchClient",
    "TrajectoryFeed",
    "check_atropos_api",
    "get_batch",
    "register_trainer",
    "registration_of",
]

logger = logging.getLogger(__name__)

_SHORTEST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_LONGEST_RETRY_S = 10.0
_SECONDS_BETWEEN_NOTES = 30.0


class BatchClient(Protocol):
    """What the feed needs of `TrainerClient`."""

    def register(self, **registration: Any) -> int:
        """Register the trainer and return its uuid."""

    def batch(self) -> list[dict[str, Any]] | None:
        """Take the next batch, None when there is none yet."""

    def wait_until_up(
        self, timeout_s: float, on_wait: Callable[[float], None] | None = None
    ) -> None:
        """Wait until the service answers."""


def registration_of(config: TrainingConfig, *, starting_step: int = 0) -> dict[str, Any]:
    """Return the body of `POST /register` for a run that has done `starting_step` steps."""
    return {
        "wandb_group": config.wandb_group or "",
        "wandb_project": config.wandb_project or "",
        "batch_size": config.sequences_per_step,
        "max_token_len": config.seq_len,
        "checkpoint_dir": config.save_path,
        "save_checkpoint_interval": config.checkpoint_interval or config.training_steps,
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

    def connect(self) -> None:
        """Wait until the service answers, saying so.

        Raises:
            TrajectoryApiError: it did not within `service_timeout_s`.
        """
        next_note_s = 0.0

        def note(waited_s: float) -> None:
            nonlocal next_note_s
            if waited_s >= next_note_s:
                logger.info("waiting for the service at %s (run-api)", self._config.atropos_url)
                next_note_s = waited_s + _SECONDS_BETWEEN_NOTES

        self._client.wait_until_up(self._config.service_timeout_s, on_wait=note)

    def register(self, step: int) -> None:
        """Tell the service about this run, `step` optimiser steps into it."""
        self._client.register(**registration_of(self._config, starting_step=step))

    def next_groups(self, step: int) -> list[dict[str, Any]]:
        """Wait for the next batch and return its groups.

        Args:
            step: Optimiser steps done, told to a service that has forgotten this run.

        Raises:
            TrajectoryApiError: the service refused, or stayed away for `service_timeout_s`.
        """
        poll_s = _SHORTEST_POLL_S
        next_note_s = self._clock() + _SECONDS_BETWEEN_NOTES
        while True:
            groups = self._take(step)
            if groups:
                return groups
            if self._clock() >= next_note_s:
                logger.info("step %d: no full batch yet; are environments running?", step + 1)
                next_note_s = self._clock() + _SECONDS_BETWEEN_NOTES
            self._sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    def _take(self, step: int) -> list[dict[str, Any]] | None:
        """Ask once; outlast an outage."""
        retry_s = _SHORTEST_POLL_S
        gone_since: float | None = None
        while True:
            try:
                return self._client.batch()
            except TrajectoryApiError as error:
                if _is_unregistered(error):
                    logger.warning("the service does not know this run; registering again")
                    self.register(step)
                    return None
                if not _is_outage(error):
                    raise
                now = self._clock()
                if gone_since is None:
                    gone_since = now
                    logger.warning(
                        "the service at %s is away, trying again: %s",
                        self._config.atropos_url,
                        error,
                    )
                if now - gone_since >= self._config.service_timeout_s:
                    raise TrajectoryApiError(
                        f"the service at {self._config.atropos_url} stayed away for "
                        f"{self._config.service_timeout_s:g} s: {error}",
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
    with TrainerClient(url) as client:
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
    with TrainerClient(config.atropos_url) as client:
        return client.register(**registration_of(config))


def get_batch(url: str) -> dict[str, Any]:
    """Ask once for a batch: `{"batch": groups}`, or `{"batch": None}` when none is ready.

    Raises:
        TrajectoryApiError: the service refused, or could not be reached.
    """
    with TrainerClient(url) as client:
        return {"batch": client.batch()}
