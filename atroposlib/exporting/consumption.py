"""The order in which a trainer consumed the groups of a stored run, without what depends on time.

    log of the run ── apply in order ──► RunState ──► one line per consumed group

Two runs with the same lines trained on the same groups in the same order. Left out are times,
idempotency keys, group ids (which count arrivals), the id of an environment, leases, replicas, and
the policy version of a group: how far the trainer had come when a rollout started depends on time.
The content of a group enters as a digest, see `atroposlib.api.tickets.repeatable_digest`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atroposlib.api.queue import QueuedGroup
from atroposlib.api.records import (
    BatchAcknowledged,
    BatchPassedOver,
    GroupsAdmitted,
    Record,
    TicketReturned,
    decode_record,
)
from atroposlib.api.state import RunState
from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import connect_read_only

__all__ = ["consumption_lines"]

Line = dict[str, Any]
"""A JSON object."""


def consumption_lines(path: Path) -> Iterator[Line]:
    """Yield the consumed groups of a run, then its tickets without a group.

    Args:
        path: SQLite file of the run, as `find_run` returns it.

    Raises:
        ConfigError: the log is incomplete, or cannot be read.
    """
    reader = _ConsumptionReader()
    for record in _records(path):
        yield from reader.read(record)
    yield from reader.returned_tickets()


def _records(path: Path) -> Iterator[Record]:
    connection = connect_read_only(path)
    try:
        (first,) = connection.execute("SELECT position FROM snapshot").fetchone()
        if first:
            raise ConfigError(
                f"the first {first} records of {path} were replaced by a snapshot; only run-api "
                "--ordered-envs keeps them all"
            )
        for (content,) in connection.execute("SELECT record FROM log ORDER BY position"):
            yield decode_record(content)
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    finally:
        connection.close()


class _ConsumptionReader:
    """Applies the records of a run, and describes what they consume."""

    def __init__(self) -> None:
        self._state = RunState()
        self._tickets: dict[int, tuple[int | None, int | None]] = {}
        """Group id → number of its ticket, and digest of its content."""
        self._returned: list[tuple[str, int, bool]] = []
        self._num_batches = 0

    def read(self, record: Record) -> list[Line]:
        """Apply a record; return the lines of the groups that it consumes."""
        lines: list[Line] = []
        if isinstance(record, GroupsAdmitted):
            contents: list[int | None] = [*record.contents] or [None] * len(record.groups)
            for group, content in zip(record.groups, contents, strict=True):
                self._tickets[group.group_id] = (record.ticket, content)
        elif isinstance(record, TicketReturned):
            self._returned.append((self._name_of(record.env_id), record.number, record.is_expired))
        elif isinstance(record, BatchAcknowledged | BatchPassedOver):
            lines = self._consume(record)
        self._state.apply(record)
        return lines

    def returned_tickets(self) -> list[Line]:
        """Return the tickets that were settled without a group, by environment and number."""
        return [
            {"env": env, "ticket": number, "returned": "expired" if is_expired else "empty"}
            for env, number, is_expired in sorted(self._returned)
        ]

    def _consume(self, record: BatchAcknowledged | BatchPassedOver) -> list[Line]:
        delivery = self._state.delivery
        batch = delivery.in_flight.get(record.batch_id) or delivery.returned.get(record.batch_id)
        if batch is None or batch.attempt != record.attempt:
            return []
        self._num_batches += 1
        head: Line = {"batch": self._num_batches}
        if isinstance(record, BatchPassedOver):
            head["is_step"] = False
        return [head | {"position": i} | self._describe(g) for i, g in enumerate(batch.groups)]

    def _describe(self, group: QueuedGroup) -> Line:
        ticket, content = self._tickets.pop(group.group_id, (None, None))
        return {
            "env": self._name_of(group.env_id),
            "ticket": ticket,
            "sequences": group.num_sequences,
            "tokens": group.num_tokens,
            "scores": [group.min_score, group.max_score],
            "content": None if content is None else f"{content:016x}",
        }

    def _name_of(self, env_id: int | None) -> str:
        env = self._state.envs.find(env_id)
        return "" if env is None else env.real_name
