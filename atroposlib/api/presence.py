"""Which environments are there: signs of life, noted now and then, and silence that lasts; pure.

Every replica hears of some environments. What it heard is written down at most every
`NOTE_INTERVAL_S`, for all of them in one record, so that all replicas agree who has been silent.
Silence is measured by the clock of this process, from when it applied the last record that names an
environment: times in records come from other processes, whose clocks may be hours off.
"""

from __future__ import annotations

from collections.abc import Iterable

from atroposlib.api.records import (
    EnvDisconnected,
    EnvRegistered,
    EnvRevived,
    EnvsSeen,
    GroupsAdmitted,
    Record,
)
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
        """Environment id → its last request to this process that is not yet in a record."""
        self._learned: dict[int, float] = {}
        """Environment id → when this process last applied a record that names it."""
        self._epoch = 0
        self._noted_at = 0.0
        self._since = 0.0

    def start(self, now: float) -> None:
        """Begin to listen: silence counts from here at the earliest."""
        self._since = self._noted_at = now

    def note(self, env_id: int, now: float) -> None:
        """Remember a sign of life."""
        self._forget_former_epoch()
        self._heard[env_id] = now

    def note_record(self, record: Record, now: float) -> None:
        """Note the environments that a record names, whichever replica wrote it."""
        env_ids: Iterable[int | None]
        if isinstance(record, GroupsAdmitted):
            env_ids = {group.env_id for group in record.groups}
        elif isinstance(record, EnvsSeen):
            env_ids = record.seen
        elif isinstance(record, EnvRegistered | EnvRevived):
            env_ids = [record.env_id]
        else:
            return
        self._forget_former_epoch()
        for env_id in env_ids:
            if env_id is not None and self._state.envs.find(env_id) is not None:
                self._learned[env_id] = now

    def last_heard(self, env_id: int) -> float:
        """Return when this process last heard of an environment, directly or by a record."""
        self._forget_former_epoch()
        return max(self._learned.get(env_id, 0.0), self._heard.get(env_id, 0.0), self._since)

    def notes_due(self, now: float) -> EnvsSeen | None:
        """Return what is to be written down now; None when there is nothing or it is too early."""
        if now - self._noted_at < self._interval_s:
            return None
        self._noted_at = now
        self._forget_former_epoch()
        seen = {
            env_id: heard
            for env_id, heard in self._heard.items()
            if heard > self._learned.get(env_id, 0.0) and self._state.envs.find(env_id) is not None
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

    def _forget_former_epoch(self) -> None:
        if self._epoch != self._state.epoch:
            self._heard.clear()
            self._learned.clear()
            self._epoch = self._state.epoch
