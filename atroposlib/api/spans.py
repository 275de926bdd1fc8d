"""Spans of the service: how long a group waited in the queue, and how long a trainer had it.

    rl.queue    from admission, or the return of its batch, until the group was delivered
    rl.lease    from the delivery until the batch was acknowledged, returned or set aside

Both are children of the span in which the group was made. They follow from the records of the run:
`note` is called after each record was applied, of this process and of other replicas. Both are
written at the end of the lease, by the replica that delivered the batch, so each is written once.

`GroupSpans` holds the batches in flight and those returned, which the service limits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from atroposlib.api import records
from atroposlib.api.queue import QueuedGroup
from atroposlib.api.records import Record
from atroposlib.api.state import DeliveredBatch, RunState
from atroposlib.utils.tracing import Tracer

_OUTCOMES: Mapping[type[Record], str] = MappingProxyType(
    {
        records.BatchAcknowledged: "acknowledged",
        records.BatchPassedOver: "passed_over",
        records.GroupsSetAside: "set_aside",
    }
)


class _Lease(NamedTuple):
    """A delivery of a batch that has not ended."""

    batch: DeliveredBatch
    returned_at: float | None
    """Unix time of the previous return, in seconds; None if there was none, or before a restart."""


class GroupSpans:
    """Writes the spans of a run's traced groups.

    Args:
        tracer: Receives the spans.
        state: The run, which is open.
        replica: Name of this process.
        alive: Names of the replicas that serve the run; None: only this one. Batches in flight that
            none of them has delivered were delivered by an earlier process.
    """

    def __init__(
        self, tracer: Tracer, state: RunState, *, replica: str, alive: Collection[str] | None = None
    ) -> None:
        self._tracer = tracer
        self._state = state
        self._replica = replica
        self._leased: dict[int, _Lease] = {
            batch_id: _Lease(batch, None)
            for batch_id, batch in state.delivery.in_flight.items()
            if batch.owner not in (alive or ())
        }
        """By id: batches in flight whose spans this process writes."""
        self._returned_at: dict[int, float] = {}

    def note(self, record: Record) -> None:
        """Write what an applied record ended."""
        match record:
            case records.BatchFormed() | records.BatchHandedOut():
                self._note_delivery(record.batch_id, record.owner)
            case records.BatchesReturned():
                for batch_id, _ in record.batches:
                    self._returned_at[batch_id] = record.at
                    self._end_lease(batch_id, record.reason, record.at)
            case records.BatchAcknowledged() | records.BatchPassedOver() | records.GroupsSetAside():
                self._returned_at.pop(record.batch_id, None)  # a late acknowledgement
                self._end_lease(record.batch_id, _OUTCOMES[type(record)], record.at)
            case records.RunReset():
                self._leased.clear()
                self._returned_at.clear()

    def _note_delivery(self, batch_id: int, owner: str) -> None:
        returned_at = self._returned_at.pop(batch_id, None)
        batch = self._state.delivery.in_flight.get(batch_id)
        if batch is None or owner != self._replica:
            return
        self._leased[batch_id] = _Lease(batch, returned_at)

    def _end_lease(self, batch_id: int, outcome: str, at: float) -> None:
        lease = self._leased.pop(batch_id, None)
        if lease is not None:
            self._tracer.defer(partial(self._write, lease, self._state.run_id, outcome, at))

    def _write(self, lease: _Lease, run_id: str | None, outcome: str, at: float) -> None:
        for group in lease.batch.groups:
            if group.traceparent is not None and self._tracer.admits(group.traceparent):
                self._write_group(group, group.traceparent, lease, run_id, outcome, at)

    def _write_group(
        self,
        group: QueuedGroup,
        traceparent: str,
        lease: _Lease,
        run_id: str | None,
        outcome: str,
        at: float,
    ) -> None:
        batch = lease.batch
        attributes = {
            "rl.run.id": run_id,
            "rl.group.id": group.group_id,
            "rl.group.size": group.num_sequences,
            "rl.environment.id": group.env_id,
            "rl.policy.version": group.known_version,
            "rl.batch.id": batch.token,
            "rl.batch.attempt": batch.attempt,
        }
        begin, delivered_ns = self._tracer.begin, _ns(batch.at)
        queued_at = group.received_at if batch.attempt == 1 else lease.returned_at
        if queued_at is not None:
            queue = begin("rl.queue", attributes, parent=traceparent, start_ns=_ns(queued_at))
            queue.end(end_ns=delivered_ns)
        attributes["rl.lease.outcome"] = outcome
        begin("rl.lease", attributes, parent=traceparent, start_ns=delivered_ns).end(end_ns=_ns(at))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
