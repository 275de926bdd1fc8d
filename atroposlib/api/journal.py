"""The log of one run: writes records through the store, applies them to the state, takes snapshots.

    append(record) ──► store ──► apply(position, bytes) ──► state, in log order
                         ▲ other replicas

Invariants:

- The state holds exactly the records applied.
- A record that is damaged or invalid is set aside and counted, and the run continues without it. A
  record of a kind unknown to this version stops the run, because every later decision could be
  wrong. A failure of one record does not prevent the next from being applied.
- Guarded records of this process are decided and written one after another: the lock spans reading
  the state and writing.

A snapshot is a format byte and then parts: one letter, the length (8 bytes, little endian) and
MessagePack. The head holds everything that is small. Chunks follow: of the queue, of the ids of
payloads to discard, and of the idempotency keys. `freeze` copies references, a few milliseconds per
100,000 queued groups; the encoding can pause between any two parts, while the run continues.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from atroposlib.api.environments import EnvRecord
from atroposlib.api.queue import AdmittedGroups, QueuedGroup
from atroposlib.api.records import (
    GroupsAdmitted,
    PayloadFlaw,
    Record,
    UnreadableRecordError,
    decode_record,
    encode_record,
    kind_of,
)
from atroposlib.api.schemas import Registration
from atroposlib.api.state import DeliveredBatch, KeyEntry, RunState
from atroposlib.api.store.base import Payload, RunStore, StoreFullError
from atroposlib.api.tickets import TicketStream
from atroposlib.errors import ConfigError, RunStoreError

logger = logging.getLogger(__name__)

_FORMAT = b"\x01"
_HEAD, _QUEUE, _DISCARDABLE, _KEYS = b"h", b"q", b"d", b"k"
_LENGTH_BYTES = 8
_CHUNK = 2000
_MAX_COUNT = 2**63 - 1


class _Head(msgspec.Struct):
    """The part of a state that does not grow with the queue."""

    registration: dict[str, Any] | None
    run_id: str | None
    started_at: float | None
    trainer_ids: list[str]
    envs: list[EnvRecord]
    next_batch_id: int
    in_flight: list[DeliveredBatch]
    returned: list[DeliveredBatch]
    acknowledged: list[tuple[int, int]]
    past: list[QueuedGroup]
    step: int
    is_started: bool
    policy_version: int | None
    latest: QueuedGroup | None
    latest_is_held: bool
    counters: dict[str, int]
    epoch: int
    fence: int
    taken_over_run_id: str | None = None
    set_aside_groups: list[tuple[int, PayloadFlaw]] = []
    ordered_envs: int = 0
    are_tickets_open: bool = False
    tickets: list[TicketStream] = []


_PLAIN_FIELDS = (
    *("run_id", "taken_over_run_id", "started_at", "step"),
    *("is_started", "policy_version", "epoch", "fence"),
)
"""Fields that `RunState` has under the same name."""

_encode = msgspec.msgpack.Encoder().encode
_head_decoder = msgspec.msgpack.Decoder(_Head)
_queue_decoder = msgspec.msgpack.Decoder(list[QueuedGroup])
_ids_decoder = msgspec.msgpack.Decoder(list[int])
_keys_decoder = msgspec.msgpack.Decoder(list[tuple[str, KeyEntry]])


def freeze(state: RunState) -> Iterator[bytes]:
    """Capture the current state; return an iterator that encodes it.

    Each part of the snapshot takes about a millisecond; the run may continue in between.
    """
    head = _head_of(state)
    lists: list[tuple[bytes, list[Any]]] = [
        (_QUEUE, list(state.queue)),
        (_DISCARDABLE, state.payloads.discardable),
        (_KEYS, list(state.keys.items())),
    ]

    def encode() -> Iterator[bytes]:
        yield _FORMAT + _part(_HEAD, head)
        for kind, entries in lists:
            for start in range(0, len(entries), _CHUNK):
                yield _part(kind, entries[start : start + _CHUNK])

    return encode()


def _part(kind: bytes, value: object) -> bytes:
    content = _encode(value)
    return kind + len(content).to_bytes(_LENGTH_BYTES, "little") + content


def snapshot(state: RunState) -> bytes:
    """Return the whole state as bytes, without pauses."""
    return b"".join(freeze(state))


def restore(state: RunState, content: bytes) -> None:
    """Replace a state with that of a snapshot.

    Raises:
        ConfigError: the snapshot is damaged, or was written by a later version of the service.
    """
    try:
        parts = list(_parts_of(content))
        (head,) = (_head_decoder.decode(part) for kind, part in parts if kind == _HEAD)
        queue = [g for kind, part in parts if kind == _QUEUE for g in _queue_decoder.decode(part)]
        discardable = [
            i for kind, part in parts if kind == _DISCARDABLE for i in _ids_decoder.decode(part)
        ]
        keys = [k for kind, part in parts if kind == _KEYS for k in _keys_decoder.decode(part)]
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"the run's snapshot cannot be read ({error}); serve the run with the version that "
            "wrote it, or start another run"
        ) from error
    state.start_over()
    _restore_head(state, head)
    for group in queue:
        state.queue.append(group)
    for env in state.envs:
        if not env.has_searchable_size:
            for group in state.envs.stop_buffering(env):
                state.queue.append(group)
    state.payloads.mark_discardable(discardable)
    state.keys.restore(keys)


def _parts_of(content: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Split a snapshot into its parts; ValueError if its format is unknown or it is truncated."""
    if content[:1] != _FORMAT:
        raise ValueError(f"format {content[:1].hex() or 'none'}, expected {_FORMAT.hex()}")
    view = memoryview(content)
    position = 1
    while position < len(view):
        start = position + 1 + _LENGTH_BYTES
        end = start + int.from_bytes(view[position + 1 : start], "little")
        if end > len(view):
            raise ValueError("its end is missing")
        yield bytes(view[position : position + 1]), view[start:end]
        position = end


def _head_of(state: RunState) -> _Head:
    delivery = state.delivery
    return _Head(
        registration=state.registration.model_dump() if state.registration else None,
        trainer_ids=[f"{trainer_id:x}" for trainer_id in state.trainer_ids],
        envs=[_plain(env) for env in state.envs],
        next_batch_id=delivery.next_id,
        in_flight=list(delivery.in_flight.values()),
        returned=list(delivery.returned.values()),
        acknowledged=list(delivery.acknowledged.items()),
        past=list(state.past),
        latest=state.latest,
        latest_is_held=state.payloads.latest_is_held,
        counters={name: min(n, _MAX_COUNT) for name, n in sorted(state.counters.items())},
        set_aside_groups=list(state.set_aside_groups),
        ordered_envs=state.tickets.num_envs,
        are_tickets_open=state.tickets.is_open,
        tickets=[msgspec.structs.replace(s, held=dict(s.held)) for s in state.tickets.streams],
        **{name: getattr(state, name) for name in _PLAIN_FIELDS},
    )


def _plain(env: EnvRecord) -> EnvRecord:
    """Copy an environment without values that are local to this replica."""
    return dataclasses.replace(env, largest_group=env.group_size or 1, buffer=list(env.buffer))


def _restore_head(state: RunState, head: _Head) -> None:
    if head.registration is not None:
        try:
            state.registration = Registration.model_validate(head.registration)
        except ValueError as error:  # of an earlier version, which had no bounds
            state.set_aside("registration", error)
    for name in _PLAIN_FIELDS:
        setattr(state, name, getattr(head, name))
    state.trainer_ids.extend(int(trainer_id, 16) for trainer_id in head.trainer_ids)
    state.envs.restore(head.envs)
    state.delivery.next_id = head.next_batch_id
    state.delivery.restore(head.in_flight, head.returned)
    state.delivery.acknowledged.update(head.acknowledged)
    state.payloads.latest = head.latest
    state.payloads.latest_is_held = head.latest_is_held
    state.counters.update(head.counters)  # adds up
    state.set_aside_groups.extend(head.set_aside_groups)
    state.tickets.restore(head.ordered_envs, head.are_tickets_open, head.tickets)
    state.payloads.note_delivered(head.past)


_MIN_RECORDS_TO_COMPACT = 10_000
_RECORDS_PER_GROUP_TO_COMPACT = 4
_DISCARDED_AT_ONCE = 500

T = TypeVar("T")


def _num_payloads(state: RunState) -> int:
    """Approximate number of payloads the store must have; buffers are counted by sequences."""
    in_batches = sum(len(batch.groups) for batch in state.delivery.pending())
    return len(state.queue) + state.envs.buffered_sequences + in_batches + len(state.past)


class RunLog:
    """Keeps a state and its store consistent; only the log changes the state.

    `on_applied` is called after every record, also those of other replicas.
    """

    def __init__(
        self, store: RunStore, state: RunState, *, on_applied: Callable[[Record], None]
    ) -> None:
        self.failure: ConfigError | None = None
        """Reason for which the run cannot continue; None while it can."""
        self.store = store
        self.state = state
        self._on_applied = on_applied
        self._position = 0
        self._num_records = 0  # in the log after its snapshot
        self._min_when_full = _MIN_RECORDS_TO_COMPACT // 100
        self.is_new = True
        """Whether the run has no records yet."""
        self.on_loaded: list[Callable[[], None]] = []
        """Called after the run was opened, and after each snapshot of another replica."""
        self._outcomes: dict[int, AdmittedGroups | None] = {}
        self._deciding = asyncio.Lock()
        self._num_failures = 0  # of guarded writes
        self._store_failure: str | None = None  # the last one

    async def open(self) -> None:
        """Load the run.

        Raises:
            ConfigError: the store cannot be used, or its format is unknown to this version.
        """
        await self.store.open(self._apply, self._restore)
        self.check()
        self._note_loaded()

    def check(self) -> None:
        """Raise `failure` if the run cannot continue."""
        if self.failure is not None:
            raise self.failure

    async def append(self, record: Record) -> None:
        """Write a record whose order among others does not matter, and apply it."""
        self.check()
        await self.store.append(encode_record(record))

    async def append_groups(
        self, record: GroupsAdmitted, payloads: Sequence[Payload]
    ) -> AdmittedGroups:
        """Write groups with their payloads, all or none; return their admission."""
        self.check()
        first = record.groups[0].group_id
        self._outcomes[first] = None
        try:
            await self.store.append(encode_record(record), payloads)
            self.check()
            return self._outcomes[first] or self._outcome_in_state(record)
        finally:
            del self._outcomes[first]

    def _outcome_in_state(self, record: GroupsAdmitted) -> AdmittedGroups:
        """Find the outcome of groups whose record was compacted by another replica.

        Raises:
            RunStoreError: the state does not contain it.
        """
        known = self.state.keys.find(record.key) if record.key is not None else None
        if known is not None and known.digest == record.digest:
            return AdmittedGroups(known.placements)
        raise RunStoreError(
            "the groups were written, but the connection to the store was lost before the result "
            "arrived; requests with an idempotency key can be repeated safely"
        )

    async def guarded(self, decide: Callable[[], tuple[Record | None, T]]) -> T:
        """Decide on the state and write the decision; repeat if another replica was faster.

        `decide` returns the guarded record to write, or None, and the result of this call.

        Raises:
            RunStoreError: the store failed, for this call or for one that this call waited for:
                each would otherwise wait for an unreachable store in its turn.
        """
        num_failures = self._num_failures
        async with self._deciding:
            if self._store_failure is not None and num_failures != self._num_failures:
                raise RunStoreError(self._store_failure)
            while True:
                self.check()
                record, answer = decide()
                if record is None:
                    return answer
                try:
                    is_written = await self.store.append(
                        encode_record(record), fence=self.state.fence
                    )
                except RunStoreError as error:
                    if type(error) is RunStoreError:  # not one that concerns this record alone
                        self._num_failures += 1
                        self._store_failure = str(error)
                    raise
                if is_written:
                    return answer

    async def discard(self) -> None:
        """Discard payloads that are no longer needed; failures are retried later."""
        ledger = self.state.payloads
        if self.store.full_reason is not None:
            ledger.discard_past()  # space for new groups matters more than inspection
        while group_ids := ledger.take_discardable(_DISCARDED_AT_ONCE):
            try:
                await self.store.discard(group_ids)
            except OSError as error:
                ledger.mark_discardable(group_ids)
                logger.warning("payloads are kept until the store works again: %s", error)
                return
            except BaseException:
                ledger.mark_discardable(group_ids)
                raise
            await asyncio.sleep(0)

    async def compact_if_due(self) -> None:
        """Replace a long log with a snapshot, in slices so that other tasks run in between."""
        alive = _num_payloads(self.state)
        is_full = self.store.full_reason is not None  # then a shorter log frees space
        if self.state.tickets.is_used and not is_full:
            return  # a run that can be repeated keeps its records
        min_records = self._min_when_full if is_full else _MIN_RECORDS_TO_COMPACT
        if self._num_records <= max(min_records, _RECORDS_PER_GROUP_TO_COMPACT * alive):
            return
        num_records, position = self._num_records, self._position
        parts = []
        for part in freeze(self.state):
            parts.append(part)
            await asyncio.sleep(0)
        content = b"".join(parts)
        await asyncio.sleep(0)
        try:
            await self.store.compact(content, position=position)
        except StoreFullError:
            self._min_when_full = 2 * num_records
            return
        self._num_records = max(0, self._num_records - num_records)
        logger.info("wrote a snapshot in place of %d records", num_records)

    def _restore(self, content: bytes) -> None:
        """Load a snapshot: at the start, or after another replica compacted unseen records."""
        try:
            restore(self.state, content)
        except ConfigError as error:
            self.failure = error
        except Exception as error:
            logger.exception("the run's snapshot cannot be loaded")
            self.failure = ConfigError(
                f"the run's snapshot cannot be loaded ({error!r}); serve the run with the "
                "version that wrote it, or start another run"
            )
        if self.state.fault is not None:
            self._log_fault("a part of the run's snapshot cannot be loaded")
        self._num_records = 0
        self.is_new = False
        self._note_loaded()

    def _note_loaded(self) -> None:
        for note in self.on_loaded:
            note()

    def _apply(self, position: int, content: bytes) -> None:
        if self.failure is not None:
            return
        try:
            record = decode_record(content)
        except UnreadableRecordError as error:
            self._skip(position, error)
            return
        self._count(position)
        outcome = self.state.apply(record)
        if self.state.fault is not None:
            self._log_fault(f"record {position} of the run ({kind_of(type(record))}) is invalid")
        if isinstance(record, GroupsAdmitted) and record.groups:
            first = record.groups[0].group_id
            if first in self._outcomes:
                self._outcomes[first] = outcome
        try:
            self._on_applied(record)
        except Exception:  # the record is applied; only a callback failed
            logger.exception("record %d of the run was applied, but its callback failed", position)

    def _skip(self, position: int, error: UnreadableRecordError) -> None:
        """Set a damaged record aside if its kind is known; otherwise stop the run."""
        if error.record_type is None:
            self.failure = error
            logger.error("the run stops: %s", error)
            return
        self._count(position)
        self.state.skip(error.record_type, error.__cause__ or error)
        self._log_fault(f"record {position} of the run ({kind_of(error.record_type)}) is damaged")

    def _count(self, position: int) -> None:
        self._position = position + 1
        self._num_records += 1
        self.is_new = False

    def _log_fault(self, problem: str) -> None:
        logger.error("%s; the run continues without it: %s", problem, self.state.fault)
