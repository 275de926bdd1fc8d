"""The standing of one environment with the trajectory service: registered, sending, gone.

Waits out a service that is down or has no trainer yet, saying so in the log, and lets sends wait
while the environment is not registered. What the messages *mean* is the environment's business;
this module only knows how to keep asking.

A group is sent under one key until it is accepted: services that honour keys store it once, older
ones at least once.

When the inference servers of a serving environment were last up, requests or none.

    look ──► a request was answered since the last look, or a probe is ──► last seen now
         └─► neither ──► away since it was last seen

A server that is down holds its requests until it is back (`server_handling`). This says for how
long all of them have been away, which ends the wait for an engine that has left for good.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.errors import TrajectoryApiError

if TYPE_CHECKING:
    from atroposlib.api.client import TrajectoryApiClient

__all__ = [
    "UNKNOWN_ENV_STATUSES",
    "EngineWatch",
    "EnvSession",
    "is_outage",
]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

OUTAGE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
"""Refusals that say "not now" rather than "not this"."""


UNKNOWN_ENV_STATUSES = frozenset({404, 500})
"""Replies to a status question about an id that a service restart forgot: ours, and older ones."""

LONGEST_PAUSE_S = 10.0
MOST_FAILED_SENDS = 3
OUTAGE_NOTE_S = 30.0
"""Seconds between two log lines about a service that is down."""


def is_outage(error: TrajectoryApiError) -> bool:
    """Tell whether the same request may succeed later."""
    return error.status is None or error.status in OUTAGE_STATUSES


class EnvSession:
    """One environment's connection to the service.

    Args:
        client: speaks to the service.
        retry_s: seconds between two attempts while waiting.
        clock: monotonic seconds.

    Attributes:
        env_id: id of the current registration, None while there is none.
        num_groups_sent: groups the service has accepted, over all registrations.
    """

    def __init__(
        self,
        client: TrajectoryApiClient,
        *,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.env_id: int | None = None
        self.num_groups_sent = 0
        self._retry_s = retry_s
        self._run_id: str | None = None
        self._num_registrations = 0
        self._outages_at_confirmation = 0
        self._clock = clock
        self._away_since: float | None = None
        self._told_at: dict[str, float] = {}
        self._is_registered = asyncio.Event()

    @property
    def is_registered(self) -> bool:
        """Whether the service knows this environment, as far as we have heard."""
        return self._is_registered.is_set()

    @property
    def earlier_registration(self) -> tuple[int, str] | None:
        """Id and run of the latest registration; None before it, or when the run has no name."""
        if self.env_id is None or self._run_id is None:
            return None
        return self.env_id, self._run_id

    async def ask(
        self,
        question: Callable[[], Awaitable[Answer | None]],
        *,
        waiting_for: str,
        may_pass: Callable[[TrajectoryApiError], bool] = is_outage,
        backs_off: bool = False,
    ) -> Answer:
        """Repeat a question until it has an answer.

        Args:
            question: returns None while there is no answer yet; outages count as no answer.
            waiting_for: what is missing while the answer is None, for the log.
            may_pass: tells outages from refusals for good.
            backs_off: double the pause with every outage, up to ten seconds, for what is costly
                to ask.

        Raises:
            TrajectoryApiError: the service refuses for good.
        """
        longest_s = max(self._retry_s, LONGEST_PAUSE_S) if backs_off else self._retry_s
        next_pause_s = self._retry_s
        while True:
            pause_s = self._retry_s
            try:
                answer = await question()
            except TrajectoryApiError as error:
                if not may_pass(error):
                    raise
                pause_s = max(next_pause_s, error.retry_after_s or 0.0)
                if backs_off:
                    pause_s *= 1.0 + random.random() / 4.0  # else all groups come back at once
                next_pause_s = min(2.0 * next_pause_s, longest_s)
                self._tell_outage(error)
            else:
                if answer is not None:
                    if self._told_at:
                        logger.info("the trajectory service has answered; going on")
                    self._told_at.clear()
                    self._away_since = None
                    return answer
                self._tell_missing(waiting_for)
            await asyncio.sleep(pause_s)

    def _tell_outage(self, error: TrajectoryApiError) -> None:
        """Log twice a minute that the service is down, however many requests wait for it."""
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        reason = f"status {error.status}"
        if now - self._told_at.get(reason, float("-inf")) < OUTAGE_NOTE_S:
            return
        self._told_at[reason] = now
        waited_s = now - self._away_since
        so_far = f", for {waited_s:.0f} s so far" if waited_s >= 1 else ""
        logger.warning(
            "the trajectory service is not available (%s); waiting for it%s", error, so_far
        )

    def _tell_missing(self, waiting_for: str) -> None:
        """Log once what a service that is up lacks, however many requests wait for it."""
        self._away_since = None
        if waiting_for not in self._told_at:
            self._told_at[waiting_for] = self._clock()
            logger.warning("waiting for %s", waiting_for)

    def enter(self, env_id: int, *, run_id: str | None = None) -> None:
        """Take note of a registration; sends that waited for it go on.

        Args:
            env_id: id in the run.
            run_id: what the service calls the run, None when it does not say.
        """
        self.env_id = env_id
        self._run_id = run_id
        self._num_registrations += 1
        self._outages_at_confirmation = self.client.num_outages
        self._is_registered.set()

    def forget_registration(self) -> None:
        """Take note that the service does not know us any more; sends wait from now on."""
        self._is_registered.clear()

    async def send(self, groups: Mapping[str, Any] | list[Any]) -> None:
        """Deliver one group (a mapping) or several (a list), waiting out outages.

        The groups get the `env_id` of the registration they are sent under: after an outage it
        is asked for again first, since the service may have come back as a new run, where the id
        may be another's. Cancelling is safe but may leave the delivery unknown.

        Raises:
            TrajectoryApiError: the service refuses the groups; the message holds its words.
            GroupError: a group cannot be encoded.
        """
        key = uuid.uuid4().hex
        num_failures = 0

        async def deliver() -> bool:
            await self._is_registered.wait()
            await self._confirm_registration()
            if isinstance(groups, list):
                stamped = [{**group, "env_id": self.env_id} for group in groups]
                await self.client.post_groups(stamped, key=key)
            else:
                await self.client.post_group({**groups, "env_id": self.env_id}, key=key)
            return True

        def may_pass(error: TrajectoryApiError) -> bool:
            nonlocal num_failures
            num_failures += error.status == 500
            return is_outage(error) or (error.status == 500 and num_failures < MOST_FAILED_SENDS)

        await self.ask(
            deliver, waiting_for="the service to take a group", may_pass=may_pass, backs_off=True
        )
        self.num_groups_sent += len(groups) if isinstance(groups, list) else 1

    async def status(self, env_id: int) -> dict[str, Any]:
        """Return the queue as the environment sees it.

        Raises:
            TrajectoryApiError: with status 404, the service does not know the environment: nobody
                has the id, or it is somebody's in another run than the one it was given in.
        """
        run_id = self._run_id
        status = await self.client.status_env(env_id)
        if run_id is not None and status.get("run_id", run_id) != run_id:
            raise TrajectoryApiError(
                f"environment id {env_id} is of another run than the one served now: a trainer "
                "has replaced its settings, or a new run has begun",
                status=404,
            )
        return status

    async def _confirm_registration(self) -> None:
        """After an outage, wait for a new registration where the service has forgotten ours."""
        num_outages, num_registrations = self.client.num_outages, self._num_registrations
        if self.env_id is None or num_outages == self._outages_at_confirmation:
            return
        try:
            await self.status(self.env_id)
            self._outages_at_confirmation = num_outages
        except TrajectoryApiError as error:
            if error.status not in UNKNOWN_ENV_STATUSES:
                raise
            if self._num_registrations == num_registrations:
                self.forget_registration()
            await self._is_registered.wait()

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


class EngineWatch:
    """How long no inference server of an environment has been up.

    Args:
        servers: Those of its `ServerManager`.
        now: Clock, monotonic seconds.

    Attributes:
        away_s: Seconds for which no server was up, as of the last look. 0 while one is, and where
            that cannot be known: no server has answered yet, or one is not probed.
    """

    def __init__(
        self, servers: Sequence[Any], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.away_s = 0.0
        self._servers = servers
        self._now = now
        self._last_seen: float | None = None
        self._num_answered = 0

    @property
    def names(self) -> str:
        """The addresses of the servers, for messages."""
        return ", ".join(server.health.name for server in self._servers)

    async def look(self) -> None:
        """Look whether a server is up; probes those of which nothing was heard."""
        asked_at = self._now()
        if await self._is_one_up():
            self._last_seen = asked_at
            self.away_s = 0.0
        elif self._last_seen is not None:
            self.away_s = self._now() - self._last_seen

    async def _is_one_up(self) -> bool:
        servers = [server for server in self._servers if isinstance(server, APIServer)]
        if len(servers) < len(self._servers) or not all(s.is_probed for s in servers):
            return True
        num_answered = sum(server.num_answered for server in servers)
        has_answered_since = num_answered > self._num_answered
        self._num_answered = num_answered
        if has_answered_since:
            return True
        known = [server for server in servers if server.num_answered or server.health.has_answered]
        for server in known:
            if await server.probe():
                return True
        return False
