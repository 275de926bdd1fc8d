"""When those who wait for the service say so in the log: at first, then ever more rarely; pure."""

from __future__ import annotations

from collections.abc import Callable

from atroposlib.errors import TrajectoryApiError

__all__ = ["WaitNotes"]

_FIRST_REPEAT_S = 30.0


class WaitNotes:
    """The notes of one wait: at its first failure, after 30 s, and whenever that time has doubled.

    Every kind of failure is told by itself. Threads may not share one.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first_at: dict[str, float] = {}
        self._due_s: dict[str, float] = {}

    def due(self, error: TrajectoryApiError) -> str | None:
        """Return the words for a failure, None when it has been told lately."""
        kind = type(error).__name__ if error.status is None else f"status {error.status}"
        now = self._clock()
        waited_s = now - self._first_at.setdefault(kind, now)
        due_s = self._due_s.get(kind, 0.0)
        if waited_s < due_s:
            return None
        while due_s <= waited_s:
            due_s = max(2 * due_s, _FIRST_REPEAT_S)
        self._due_s[kind] = due_s
        return f"{error} (for {waited_s:.0f} s now)" if waited_s else str(error)

    def end(self) -> bool:
        """Take note of an answer: the next failure is a first one; tell whether any was told."""
        was_told = bool(self._due_s)
        self._first_at.clear()
        self._due_s.clear()
        return was_told
