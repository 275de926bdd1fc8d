"""What every source of groups offers the viewer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from atroposlib.errors import AtroposError
from atroposlib.viewer.group_index import GroupIndex

__all__ = ["GroupGoneError", "GroupSource", "Problems", "ServiceFigures"]

_KEPT_PROBLEMS = 200


class GroupGoneError(AtroposError, LookupError):
    """A group that was listed can no longer be read; the message says why."""


class Problems:
    """What could not be read: all of it counted, the first of it told."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []
        """The first ones, e.g. `line 12: not JSON (...)`."""
        self._lock = threading.Lock()

    def add(self, message: str) -> None:
        """Note one."""
        with self._lock:
            self.count += 1
            if len(self.messages) < _KEPT_PROBLEMS:
                self.messages.append(message)


@dataclass
class ServiceFigures:
    """What a run tells of itself besides its groups."""

    current: dict[str, float | str] = field(default_factory=dict)
    """Figures by the words they are shown under."""
    per_second: dict[str, list[float]] = field(default_factory=dict)
    """Recent rates, oldest first."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Recent values, oldest first."""
    drops: dict[str, float] = field(default_factory=dict)
    """Groups or requests that were not taken, by reason."""
    notes: list[str] = field(default_factory=list)
    """Sentences a person should read: stalls, a service that is away."""
    why_empty: str = ""
    """Why there are no groups, and what to do; shown while there are none."""


class GroupSource(Protocol):
    """Groups by position, from 0 in the order they came.

    `advance` is called by one thread, `load` and `figures` by any.
    """

    title: str
    """What it is, for the head of the page."""
    problems: Problems

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        """Add groups to the index for about so long; return whether there is more right now."""

    def load(self, position: int) -> Mapping[str, Any]:
        """Return a whole group.

        Raises:
            GroupGoneError: it can no longer be read.
        """

    def figures(self) -> ServiceFigures:
        """Return what the run tells of itself."""

    def close(self) -> None:
        """Let go of files and connections."""
