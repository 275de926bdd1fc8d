"""Groups of a stored run, read from its file beside a service that may be running.

What the file holds: groups that wait, are in flight, or were delivered last.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.api.journal import restore
from atroposlib.api.queued_group import QueuedGroup
from atroposlib.api.records import GroupsAdmitted, decode_record
from atroposlib.api.state import RunState
from atroposlib.api.store.sqlite_file import open_reader
from atroposlib.errors import ConfigError, GroupError
from atroposlib.viewer.group_index import GroupIndex
from atroposlib.viewer.sources.base import GroupGoneError, Problems, ServiceFigures
from atroposlib.viewer.sources.payloads import decode_payload
from atroposlib.viewer.summaries import searchable_text, summarise

__all__ = ["StoredRunSource"]

_REFRESH_S = 2.0
_KEPT = "SELECT group_id FROM payload WHERE group_id > ? AND group_id NOT IN (SELECT group_id FROM garbage) ORDER BY group_id"  # noqa: E501


class StoredRunSource:
    """A stored run; new groups appear while a service serves it.

    Args:
        path: the `.sqlite3` file of the run.

    Raises:
        ConfigError: there is no such run, or the file is not one.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            near = ", ".join(sorted(file.stem for file in path.parent.glob("*.sqlite3"))[:8])
            known = f"; runs there: {near}" if near else ""
            raise ConfigError(
                f"there is no stored run {path}{known}; name it with --run NAME --data-dir DIR, "
                "or --run PATH.sqlite3 (a run in Redis is looked at with --api-url)"
            )
        self.title = f"run {path.stem} ({path})"
        self.problems = Problems()
        self._state = RunState()
        self._position = 0
        self._ids: list[int] = []
        self._waiting: list[int] = []
        self._descriptions: dict[int, QueuedGroup] = {}
        self._refreshed_at = float("-inf")
        self._lock = threading.Lock()
        try:
            self._reader = open_reader(path)
            self._refresh()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is not the file of a run ({error})") from error

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        """Add groups that the file holds and the index does not."""
        deadline = time.monotonic() + budget_s
        if not self._waiting and time.monotonic() - self._refreshed_at > _REFRESH_S:
            self._refresh()
        while self._waiting and time.monotonic() < deadline:
            group_id = self._waiting.pop()
            self._add(group_id, index)
        return bool(self._waiting)

    def load(self, position: int) -> Mapping[str, Any]:
        """Read one group from the file."""
        group_id = self._ids[position]
        content = self._content(group_id)
        if content is None:
            raise GroupGoneError(f"group {group_id} is not kept any more: it was delivered")
        try:
            return decode_payload(content)
        except GroupError as error:
            raise GroupGoneError(f"group {group_id} cannot be read: {error}") from error

    def figures(self) -> ServiceFigures:
        """Return what the run's log says."""
        state = self._state
        counters = state.counters
        current: dict[str, float | str] = {
            "step": state.step,
            "policy version": state.current_version,
            "groups waiting": len(state.queue),
            "sequences waiting": state.queue.num_sequences,
            "groups received": counters["groups/received"],
            "groups delivered": counters["groups/delivered"],
            "batches delivered": counters["batches/delivered"],
            "oldest staleness": state.oldest_staleness,
        }
        returned = {
            f"batch {name.rpartition('returned_')[2]}": float(count)
            for name, count in counters.items()
            if name.startswith("batches/returned_")
        }
        why_empty = (
            "All groups of this run were delivered, and none is kept (--keep-past-groups of "
            "run-api)."
            if counters["groups/delivered"]
            else "This run has not received any group: environments send them once a trainer, or a "
            "tool that stands in for one, has asked for a batch."
        )
        return ServiceFigures(current=current, drops=returned, why_empty=why_empty)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._reader.close()

    def _add(self, group_id: int, index: GroupIndex) -> None:
        content = self._content(group_id)
        if content is None:
            return
        try:
            fields = decode_payload(content)
        except GroupError as error:
            self.problems.add(f"group {group_id}: {error}")
            return
        known = self._descriptions.get(group_id)
        env = None if known is None else self._state.envs.find(known.env_id)
        self._ids.append(group_id)
        text = searchable_text(fields)
        if text:
            index.texts.add(len(self._ids) - 1, text)
        index.add(
            summarise(
                fields,
                label=f"group {group_id}",
                environment=None if env is None else env.real_name,
                step=None if known is None else known.known_version,
            )
        )

    def _content(self, group_id: int) -> bytes | None:
        with self._lock:
            rows = self._reader.execute(
                "SELECT content FROM payload WHERE group_id = ?", (group_id,)
            ).fetchall()
        return bytes(rows[0][0]) if rows else None

    def _refresh(self) -> None:
        """Apply what was written to the log since, and look for new payloads."""
        with self._lock:
            position, snapshot = self._reader.execute(
                "SELECT position, content FROM snapshot"
            ).fetchone()
            if snapshot is not None and position > self._position:
                restore(self._state, snapshot)
                self._position = position
            records = self._reader.execute(
                "SELECT position, record FROM log WHERE position >= ? ORDER BY position",
                (self._position,),
            ).fetchall()
            last = max(self._ids[-1:] + self._waiting[:1], default=-1)
            fresh = [row[0] for row in self._reader.execute(_KEPT, (last,)).fetchall()]
        for place, content in records:
            record = decode_record(content)
            if isinstance(record, GroupsAdmitted):
                self._descriptions.update((group.group_id, group) for group in record.groups)
            self._state.apply(record)
            self._position = place + 1
        for group in (*self._state.queue, *self._state.past):
            self._descriptions.setdefault(group.group_id, group)
        self._waiting = fresh[::-1] + self._waiting
        self._refreshed_at = time.monotonic()
