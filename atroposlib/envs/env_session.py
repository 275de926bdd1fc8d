"""The standing of one environment with the trajectory service: registered, sending, gone.

Waits out a service that is down or has no trainer yet, with one log line per reason, and lets
sends wait while the environment is not registered. What the messages *mean* is the
environment's business; this module only knows how to keep asking.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.errors import TrajectoryApiError

if TYPE_CHECKING:
    from atroposlib.api.client import TrajectoryApiClient

__all__ = ["EnvSession", "is_outage"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

OUTAGE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
"""Refusals that say "not now" rather than "not this"."""


def is_outage(error: TrajectoryApiError) -> bool:
    """Tell whether the same request may succeed later."""
    return error.status is None or error.status in OUTAGE_STATUSES


class EnvSession:
    """One environment's connection to the service.

    Args:
        client: speaks to the service.
        retry_s: seconds between two attempts while waiting.

    Attributes:
        env_id: id of the current registration, None while there is none.
        num_groups_sent: groups the service has accepted, over all registrations.
    """

    def __init__(self, client: TrajectoryApiClient, *, retry_s: float = 1.0) -> None:
        self.client = client
        self.env_id: int | None = None
        self.num_groups_sent = 0
        self._retry_s = retry_s
        self._told: set[str] = set()
        self._is_registered = asyncio.Event()

    @property
    def is_registered(self) -> bool:
        """Whether the service knows this environment, as far as we have heard."""
        return self._is_registered.is_set()

    async def ask(
        self, question: Callable[[], Awaitable[Answer | None]], *, waiting_for: str
    ) -> Answer:
        """Repeat a question until it has an answer.

        Args:
            question: returns None while there is no answer yet; outages count as no answer.
            waiting_for: what is missing while the answer is None, for the log.

        Raises:
            TrajectoryApiError: the service refuses for good.
        """
        while True:
            pause_s = self._retry_s
            try:
                answer = await question()
            except TrajectoryApiError as error:
                if not is_outage(error):
                    raise
                pause_s = max(pause_s, error.retry_after_s or 0.0)
                what = f"the trajectory service is not available ({error}); waiting for it"
                self._tell(f"status {error.status}", what)
            else:
                if answer is not None:
                    if self._told:
                        logger.info("the trajectory service has answered; going on")
                    self._told.clear()
                    return answer
                self._tell(waiting_for, f"waiting for {waiting_for}")
            await asyncio.sleep(pause_s)

    def _tell(self, reason: str, message: str) -> None:
        """Log a reason to wait once, however many requests wait for it."""
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("%s", message)

    def enter(self, env_id: int) -> None:
        """Take note of a registration; sends that waited for it go on."""
        self.env_id = env_id
        self._is_registered.set()

    def forget_registration(self) -> None:
        """Take note that the service does not know us any more; sends wait from now on."""
        self._is_registered.clear()

    async def send(self, groups: Mapping[str, Any] | list[Any]) -> None:
        """Deliver one group (a mapping) or several (a list), waiting out outages.

        The groups get the `env_id` of the registration they are sent under. Cancelling is safe
        but may leave the delivery unknown.

        Raises:
            TrajectoryApiError: the service refuses the groups; the message holds its words.
            GroupError: a group cannot be encoded.
        """

        async def deliver() -> bool:
            await self._is_registered.wait()
            if isinstance(groups, list):
                stamped = [{**group, "env_id": self.env_id} for group in groups]
                await self.client.post_groups(stamped)
            else:
                await self.client.post_group({**groups, "env_id": self.env_id})
            return True

        await self.ask(deliver, waiting_for="the service to take a group")
        self.num_groups_sent += len(groups) if isinstance(groups, list) else 1

    async def leave(self, *, timeout_s: float) -> None:
        """Disconnect and close; failures are only logged, the run is over anyway."""
        try:
            if self.env_id is not None and self.is_registered:
                await asyncio.wait_for(self.client.disconnect_env(self.env_id), timeout_s)
                logger.info("disconnected from the trajectory service")
        except (TrajectoryApiError, asyncio.TimeoutError) as error:
            logger.warning("could not disconnect from the trajectory service: %r", error)
        finally:
            self.forget_registration()
            await self.client.close()
