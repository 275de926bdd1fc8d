"""Which environments are there: signs of life, noted now and then, and silence that lasts; pure.

Every replica hears of some environments. What it heard is written down at most every
`NOTE_INTERVAL_S`, for all of them in one record, so that all replicas agree who has been silent.
"""

from __future__ import annotations

from atroposlib.api.records import EnvDisconnected, EnvRevived, EnvsSeen
from atroposlib.api.run_state import RunState

__all__ = ["NOTE_INTERVAL_S", "Presence"]

NOTE_INTERVAL_S = 30.0


class Presence:
    """What this replica heard of the environments of a run.

    Args:
        state: the run.
        expiry_s: seconds of silence after which an environment counts as gone; 0: never.
    """

    def __init__(self, state: RunState, *, expiry_s: float) -> None:
        self._state = state
        self._expiry_s = expiry_s
        self._interval_s = min(NOTE_INTERVAL_S, expiry_s / 4 or NOTE_INTERVAL_S)
        self._heard: dict[int, float] = {}
        self._epoch = 0
        self._noted_at = 0.0
        self._since = 0.0

    def start(self, now: float) -> None:
        """Begin to listen: silence counts from here at the earliest."""
        self._since = self._noted_at = now

    def note(self, env_id: int, now: float) -> None:
        """Remember a sign of life."""
        if self._epoch != self._state.epoch:
            self._heard.clear()
            self._epoch = self._state.epoch
        self._heard[env_id] = now

    def last_heard(self, env_id: int) -> float:
        """Return when an environment was last heard of, as far as this replica knows."""
        env = self._state.envs.find(env_id)
        noted = env.last_seen if env is not None else 0.0
        return max(noted, self._heard_of(env_id), self._since)

    def notes_due(self, now: float) -> EnvsSeen | None:
        """Return what is to be written down now; None when there is nothing or it is too early."""
        if now - self._noted_at < self._interval_s:
            return None
        self._noted_at = now
        seen = {
            env.env_id: self._heard_of(env.env_id)
            for env in self._state.envs
            if self._heard_of(env.env_id) > env.last_seen
        }
        self._heard.clear()
        return EnvsSeen(self._state.epoch, seen) if seen else None

    def expiry_due(self, now: float) -> EnvDisconnected | None:
        """Return the disconnection of one environment that has been silent for too long."""
        if not self._expiry_s:
            return None
        for env in self._state.envs:
            if env.is_connected and now - self.last_heard(env.env_id) > self._expiry_s:
                return EnvDisconnected(env.env_id, True, now)
        return None

    def revival_of(self, env_id: int, now: float) -> EnvRevived | None:
        """Return the comeback of an environment that had been taken for gone."""
        env = self._state.envs.find(env_id)
        return EnvRevived(env_id, now) if env is not None and env.is_expired else None

    def _heard_of(self, env_id: int) -> float:
        return self._heard.get(env_id, 0.0) if self._epoch == self._state.epoch else 0.0
