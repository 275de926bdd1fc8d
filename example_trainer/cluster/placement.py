"""The interface of placements, and the state of a run that they report.

cli ──► RunPlacement (local, slurm, kubernetes, ray_cluster) ──► RunStatus
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

PartState = Literal[
    "waiting", "starting", "running", "restarting", "finished", "failed", "stopped", "unknown"
]
"""waiting: for parts that it needs; restarting: waits for its back-off; stopped: by the end of the
run; unknown: the placement does not answer for it."""

RunState = Literal["none", "waiting", "running", "finished", "failed", "stopped", "lost"]
"""none: was never submitted; waiting: for the cluster; finished: the trainer did all steps;
stopped: by `down` or a signal; lost: its supervisor ended without a result, and the same command
continues it."""

EXIT_CODES: Mapping[RunState, int] = {
    "finished": 0,
    "failed": 1,
    "running": 3,
    "waiting": 3,
    "none": 4,
    "stopped": 5,
    "lost": 6,
}
"""Exit code of `atropos-up status` by state; 2 is for invalid settings."""

ENDED: frozenset[RunState] = frozenset({"finished", "failed", "stopped", "lost"})


class PartStatus(NamedTuple):
    """State of one part."""

    name: str
    state: PartState
    restarts: int = 0
    detail: str = ""
    """Host and process, or the reason of the last end."""


class RunStatus(NamedTuple):
    """State of a run."""

    state: RunState
    parts: tuple[PartStatus, ...] = ()
    detail: str = ""
    """The reason of a failure, or an id of the placement such as the number of a job."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunStatus:
        """Return the status from the JSON form of `as_json`.

        Raises:
            ValueError: There is no such state; LookupError or TypeError: Something is missing.
        """
        if content["state"] not in EXIT_CODES:
            raise ValueError(f"unknown state {content['state']!r:.40}")
        parts = tuple(PartStatus(**part) for part in content["parts"])
        return cls(content["state"], parts, content["detail"])

    def masked(self, hide: Callable[[str], str]) -> RunStatus:
        """Return a copy whose texts, which quote logs, went through `hide`."""
        parts = tuple(part._replace(detail=hide(part.detail)) for part in self.parts)
        return self._replace(parts=parts, detail=hide(self.detail))

    def as_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "detail": self.detail,
            "parts": [part._asdict() for part in self.parts],
        }


class RunPlacement(Protocol):
    """Where a run is: made from its run file, and again by each later command."""

    def render(self) -> Mapping[str, str]:
        """Return what `submit` would use, as texts by file name."""

    def submit(self) -> str:
        """Start the run, or continue it, in the background; return one line about it.

        Raises:
            ConfigError: The run is invalid here, or runs already.
        """

    def status(self) -> RunStatus:
        """Return the state of the run."""

    def logs(self, part: str, *, lines: int) -> Iterable[str]:
        """Return the last lines that a part wrote; raise `ConfigError` for an unknown part."""

    def down(self) -> str:
        """End what `submit` started, and only that; return one line about it."""
