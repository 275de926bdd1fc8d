"""How environments come into a run, make themselves heard, fall silent and leave."""

from __future__ import annotations

import logging
from collections.abc import Callable

from atroposlib.api.admission import RunLimits
from atroposlib.api.env_registry import EnvRecord
from atroposlib.api.env_view import EnvView, env_view
from atroposlib.api.presence import Presence
from atroposlib.api.records import EnvDisconnected, EnvRegistered, Record
from atroposlib.api.run_log import RunLog
from atroposlib.api.run_state import RunState
from atroposlib.api.schemas import RegisterEnv
from atroposlib.api.store.base import RunStore

__all__ = ["EnvDesk"]

logger = logging.getLogger(__name__)


class EnvDesk:
    """Keeps the environments of a run.

    Args:
        log: takes what is decided here.
        state: the run.
        store: asked for what other replicas did.
        presence: what this replica heard of environments.
        limits: what the run may hold.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        log: RunLog,
        state: RunState,
        store: RunStore,
        presence: Presence,
        *,
        limits: RunLimits,
        clock: Callable[[], float],
    ) -> None:
        self._log = log
        self._state = state
        self._store = store
        self._presence = presence
        self._limits = limits
        self._clock = clock

    async def register(self, request: RegisterEnv) -> EnvRecord | None:
        """Add an environment to the run; None while there is no trainer asking for batches."""

        def decide() -> tuple[Record | None, int | None]:
            if self._state.registration is None or not self._state.is_started:
                return None, None
            if self._has_been_taken_over(request):
                return None, request.env_id
            env_id = len(self._state.envs)
            return EnvRegistered(env_id, request.model_dump(), self._clock()), env_id

        env = self._state.envs.find(await self._log.guarded(decide))
        if env is not None:
            logger.info("environment %d registered as %s", env.env_id, env.real_name)
        return env

    def _has_been_taken_over(self, request: RegisterEnv) -> bool:
        """Whether it is registered already, in the run that a trainer has taken over."""
        env = self._state.envs.find(request.env_id)
        return (
            env is not None
            and env.is_connected
            and env.desired_name == request.desired_name
            and request.run_id is not None
            and request.run_id == self._state.taken_over_run_id
        )

    async def disconnect(self, env_id: int) -> bool:
        """Note that an environment signed off; False when nobody is registered under the id."""
        await self._find(env_id)

        def decide() -> tuple[Record | None, bool]:
            if self._state.envs.find(env_id) is None:
                return None, False
            return EnvDisconnected(env_id, False, self._clock()), True

        return await self._log.guarded(decide)

    async def view_for(self, env_id: int) -> EnvView | None:
        """Return what one environment needs to know; None when nobody has this id.

        Remembers that the environment was heard of, and the largest group it has queued: later
        answers are in that unit. An environment that had been taken for gone is back.
        """
        env = await self.hear(env_id)
        if env is None:
            return None
        largest = self._state.queue.largest_group_of(env_id)
        env.largest_group = max(env.largest_group, largest)
        return env_view(self._state, env, self._limits)

    async def hear(self, env_id: int | None) -> EnvRecord | None:
        """Take note of a sign of life; returns whose, None when nobody has this id."""
        env = await self._find(env_id)
        if env is None:
            return None
        now = self._clock()
        self._presence.note(env.env_id, now)
        if env.is_expired:
            await self._log.guarded(lambda: (self._presence.revival_of(env.env_id, now), None))
            logger.info("environment %d (%s) is back", env.env_id, env.real_name)
        return env

    async def watch(self) -> None:
        """Write down who was heard of, if that is due, and disconnect who was silent too long."""
        notes = self._presence.notes_due(self._clock())
        if notes is not None:
            await self._log.append(notes)

        def decide() -> tuple[Record | None, int | None]:
            expired = self._presence.expiry_due(self._clock())
            return expired, None if expired is None else expired.env_id

        while (env_id := await self._log.guarded(decide)) is not None:
            logger.warning(
                "environment %d was silent for %g s and counts as disconnected",
                env_id,
                self._limits.env_expiry_s,
            )

    async def _find(self, env_id: int | None) -> EnvRecord | None:
        """Look an environment up, with what other replicas did if this one does not know it."""
        if env_id is not None and self._state.envs.find(env_id) is None:
            await self._store.sync()
        return self._state.envs.find(env_id)
