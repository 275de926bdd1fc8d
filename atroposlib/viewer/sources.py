"""Read-only sources of the viewer's groups.

    JsonlSource        a file of groups, which may still grow
    StoredRunSource    the file of a run: groups that are queued, in flight or were delivered last
    LiveSource         the inspection routes of a service

A live source requests `/metrics`, `/status` and new groups every two seconds, and reads the latest
groups one by one. Groups that it has read remain readable, from an unnamed temporary file.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atroposlib.api.client_consumer import (
    GROUP_STATES,
    Consumer,
    GroupKey,
    InspectionClient,
    group_key,
)
from atroposlib.api.client_transport import RetryRule
from atroposlib.api.journal import restore
from atroposlib.api.queue import QueuedGroup
from atroposlib.api.records import GroupsAdmitted, UnreadableRecordError, decode_record
from atroposlib.api.state import RunState
from atroposlib.api.store.sqlite_file import open_reader
from atroposlib.errors import AtroposError, ConfigError, GroupError, TrajectoryApiError
from atroposlib.utils.json_text import decode_line
from atroposlib.utils.text import inert_line, without_secrets
from atroposlib.viewer.index import GroupIndex, GroupSummary, searchable_text, summarize
from atroposlib.wire import json_without_columns

__all__ = [
    "FigureLog",
    "GroupGoneError",
    "GroupSource",
    "JsonlSource",
    "LiveSource",
    "Problems",
    "ServiceFigures",
    "StoredRunSource",
]

_KEPT_PROBLEMS = 200


class GroupGoneError(AtroposError, LookupError):
    """A listed group can no longer be read."""


class Problems:
    """Errors of reading: their number, and the first messages."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []
        """First messages, such as `line 12: not JSON (...)`."""
        self._lock = threading.Lock()

    def add(self, message: str) -> None:
        with self._lock:
            self.count += 1
            if len(self.messages) < _KEPT_PROBLEMS:
                self.messages.append(message)


@dataclass
class ServiceFigures:
    """State of a run, as shown on the overview."""

    current: dict[str, float | str] = field(default_factory=dict)
    """Current values by label."""
    per_second: dict[str, list[float]] = field(default_factory=dict)
    """Recent rates by label, oldest first."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Recent values by label, oldest first."""
    drops: dict[str, float] = field(default_factory=dict)
    """Number of rejected groups or requests, by reason."""
    notes: list[str] = field(default_factory=list)
    """Warnings, such as stalls or an unreachable service."""
    why_empty: str = ""
    """Reason and remedy for an empty list; shown only then."""


class GroupSource(Protocol):
    """Groups by position, from 0 in the order of arrival.

    `advance` is called by one thread, `load` and `figures` by any.
    """

    title: str
    """Description for the head of the page."""
    problems: Problems

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        """Add groups to the index for about `budget_s`; return whether there are more."""

    def load(self, position: int) -> Mapping[str, Any]:
        """Return a decoded group.

        Raises:
            GroupGoneError: the group can no longer be read.
        """

    def figures(self) -> ServiceFigures:
        """Return the state of the run."""

    def close(self) -> None:
        """Close files and connections."""


class JsonlSource:
    """A file with one group per line; invalid lines are reported by number and skipped.

    Raises:
        ConfigError: the file is missing or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"{path} cannot be read ({reason}); expected a JSON Lines file of groups, "
                "as `process` writes"
            ) from error
        self.title = str(path)
        self._stem = inert_line(path.stem, max_characters=60)
        self.problems = Problems()
        self._descriptor = self._file.fileno()
        self._places = array("q")  # offset of each group's line
        self._lengths = array("q")
        self._offset = 0
        self._number = 1
        self._unfinished_at = -1

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        """Read further lines; an incomplete last line is read again when the file has grown."""
        deadline = time.monotonic() + budget_s
        size = os.fstat(self._descriptor).st_size
        if size < self._offset:
            self.problems.add(f"{self.title} was truncated; restart the viewer to read it again")
            self._offset = size
        if size == self._unfinished_at:
            return False
        self._file.seek(self._offset)
        while time.monotonic() < deadline:
            line = self._file.readline()
            if not line:
                return False
            if not line.endswith(b"\n") and not self._is_whole(line):
                self._unfinished_at = self._offset + len(line)
                return False
            self._take(line, index)
        return True

    def load(self, position: int) -> Mapping[str, Any]:
        line = os.pread(self._descriptor, self._lengths[position], self._places[position])
        try:
            fields = decode_line(line)
        except (ValueError, RecursionError) as error:
            raise GroupGoneError(f"{self.title} was changed: {error}") from error
        if not isinstance(fields, dict):
            raise GroupGoneError(f"{self.title} was changed")
        return fields

    def figures(self) -> ServiceFigures:
        incomplete = (
            f"line {self._number} is incomplete: it is being written, or its writer was killed"
        )
        notes = [incomplete] if self._unfinished_at >= 0 else []
        why_empty = (
            "No line of the file is a group; the errors are listed below."
            if self.problems.count
            else "The file is empty so far; groups appear as they are written."
        )
        return ServiceFigures(notes=notes, why_empty=why_empty)

    def close(self) -> None:
        self._file.close()

    def _is_whole(self, line: bytes) -> bool:
        try:
            return bool(line.strip()) and isinstance(decode_line(line), dict)
        except (ValueError, RecursionError):
            return False

    def _take(self, line: bytes, index: GroupIndex) -> None:
        place, number = self._offset, self._number
        self._offset += len(line)
        self._number += line.endswith(b"\n")
        self._unfinished_at = -1
        if not line.strip():
            return
        try:
            fields = decode_line(line)
        except (ValueError, RecursionError) as error:
            self.problems.add(f"line {number}: not JSON ({error})")
            return
        problem = _problem(fields)
        if problem:
            self.problems.add(f"line {number}: {problem}")
            return
        # First, so that a group that fails here takes no position.
        text, row = searchable_text(fields), summarize(fields, label=f"line {number}")
        if not row.environment:  # `process` names its file after the environment
            row = row._replace(environment=self._stem)
        self._places.append(place)
        self._lengths.append(len(line))
        index.add(row)
        if text:  # last: without room for it, the group is shown and not found
            index.texts.add(len(self._places) - 1, text)


def _problem(fields: Any) -> str | None:
    if not isinstance(fields, dict):
        return "not a JSON object"
    if not any(isinstance(fields.get(name), list) for name in ("tokens", "messages")):
        return "neither tokens nor messages; expected lists with one entry per rollout"
    if not isinstance(fields.get("scores"), list):
        return "no scores; expected a list with one number per rollout"
    return None


def decode_payload(content: bytes) -> dict[str, Any]:
    """Return the fields of an encoded group, without its opaque columns.

    Raises:
        GroupError: the bytes are not a group.
    """
    if content[:1] != b"{":
        content = json_without_columns(content)
    try:
        fields = decode_line(content)
    except ValueError as error:
        raise GroupError(f"not a group: {error}") from error
    if not isinstance(fields, dict):
        raise GroupError("not a group: expected an object")
    fields.pop("columns", None)
    return fields


_KEPT_SAMPLES = 120
_SHOWN = {
    "atropos_step": "step",
    "atropos_policy_version": "policy version",
    "atropos_queue_groups": "groups waiting",
    "atropos_queue_sequences": "sequences waiting",
    "atropos_queue_tokens": "tokens waiting",
    "atropos_queue_oldest_age_seconds": "oldest waits, s",
    "atropos_queue_oldest_staleness_steps": "oldest staleness, steps",
    "atropos_buffered_sequences": "sequences buffered",
    "atropos_groups_received_total": "groups received",
    "atropos_groups_tokenized_from_text_total": "groups tokenized from text",
    "atropos_groups_delivered_total": "groups delivered",
    "atropos_batches_delivered_total": "batches delivered",
}
_RATES = {
    "atropos_groups_received_total": "groups in, per s",
    "atropos_sequences_received_total": "sequences in, per s",
    "atropos_tokens_received_total": "tokens in, per s",
    "atropos_sequences_delivered_total": "sequences out, per s",
}
_HISTORIES = {
    "atropos_queue_sequences": "sequences waiting",
    "atropos_queue_oldest_staleness_steps": "oldest staleness, steps",
}


class FigureLog:
    """State of a service over the last minutes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=_KEPT_SAMPLES)
        self._drops: dict[str, float] = {}
        self._notes: list[str] = []

    def note_metrics(self, text: str) -> None:
        """Add a response of `/metrics`; unknown metrics are ignored."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        drops: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "atropos_requests_refused_total" and sample.value:
                    drops[f"refused: {sample.labels.get('reason', '')}"] = sample.value
                elif sample.name == "atropos_environments":
                    if sample.labels.get("state") == "connected":
                        values["atropos_environments_connected"] = sample.value
                elif not sample.labels:
                    values[sample.name] = sample.value
        for name, words in (
            ("atropos_groups_loose_total", "accepted, with fields of different lengths"),
            ("atropos_requests_repeated_total", "repeated requests, stored once"),
        ):
            if values.get(name):
                drops[words] = values[name]
        self._samples.append((self._now(), values))
        self._drops = drops

    def note_status(self, status: Mapping[str, Any]) -> None:
        stalls = status.get("stalls") or []
        self._notes = [f"{s.get('reason')}: {s.get('detail', '')}" for s in stalls]
        if not self._samples:
            known = {"atropos_step": status.get("current_step", 0)}
            known["atropos_queue_groups"] = status.get("queue_size", 0)
            self._samples.append((self._now(), {k: float(v) for k, v in known.items()}))

    def _why_empty(self, problem: str | None, latest: Mapping[str, float]) -> str:
        if problem:
            return "The service could not be read; the reason is above."
        if self._notes:
            return "The service is stalled; the reason is above."
        if latest.get("atropos_groups_delivered_total"):
            return (
                "Groups were delivered, and none is kept for inspection (--keep-past-groups of "
                "run-api); new ones appear here."
            )
        if not latest.get("atropos_environments_connected", 1):
            return "No environment is connected: start one with `python my_env.py serve`."
        return (
            "The service has not received any group yet. Environments start when a trainer, or a "
            "tool that replaces one, requests a batch."
        )

    def figures(self, problem: str | None) -> ServiceFigures:
        samples = list(self._samples)
        latest = samples[-1][1] if samples else {}
        return ServiceFigures(
            current={words: latest[name] for name, words in _SHOWN.items() if name in latest},
            per_second={words: _rates(samples, name) for name, words in _RATES.items()},
            history={
                words: [values.get(name, 0.0) for _, values in samples]
                for name, words in _HISTORIES.items()
            },
            drops=self._drops,
            notes=([problem] if problem else []) + self._notes,
            why_empty=self._why_empty(problem, latest),
        )


def _rates(samples: list[tuple[float, dict[str, float]]], name: str) -> list[float]:
    pairs = itertools.pairwise(samples)
    return [
        max(0.0, later.get(name, 0.0) - earlier.get(name, 0.0)) / max(1e-6, at - before)
        for (before, earlier), (at, later) in pairs
    ]


_POLL_S = 2.0
_READ_AHEAD_GROUPS = 2000
"""Number of latest groups that are read in advance; others are read when they are opened."""
_SPOOL_BYTES = 2**30
_TIMEOUT_S = 10.0
_NOT_ALLOWED = (401, 403)


class LiveSource:
    """A running service.

    Args:
        base_url: URL of the service.
        token: access token, which is never logged; reading groups needs an admin token.
        consumer: takes the place of a missing trainer, so that environments start; closed with
            the source.
    """

    def __init__(
        self, base_url: str, *, token: str | None = None, consumer: Consumer | None = None
    ) -> None:
        # Without retries: it polls every two seconds, and a user waits for groups that are opened.
        self._client = InspectionClient(
            base_url, timeout_s=_TIMEOUT_S, retry=RetryRule(attempts=1), token=token
        )
        self.base_url = self._client.base_url
        self._consumer = consumer
        self.title = f"service {without_secrets(self.base_url)}"
        self.problems = Problems()
        self._log = FigureLog()
        self._seen: set[GroupKey] = set()
        self._latest: dict[int, int] = {}
        """Group id → position of the last group with this id."""
        self._listed: list[dict[str, Any]] = []
        self._unread: deque[int] = deque(maxlen=_READ_AHEAD_GROUPS)
        self._polled_at = float("-inf")
        self._problem: str | None = None
        self._may_read = True
        self._spool = _Spool()

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        """Poll the service every two seconds; in between, read the latest groups."""
        deadline = time.monotonic() + budget_s
        if time.monotonic() - self._polled_at >= _POLL_S:
            self._poll(index)
            self._polled_at = time.monotonic()
        while self._unread and self._may_read and time.monotonic() < deadline:
            self._read(self._unread.pop(), index)
        return bool(self._unread) and self._may_read

    def load(self, position: int) -> Mapping[str, Any]:
        """Return a group, from the temporary file if it was read before."""
        group_id = int(self._listed[position]["id"])
        content = self._spool.get(position)
        try:
            if content is None:
                if self._latest[group_id] != position:
                    raise GroupGoneError(
                        f"group {group_id} was lost when the service restarted without a stored run"
                    )
                content = self._fetch(group_id)
                self._spool.put(position, content)
            return decode_payload(content)
        except TrajectoryApiError as error:
            raise GroupGoneError(_refusal(error, group_id)) from error
        except GroupError as error:
            raise GroupGoneError(f"group {group_id} could not be read: {error}") from error

    def figures(self) -> ServiceFigures:
        return self._log.figures(self._problem)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self._client.close()

    def _poll(self, index: GroupIndex) -> None:
        try:
            metrics = self._client.metrics()
            if metrics is not None:  # not available from older services
                self._log.note_metrics(metrics)
            self._log.note_status(self._client.status())
            for state in GROUP_STATES:
                self._list(state, index)
            if self._consumer is not None:
                self._consumer.attend()
            if self._may_read:
                self._problem = None
        except TrajectoryApiError as error:
            self._problem = self._listing_refusal(error)
        except ValueError as error:
            self._problem = f"{without_secrets(self.base_url)}/metrics cannot be read: {error}"

    def _list(self, state: str, index: GroupIndex) -> None:
        """Add the new groups of one state, oldest first."""
        for row in self._client.new_groups(state, self._seen):
            self._seen.add(group_key(row))
            index.add(_summary_of(row))
            self._listed.append(row)
            self._latest[int(row["id"])] = len(self._listed) - 1
            self._unread.append(len(self._listed) - 1)

    def _listing_refusal(self, error: TrajectoryApiError) -> str:
        if error.status is None:
            url = without_secrets(self.base_url)
            return f"{url} does not answer ({error}); groups that were read remain available"
        if error.status in _NOT_ALLOWED:
            return (
                "this service requires a token; set ATROPOS_API_TOKEN to one of a trainer (lists) "
                "or an admin (lists and groups) and start again"
            )
        if error.status == 404:
            return "this service is an older one, without routes for inspection"
        return str(error)

    def _fetch(self, group_id: int) -> bytes:
        payload = self._client.payload(group_id)
        if payload is None:
            raise GroupGoneError(f"group {group_id} left the service before it was read")
        return payload.content

    def _read(self, position: int, index: GroupIndex) -> None:
        """Read one group and complete its row and its text in the index."""
        try:
            fields = self.load(position)
        except GroupGoneError as error:
            cause = error.__cause__
            if isinstance(cause, TrajectoryApiError) and cause.status in _NOT_ALLOWED:
                self._may_read = False
                self._problem = str(error)
            return
        text = searchable_text(fields)
        listed = index[position]
        index.replace(
            position,
            summarize(fields, label=listed.label, environment=listed.environment, step=listed.step),
        )
        if text:  # last: without room for it, the group is shown and not found
            index.texts.add(position, text)


class _Spool:
    """Payloads by the position of their group, in an unnamed temporary file.

    Those for which the disk has no room are left out.
    """

    def __init__(self) -> None:
        # Without a buffer, so that a full disk is noticed by `put`.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives with the source
        self._places: dict[int, tuple[int, int]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def get(self, position: int) -> bytes | None:
        with self._lock:
            place = self._places.get(position)
            if place is None:
                return None
            self._file.seek(place[0])
            return self._file.read(place[1])

    def put(self, position: int, content: bytes) -> None:
        with self._lock:
            if position in self._places or self._size + len(content) > _SPOOL_BYTES:
                return
            try:
                self._file.seek(self._size)
                is_whole = self._file.write(content) == len(content)
            except OSError:
                return
            if not is_whole:
                return
            self._places[position] = (self._size, len(content))
            self._size += len(content)


def _summary_of(row: Mapping[str, Any]) -> GroupSummary:
    """Return the summary of a listed group, of which only two scores are known."""
    name = row.get("env_name")
    count = int(row.get("num_sequences") or 0)
    return GroupSummary(
        label=f"group {row['id']}",
        environment=str(name) if name is not None else f"env {row.get('env_id')}",
        step=row.get("policy_version"),
        num_rollouts=count,
        longest=int(row.get("num_tokens") or 0) // max(1, count),
        num_tokens=int(row.get("num_tokens") or 0),
        scores=(float(row.get("min_score") or 0.0), float(row.get("max_score") or 0.0)),
        excerpt="",
    )


def _refusal(error: TrajectoryApiError, group_id: int) -> str:
    if error.status in _NOT_ALLOWED:
        return (
            "this service shows groups to admins only; set ATROPOS_API_TOKEN to an admin token and "
            "start again"
        )
    return f"group {group_id} could not be read: {error}"


_REFRESH_S = 2.0
_KEPT = "SELECT group_id FROM payload WHERE group_id > ? AND group_id NOT IN (SELECT group_id FROM garbage) ORDER BY group_id"  # noqa: E501


class StoredRunSource:
    """The `.sqlite3` file of a run; new groups appear while a service uses it.

    Raises:
        ConfigError: the file is missing or is not the file of a run.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            near = ", ".join(sorted(file.stem for file in path.parent.glob("*.sqlite3"))[:8])
            known = f"; runs there: {near}" if near else ""
            raise ConfigError(
                f"there is no stored run {path}{known}; name it with --run NAME --data-dir DIR, "
                "or --run PATH.sqlite3 (for a run in Redis, use --api-url)"
            )
        self.title = f"run {path.stem} ({path})"
        self.problems = Problems()
        self._state = RunState()
        self._position = 0
        self._ids: list[int] = []
        self._waiting: list[int] = []
        self._last_listed = -1
        self._descriptions: dict[int, QueuedGroup] = {}
        self._refreshed_at = float("-inf")
        self._lock = threading.Lock()
        try:
            self._reader = open_reader(path)
            self._refresh()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is not the file of a run ({error})") from error

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        deadline = time.monotonic() + budget_s
        if not self._waiting and time.monotonic() - self._refreshed_at > _REFRESH_S:
            self._refresh()
        while self._waiting and time.monotonic() < deadline:
            group_id = self._waiting.pop()
            self._add(group_id, index)
        return bool(self._waiting)

    def load(self, position: int) -> Mapping[str, Any]:
        group_id = self._ids[position]
        content = self._content(group_id)
        if content is None:
            raise GroupGoneError(f"group {group_id} was delivered and is no longer kept")
        try:
            return decode_payload(content)
        except GroupError as error:
            raise GroupGoneError(f"group {group_id} cannot be read: {error}") from error

    def figures(self) -> ServiceFigures:
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
            else "This run has not received any group: environments start when a trainer, or a "
            "tool that replaces one, requests a batch."
        )
        return ServiceFigures(current=current, drops=returned, why_empty=why_empty)

    def close(self) -> None:
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
        # First, so that a group that fails here takes no position.
        text = searchable_text(fields)
        row = summarize(
            fields,
            label=f"group {group_id}",
            environment=None if env is None else env.real_name,
            step=None if known is None else known.known_version,
        )
        self._ids.append(group_id)
        index.add(row)
        if text:  # last, as above
            index.texts.add(len(self._ids) - 1, text)

    def _content(self, group_id: int) -> bytes | None:
        with self._lock:
            rows = self._reader.execute(
                "SELECT content FROM payload WHERE group_id = ?", (group_id,)
            ).fetchall()
        return bytes(rows[0][0]) if rows else None

    def _refresh(self) -> None:
        """Apply new records of the log, and list new payloads; damaged records are skipped."""
        with self._lock:
            self._reader.execute("BEGIN")  # the service may compact the log meanwhile
            try:
                records, fresh = self._read_new()
            finally:
                self._reader.execute("ROLLBACK")
        for place, content in records:
            try:
                record = decode_record(content)
            except UnreadableRecordError as error:
                if error.record_type is None:
                    raise  # of a later version
                self.problems.add(f"record {place}: {error}")
                self._state.skip(error.record_type, error)
                self._position = place + 1
                continue
            if isinstance(record, GroupsAdmitted):
                self._descriptions.update((group.group_id, group) for group in record.groups)
            self._state.apply(record)
            self._position = place + 1
        for group in (*self._state.queue, *self._state.past):
            self._descriptions.setdefault(group.group_id, group)
        self._last_listed = max(fresh, default=self._last_listed)
        self._waiting = fresh[::-1] + self._waiting
        self._refreshed_at = time.monotonic()

    def _read_new(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Load a newer snapshot; return the records after it, and the ids of new payloads."""
        execute = self._reader.execute
        position, snapshot = execute("SELECT position, content FROM snapshot").fetchone()
        if snapshot is not None and position > self._position:
            restore(self._state, snapshot)
            self._position = position
        records = execute(
            "SELECT position, record FROM log WHERE position >= ? ORDER BY position",
            (self._position,),
        ).fetchall()
        return records, [row[0] for row in execute(_KEPT, (self._last_listed,)).fetchall()]
