"""The state of one run, computed by applying the records of its log in order; pure.

    record ── RunState.apply ──► queue, environments, batches, step
                             ├─► PayloadLedger: queued ─► past (kept for inspection) ─► discardable
                             └─► KeyBook: idempotency keys and the responses to their requests

Invariants:

- `apply` never fails and depends on nothing but the state and the record, so every replica that
  applied the same records holds the same state. A late record, such as the acknowledgement of a
  batch that was redelivered, changes nothing. An invalid record is set aside: it changes only the
  counter of such records, and the ids it would have used.
- A payload becomes discardable once, and only in three cases: its batch was acknowledged and it is
  no longer among `past`, its request repeats a stored one, or the run was reset. The payload of the
  latest group is kept.
- The step grows by one per acknowledged batch that was trained on; only a registration sets it.
- Any registration replaces a consumer; the batch it had leased is queued again.
- `fence` is the number of guarded records applied.

`BatchLedger` holds the batches from delivery to acknowledgement:

    deliver ──► in flight ── acknowledge ──► removed, its step counted
                   │  ▲
      return_batch ▼  │ redeliver, the next attempt
                 returned: redelivered before a new batch is formed

Each delivery of a batch is an *attempt* with its own token. A returned batch can be acknowledged
under its last token until it is redelivered; after that the old token has expired. An unknown
token, such as one from before a reset, changes nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from atroposlib.api import records
from atroposlib.api.environments import EnvRegistry
from atroposlib.api.queue import (
    UNKNOWN_VERSION,
    AdmittedGroups,
    GroupQueue,
    Placement,
    QueuedGroup,
    RunLimits,
    Waiting,
    check_figures,
)
from atroposlib.api.records import PayloadFlaw, RecordType, kind_of
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.tickets import TicketDesk
from atroposlib.errors import GroupError

_KEPT_ACKNOWLEDGEMENTS = 4096

AckResult: TypeAlias = Literal["acked", "returned", "repeated", "expired", "unknown"]
"""Result of acknowledging (`acked`) or returning (`returned`) a batch. `repeated`: it had happened
before; `expired`: the batch was redelivered or acknowledged; `unknown`: no such batch."""


class BatchToken(NamedTuple):
    """Identifies one attempt to deliver one batch; written as `17-1`."""

    batch_id: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.batch_id}-{self.attempt}"


def parse_token(text: str) -> BatchToken | None:
    """Parse a token; None if the text is malformed."""
    batch_id, separator, attempt = text.partition("-")
    numbers = [batch_id, attempt]
    if not separator or not all(len(n) < 19 and n.isascii() and n.isdigit() for n in numbers):
        return None
    return BatchToken(int(batch_id), int(attempt))


class DeliveredBatch(msgspec.Struct, frozen=True, array_like=True):
    """One delivery of a batch to one client."""

    batch_id: int
    attempt: int
    groups: tuple[QueuedGroup, ...]
    owner: str
    """The replica that delivered it."""
    at: float
    """Unix time of the delivery, in seconds."""
    lease_until: float | None = None
    """Unix time at which the lease expires; None while the body is being sent."""
    key: str | None = None
    """Idempotency key of the request; a request with the same key did not receive the batch."""

    @property
    def lease_s(self) -> float | None:
        """Duration of the lease, in seconds; None while the body is being sent."""
        return None if self.lease_until is None else self.lease_until - self.at

    @property
    def token(self) -> str:
        return str(BatchToken(self.batch_id, self.attempt))

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for group in self.groups]

    @property
    def num_sequences(self) -> int:
        return sum(group.num_sequences for group in self.groups)


class BatchLedger:
    """Keeps batches until they are acknowledged; returned ones are redelivered first."""

    def __init__(self) -> None:
        self.next_id = 0
        self.in_flight: dict[int, DeliveredBatch] = {}
        self.returned: dict[int, DeliveredBatch] = {}
        self.acknowledged: dict[int, int] = {}
        """Recently acknowledged batches → their attempt, oldest first."""
        self.num_sequences = 0
        """Sequences in unacknowledged batches."""

    @property
    def oldest_returned(self) -> DeliveredBatch | None:
        """The batch to redeliver next; None if none was returned."""
        return self.returned[min(self.returned)] if self.returned else None

    def pending(self) -> list[DeliveredBatch]:
        return [*self.in_flight.values(), *self.returned.values()]

    def deliver(self, groups: Sequence[QueuedGroup], sent: records.BatchFormed) -> DeliveredBatch:
        """Put a newly formed batch in flight."""
        delivery = (sent.owner, sent.at, sent.lease_until, sent.key)
        batch = DeliveredBatch(self.next_id, 1, tuple(groups), *delivery)
        self.next_id += 1
        self.in_flight[batch.batch_id] = batch
        self.num_sequences += batch.num_sequences
        return batch

    def redeliver(self, sent: records.BatchHandedOut) -> DeliveredBatch | None:
        """Put a returned batch in flight under its next attempt; None if it was not returned."""
        before = self.returned.get(sent.batch_id)
        if before is None or before.attempt + 1 != sent.attempt:
            return None
        del self.returned[sent.batch_id]
        delivery = (sent.owner, sent.at, sent.lease_until, sent.key)
        batch = DeliveredBatch(sent.batch_id, sent.attempt, before.groups, *delivery)
        self.in_flight[sent.batch_id] = batch
        return batch

    def acknowledge(self, token: BatchToken) -> DeliveredBatch | None:
        """Remove an acknowledged batch; None if the token is not the current one."""
        batch = self._current(token)
        if batch is None:
            return None
        self._forget(batch)
        self.acknowledged[token.batch_id] = token.attempt
        while len(self.acknowledged) > _KEPT_ACKNOWLEDGEMENTS:
            del self.acknowledged[next(iter(self.acknowledged))]
        return batch

    def return_batch(self, token: BatchToken) -> DeliveredBatch | None:
        """Mark a batch for redelivery; None if the token is not in flight."""
        batch = self.find(token)
        if batch is None:
            return None
        del self.in_flight[token.batch_id]
        self.returned[token.batch_id] = batch
        return batch

    def dissolve(self, batch_id: int) -> tuple[QueuedGroup, ...]:
        """Remove a returned batch and return its groups, which are queued again."""
        batch = self.returned[batch_id]
        self._forget(batch)
        return batch.groups

    def change_groups(
        self, change: Callable[[Iterable[QueuedGroup]], Iterable[QueuedGroup]]
    ) -> None:
        """Replace the descriptions of all groups in batches; their sizes must stay the same."""
        for batches in (self.in_flight, self.returned):
            for batch_id, batch in batches.items():
                groups = tuple(change(batch.groups))
                batches[batch_id] = msgspec.structs.replace(batch, groups=groups)

    def find(self, token: BatchToken) -> DeliveredBatch | None:
        batch = self.in_flight.get(token.batch_id)
        return batch if batch is not None and batch.attempt == token.attempt else None

    def sent_for(self, key: str) -> DeliveredBatch | None:
        """Return the batch in flight that was sent to a request with this key."""
        return next((batch for batch in self.in_flight.values() if batch.key == key), None)

    def ack_result(self, token: BatchToken) -> AckResult:
        """Return the result that acknowledging would have, without doing it."""
        if self._current(token) is not None:
            return "acked"
        if self.acknowledged.get(token.batch_id) == token.attempt:
            return "repeated"
        return self._stale_result(token)

    def return_result(self, token: BatchToken) -> AckResult:
        """Return the result that returning would have, without doing it."""
        batch = self._current(token)
        if batch is None:
            return self._stale_result(token)
        return "returned" if token.batch_id in self.in_flight else "repeated"

    def restore(
        self, in_flight: Iterable[DeliveredBatch], returned: Iterable[DeliveredBatch]
    ) -> None:
        self.in_flight = {batch.batch_id: batch for batch in in_flight}
        self.returned = {batch.batch_id: batch for batch in returned}
        self.num_sequences = sum(batch.num_sequences for batch in self.pending())

    def clear(self) -> None:
        """Remove every batch; ids are not reused, so that late acknowledgements are recognized."""
        self.in_flight.clear()
        self.returned.clear()
        self.acknowledged.clear()
        self.num_sequences = 0

    def _current(self, token: BatchToken) -> DeliveredBatch | None:
        batch = self.in_flight.get(token.batch_id) or self.returned.get(token.batch_id)
        return batch if batch is not None and batch.attempt == token.attempt else None

    def _stale_result(self, token: BatchToken) -> AckResult:
        batch = self.in_flight.get(token.batch_id) or self.returned.get(token.batch_id)
        last = batch.attempt if batch else self.acknowledged.get(token.batch_id, 0)
        return "expired" if 1 <= token.attempt <= last else "unknown"

    def _forget(self, batch: DeliveredBatch) -> None:
        self.in_flight.pop(batch.batch_id, None)
        self.returned.pop(batch.batch_id, None)
        self.num_sequences -= batch.num_sequences


class PastGroups:
    """Delivered groups, oldest first, limited in number and in payload bytes."""

    def __init__(self, *, max_groups: int, max_bytes: int) -> None:
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._groups: dict[int, QueuedGroup] = {}
        self.num_bytes = 0
        """Payload bytes of all kept groups."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[QueuedGroup]:
        return iter(self._groups.values())

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def get(self, group_id: int) -> QueuedGroup | None:
        return self._groups.get(group_id)

    def add(self, groups: Iterable[QueuedGroup]) -> list[int]:
        """Keep delivered groups; return the ids of those removed to make room."""
        for group in groups:
            known = self._groups.pop(group.group_id, None)
            self.num_bytes -= known.num_bytes if known else 0
            self._groups[group.group_id] = group
            self.num_bytes += group.num_bytes
        removed = []
        while len(self._groups) > self._max_groups or self.num_bytes > self._max_bytes:
            oldest = self._groups.pop(next(iter(self._groups)))
            self.num_bytes -= oldest.num_bytes
            removed.append(oldest.group_id)
        return removed

    def clear(self) -> list[int]:
        removed = list(self._groups)
        self._groups.clear()
        self.num_bytes = 0
        return removed


class PayloadLedger:
    """Tracks payloads from the queue to `past` and until they may be discarded."""

    def __init__(self, *, max_past_groups: int, max_past_bytes: int) -> None:
        self.past = PastGroups(max_groups=max_past_groups, max_bytes=max_past_bytes)
        """Delivered groups whose payloads are kept for inspection."""
        self.latest: QueuedGroup | None = None
        """The group queued last; its payload is kept until another group is queued."""
        self.latest_is_held = False
        """Whether the latest group is kept only because it is the latest."""
        self._discardable: deque[int] = deque()

    @property
    def discardable(self) -> list[int]:
        """Ids of groups whose payloads are no longer needed."""
        return list(self._discardable)

    def take_discardable(self, limit: int) -> list[int]:
        """Remove and return up to `limit` ids of `discardable`."""
        held = self._discardable
        return [held.popleft() for _ in range(min(limit, len(held)))]

    def mark_discardable(self, group_ids: Iterable[int]) -> None:
        self._discardable.extend(group_ids)

    def note_queued(self, group: QueuedGroup) -> None:
        """Record the latest group; the previous one is no longer kept as the latest."""
        if self.latest_is_held and self.latest is not None:
            self._discardable.append(self.latest.group_id)
        self.latest = group
        self.latest_is_held = False

    def note_delivered(self, groups: Sequence[QueuedGroup]) -> None:
        """Keep delivered groups for inspection, in place of older ones."""
        self._release(self.past.add(groups))

    def note_removed(self, groups: Iterable[QueuedGroup]) -> None:
        """Mark removed groups as discardable, except the latest."""
        self._release(group.group_id for group in groups)

    def discard_past(self) -> None:
        """Mark groups kept for inspection as discardable, except the latest."""
        self._release(self.past.clear())

    def _release(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            if self.latest is not None and group_id == self.latest.group_id:
                self.latest_is_held = True
            else:
                self._discardable.append(group_id)

    def forget(self, group_ids: Iterable[int]) -> None:
        """Mark everything as discardable: the given ids, delivered groups, and the latest group."""
        self.mark_discardable(group_ids)
        self.mark_discardable(self.past.clear())
        if self.latest_is_held and self.latest is not None:
            self._discardable.append(self.latest.group_id)
        self.latest = None
        self.latest_is_held = False


_MAX_KEY_CHARACTERS = 255
_MAX_KEYS = 65_536
_MAX_BYTES = 32 * 1024 * 1024
_ENTRY_BYTES = 256  # approximate size of an entry without its key and placements


class KeyEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored request."""

    digest: int
    """Digest of its body."""
    buffered: tuple[int | None, ...]
    """`Placement.buffered_sequences` of each of its groups."""

    @property
    def placements(self) -> list[Placement]:
        return [Placement(size) for size in self.buffered]


def check_key(key: str) -> None:
    """Raise `GroupError` unless an idempotency key has a valid length and valid characters."""
    if not 0 < len(key) <= _MAX_KEY_CHARACTERS or not all("!" <= char <= "~" for char in key):
        raise GroupError(
            f"Idempotency-Key: expected 1 to {_MAX_KEY_CHARACTERS} visible ASCII characters, such "
            "as a random UUID per request"
        )


class KeyBook:
    """The newest idempotency keys, limited in number and in bytes."""

    def __init__(self) -> None:
        self._entries: dict[str, KeyEntry] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> KeyEntry | None:
        return self._entries.get(key)

    def items(self) -> Iterable[tuple[str, KeyEntry]]:
        """Return every key with its entry, oldest first."""
        return self._entries.items()

    def remember(self, key: str, digest: int, placements: Sequence[Placement]) -> None:
        """Add a request under a new key; the oldest keys are removed to make room."""
        self.restore([(key, KeyEntry(digest, tuple(p.buffered_sequences for p in placements)))])

    def restore(self, items: Iterable[tuple[str, KeyEntry]]) -> None:
        for key, entry in items:
            known = self._entries.pop(key, None)
            self._num_bytes -= _size_of(key, known) if known else 0
            self._entries[key] = entry
            self._num_bytes += _size_of(key, entry)
        while len(self._entries) > _MAX_KEYS or self._num_bytes > _MAX_BYTES:
            oldest = next(iter(self._entries))
            self._num_bytes -= _size_of(oldest, self._entries.pop(oldest))


def _size_of(key: str, entry: KeyEntry) -> int:
    return _ENTRY_BYTES + len(key) + 8 * len(entry.buffered)


SET_ASIDE = "records/set_aside_"
"""Prefix of the counters of records that could not be applied; the kind follows."""

GROUPS_SET_ASIDE = "groups/set_aside_"
"""Prefix of the counters of groups that could not be delivered; the flaw follows."""

_KEPT_TRAINER_IDS = 256
_KEPT_FLAWS = 100
_MAX_FAULT_CHARACTERS = 500
_RUN_ID_DIGITS = 16


class GroupState(str, Enum):
    """State of a group."""

    QUEUED = "queued"
    """In the queue; position 0 is the oldest."""
    BUFFERED = "buffered"
    """In the buffer of its environment, until groups add up to its group size."""
    IN_FLIGHT = "in_flight"
    """In a batch that is not acknowledged."""
    PAST = "past"
    """Delivered recently; position 0 is the latest."""


class RunState:
    """One run of one trainer with any number of environments; changed by `apply` only."""

    def __init__(self, limits: RunLimits | None = None) -> None:
        self.limits = limits or RunLimits()
        self.start_over()

    def start_over(self) -> None:
        self._forget_run()
        self.delivery = BatchLedger()
        self.payloads = PayloadLedger(
            max_past_groups=self.limits.keep_past_groups,
            max_past_bytes=self.limits.keep_past_bytes,
        )
        """Which payloads are kept for inspection, and which may be discarded."""
        self.counters: Counter[str] = Counter()
        """Counters over the whole life of the run, including resets."""
        self.set_aside_groups: deque[tuple[int, PayloadFlaw]] = deque(maxlen=_KEPT_FLAWS)
        """[(group_id, flaw)] of the groups set aside most recently."""
        self.epoch = 0
        """Number of resets of the run."""
        self.fence = 0
        self.fault: str | None = None
        """Why the last record was set aside; None if it was applied."""

    def _forget_run(self) -> None:
        """Set the attributes that a reset sets, too."""
        self.registration: Registration | None = None
        self.run_id: str | None = None
        """Identifies a run from its first registration until a reset, or until a trainer replaces a
        consumer or the settings. When it changes, environments register again to read the new
        settings."""
        self.taken_over_run_id: str | None = None
        """The run that this one continues; its environments keep their ids."""
        self.started_at: float | None = None
        """Unix time of the registration that started the run, in seconds."""
        self.envs = EnvRegistry()
        self.queue = GroupQueue()
        self.keys = KeyBook()
        self.tickets = TicketDesk()
        self.step = 0
        self.is_started = False
        """Whether the trainer has requested a batch; environments wait until then."""
        self.policy_version: int | None = None
        """The policy version that the trainer last reported; None if it has not reported one."""
        self.trainer_ids: deque[int] = deque(maxlen=_KEPT_TRAINER_IDS)

    def apply(self, record: records.Record) -> AdmittedGroups | None:
        """Apply a record; return the admission of groups, None for every other record."""
        self.fault = None
        if record.is_guarded:
            self.fence += 1
        try:
            return _HANDLERS[type(record)](self, record)
        except Exception as error:  # noqa: BLE001 - the run must continue after any error
            self.set_aside(kind_of(type(record)), error)
            return None

    def skip(self, record_type: RecordType, error: BaseException) -> None:
        """Skip a record of which only the type can be read."""
        self.fault = None
        if record_type.is_guarded:
            self.fence += 1
        if record_type is records.EnvRegistered:
            self.envs.add_unreadable(now=0.0)
        elif record_type is records.BatchFormed:
            self.delivery.next_id += 1
        self.set_aside(kind_of(record_type), error)

    def set_aside(self, kind: str, error: BaseException) -> None:
        """Count a record that could not be applied."""
        self.fault = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_FAULT_CHARACTERS]
        self.counters[SET_ASIDE + kind] += 1

    @property
    def num_set_aside(self) -> int:
        """Records that could not be applied, over the whole life of the run."""
        return sum(n for name, n in self.counters.items() if name.startswith(SET_ASIDE))

    @property
    def num_set_aside_groups(self) -> int:
        """Groups whose payloads are missing or damaged, over the whole life of the run."""
        return sum(n for name, n in self.counters.items() if name.startswith(GROUPS_SET_ASIDE))

    @property
    def batch_size(self) -> int:
        """Sequences per batch; 0 before a trainer registered."""
        return self.registration.batch_size if self.registration else 0

    @property
    def short_batches(self) -> bool:
        """Whether the trainer accepts fewer sequences where sizes do not add up to a batch."""
        return self.registration is not None and self.registration.short_batches

    @property
    def consumer(self) -> str | None:
        """Name of the registered consumer; None if a trainer or no client is registered."""
        return self.registration.consumer if self.registration else None

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer is registered; a consumer does not count."""
        return self.registration is not None and self.registration.consumer is None

    def is_consumer(self, trainer_id: str) -> bool:
        """Whether the registered consumer has this id, a decimal number."""
        return self.consumer is not None and trainer_id == str(self.trainer_ids[-1])

    def plan_batch(self) -> list[QueuedGroup] | None:
        """Choose the groups of the next batch; None if there are too few.

        A trainer gets exactly `batch_size` sequences, unless it accepts short batches; a consumer
        gets the oldest groups, of any size, with at most `batch_size` sequences in total.
        """
        if self.consumer is not None:
            return self.queue.plan_oldest(self.batch_size)
        plan = self.queue.plan_in_order if self.tickets.is_used else self.queue.plan_batch
        return plan(self.batch_size, self.envs.minimums, short_batches=self.short_batches)

    @property
    def past(self) -> PastGroups:
        return self.payloads.past

    @property
    def latest(self) -> QueuedGroup | None:
        return self.payloads.latest

    @property
    def latest_group_id(self) -> int | None:
        return self.latest.group_id if self.latest else None

    @property
    def current_version(self) -> int:
        """Policy version of the trainer, for staleness: the reported one, else the step."""
        return self.step if self.policy_version is None else self.policy_version

    def staleness_of(self, group: QueuedGroup) -> int | None:
        """Return how many versions the policy is ahead of a group; None if unknown."""
        version = group.known_version
        if version is None or version > self.current_version:
            return None
        return self.current_version - version

    @property
    def oldest_staleness(self) -> int:
        """The highest staleness among queued groups with a known version, 0 without any."""
        versions = [version for version in self.queue.groups_by_version if version >= 0]
        return max(0, self.current_version - min(versions, default=self.current_version))

    @property
    def may_form_batch(self) -> bool:
        """Whether a batch may be formed: one was returned, or enough sequences are queued."""
        if self.registration is None:
            return False
        return bool(self.delivery.returned) or self.queue.num_sequences >= self.batch_size

    @property
    def waiting(self) -> Waiting:
        """Sequences and bytes in the queue, in buffers and held for a ticket."""
        num_sequences = self.queue.num_sequences + self.envs.buffered_sequences
        waiting = Waiting(num_sequences, self.queue.num_bytes + self.envs.buffered_bytes)
        return waiting.plus(self.tickets.waiting)

    def _admit(self, record: records.GroupsAdmitted) -> AdmittedGroups:
        if record.epoch != self.epoch:
            # The run of these groups was reset while they were written.
            self.payloads.mark_discardable(group.group_id for group in record.groups)
            return AdmittedGroups([Placement(None) for _ in record.groups])
        known = self.keys.find(record.key) if record.key is not None else None
        if known is not None:
            self.payloads.mark_discardable(group.group_id for group in record.groups)
            is_same = known.digest == record.digest
            return AdmittedGroups(known.placements, is_repeat=is_same, is_key_reused=not is_same)
        check_figures(record.groups, counts=(record.num_loose, record.num_from_text))
        if record.ticket is None:
            placements = [self._place(group) for group in record.groups]
        else:
            self._settle_ticket(record.groups[0].env_id, record.ticket, record.groups)
            placements = [Placement(None) for _ in record.groups]
        self.counters["groups/received"] += len(record.groups)
        self.counters["sequences/received"] += sum(g.num_sequences for g in record.groups)
        self.counters["tokens/received"] += sum(group.num_tokens for group in record.groups)
        self.counters["groups/loose"] += record.num_loose
        self.counters["groups/tokenized_from_text"] += record.num_from_text
        if record.key is not None:
            self.keys.remember(record.key, record.digest, placements)
        return AdmittedGroups(placements)

    def _place(self, group: QueuedGroup) -> Placement:
        env = self.envs.find(group.env_id)
        if env is not None:
            env.last_seen = max(env.last_seen, group.received_at)
        elif group.env_id is not None:
            group = msgspec.structs.replace(group, env_id=None)
        if env is None or not env.must_buffer(group.num_sequences):
            self._enqueue(group)
            return Placement(None)
        for released in self.envs.buffer(env, group):
            self._enqueue(released)
        return Placement(self.envs.buffered_sequences_of(env.env_id))

    def _settle_ticket(self, env_id: int | None, number: int, groups: list[QueuedGroup]) -> None:
        """Hold groups until the turn of their ticket; late ones are placed at once."""
        env = self.envs.find(env_id)
        released = None if env is None else self.tickets.settle(number, env, groups)
        if released is None and groups:
            self.counters["tickets/late"] += 1
        self._place_all([groups] if released is None else released)

    def _place_all(self, released: list[list[QueuedGroup]]) -> None:
        for group in chain.from_iterable(released):
            self._place(group)

    def _return_ticket(self, record: records.TicketReturned) -> None:
        if record.epoch == self.epoch and self.envs.find(record.env_id) is not None:
            self.counters["tickets/expired" if record.is_expired else "tickets/returned"] += 1
            self._settle_ticket(record.env_id, record.number, [])

    def _enqueue(self, group: QueuedGroup) -> None:
        if self.queue.get(group.group_id) is not None:
            return
        self.queue.append(group)
        self.payloads.note_queued(group)

    def _register_trainer(self, record: records.TrainerRegistered) -> None:
        trainer_id = int(record.trainer_id, 16)
        asked = Registration.model_validate(record.settings)
        self.trainer_ids.append(trainer_id)
        current = self.registration
        is_takeover = current is not None and current.consumer is not None
        if current is not None and not is_takeover:
            if not asked.replace or asked.consumer is not None:
                return
        else:
            self.is_started = asked.consumer is not None
            self._dissolve_all()
        if current is None or is_takeover or current.differences(asked):
            self.taken_over_run_id = self.run_id
            self.run_id = record.trainer_id[:_RUN_ID_DIGITS]
        self.started_at = record.at
        self.registration = asked
        self.step = asked.starting_step
        self.policy_version = None
        self._dissolve_misfits()
        self._forget_later_versions()

    def _release_consumer(self, record: records.ConsumerLeft) -> None:
        if self.is_consumer(str(int(record.trainer_id, 16))):
            self.registration = None
            self.is_started = False
            self._dissolve_all()

    def _dissolve_all(self) -> None:
        """Queue the groups leased by a consumer again; a late acknowledgement has no effect."""
        for batch in list(self.delivery.in_flight.values()):
            self.delivery.return_batch(BatchToken(batch.batch_id, batch.attempt))
        self._dissolve(sorted(self.delivery.returned))

    def _forget_later_versions(self) -> None:
        """Mark versions as unknown that the trainer has not reached; they are of another client."""
        known = partial(_without_versions_after, self.step)
        if any(version > self.step for version in self.queue.groups_by_version):
            queued = known(self.queue)
            self.queue = GroupQueue()
            for group in queued:
                self.queue.append(group)
        for env in self.envs:
            env.buffer = known(env.buffer)
        for stream in self.tickets.streams:
            stream.held = {number: known(groups) for number, groups in stream.held.items()}
        self.delivery.change_groups(known)

    def _dissolve_misfits(self) -> None:
        """Queue the groups of returned batches again if the batch size has changed."""
        misfits = [
            batch_id
            for batch_id, batch in sorted(self.delivery.returned.items())
            if batch.num_sequences != self.batch_size
        ]
        self._dissolve(misfits)

    def _dissolve(self, batch_ids: Iterable[int]) -> None:
        """Queue the groups of returned batches again, at the front."""
        groups = {
            group.group_id: group
            for batch_id in batch_ids
            for group in self.delivery.dissolve(batch_id)
            if self.queue.get(group.group_id) is None
        }
        if groups:
            self.queue.restore_front(list(groups.values()))

    def _start(self, record: records.TrainerStarted) -> None:
        if record.epoch == self.epoch:
            self.is_started = True

    def _register_env(self, record: records.EnvRegistered) -> None:
        if record.env_id != len(self.envs):
            return
        try:
            request = RegisterEnv.model_validate(record.request)
        except ValueError:
            self.envs.add_unreadable(now=record.at)
            raise
        self.envs.add(request, now=record.at)
        self.tickets.require(record.ordered_envs)

    def _disconnect_env(self, record: records.EnvDisconnected) -> None:
        env = self.envs.find(record.env_id)
        if env is not None:
            self.envs.connect(env, False, is_expired=record.is_expired)
            released, num_expired = self.tickets.disconnect(record.env_id)
            self.counters.update({"tickets/expired": num_expired} if num_expired else {})
            self._place_all(released)

    def _revive_env(self, record: records.EnvRevived) -> None:
        env = self.envs.find(record.env_id)
        if env is not None and env.is_expired:
            env.last_seen = max(env.last_seen, record.at)
            self.envs.connect(env, True)
            self.tickets.reconnect(record.env_id)

    def _note_seen(self, record: records.EnvsSeen) -> None:
        if record.epoch != self.epoch:
            return
        for env_id, at in record.seen.items():
            env = self.envs.find(env_id)
            if env is not None:
                env.last_seen = max(env.last_seen, at)

    def _form_batch(self, record: records.BatchFormed) -> None:
        if record.batch_id != self.delivery.next_id:
            return
        groups = self.queue.remove(record.group_ids)
        self.delivery.deliver(groups, record)
        self.counters["batches/formed"] += 1

    def _redeliver(self, record: records.BatchHandedOut) -> None:
        self.delivery.redeliver(record)

    def _acknowledge(self, record: records.BatchAcknowledged) -> None:
        self.step += self._settle(BatchToken(record.batch_id, record.attempt))

    def _pass_over(self, record: records.BatchPassedOver) -> None:
        is_settled = self._settle(BatchToken(record.batch_id, record.attempt))
        self.counters["batches/without_step"] += is_settled

    def _settle(self, token: BatchToken) -> bool:
        """Remove an acknowledged batch; return whether it was pending."""
        batch = self.delivery.acknowledge(token)
        if batch is None:
            return False
        self.counters["batches/delivered"] += 1
        self.counters["groups/delivered"] += len(batch.groups)
        self.counters["sequences/delivered"] += batch.num_sequences
        self.counters["tokens/delivered"] += sum(group.num_tokens for group in batch.groups)
        self.payloads.note_delivered(batch.groups)
        return True

    def _take_back(self, record: records.BatchesReturned) -> None:
        for batch_id, attempt in record.batches:
            if self.delivery.return_batch(BatchToken(batch_id, attempt)) is not None:
                self.counters["batches/returned"] += 1
                self.counters[f"batches/returned_{record.reason}"] += 1
        self._dissolve_misfits()

    def _set_policy_version(self, record: records.PolicyVersionSet) -> None:
        if record.epoch == self.epoch:
            self.policy_version = record.version

    def _remove_groups(self, record: records.GroupsRemoved) -> None:
        wanted = set(record.group_ids)
        removed = self.queue.remove(record.group_ids) + self.envs.remove_buffered(wanted)
        self.counters["groups/removed"] += len(removed)
        self.counters["sequences/removed"] += sum(group.num_sequences for group in removed)
        self.payloads.note_removed(removed)

    def _set_groups_aside(self, record: records.GroupsSetAside) -> None:
        if self.delivery.return_batch(BatchToken(record.batch_id, record.attempt)) is None:
            return
        flaws = dict(record.flaws)
        groups = {group.group_id: group for group in self.delivery.dissolve(record.batch_id)}
        left_out = [group for group_id, group in groups.items() if group_id in flaws]
        self.queue.restore_front(
            [
                group
                for group_id, group in groups.items()
                if group_id not in flaws and self.queue.get(group_id) is None
            ]
        )
        for group in left_out:
            flaw = flaws[group.group_id]
            self.counters[GROUPS_SET_ASIDE + flaw] += 1
            self.counters["sequences/set_aside"] += group.num_sequences
            self.set_aside_groups.append((group.group_id, flaw))
        self.payloads.note_removed(left_out)

    def _reset(self, record: records.RunReset) -> None:
        self.epoch += 1
        group_ids = [group.group_id for group in self.queue]
        group_ids += [group.group_id for env in self.envs for group in env.buffer]
        group_ids += [group.group_id for group in self.tickets]
        group_ids += [i for batch in self.delivery.pending() for i in batch.group_ids]
        self.payloads.forget(group_ids)
        self.delivery.clear()
        self._forget_run()


def walk_groups(state: RunState, where: GroupState) -> Iterable[QueuedGroup]:
    """Return the groups in one state, in order of their positions."""
    if where is GroupState.QUEUED:
        return state.queue
    if where is GroupState.BUFFERED:
        return (group for env in state.envs for group in env.buffer)
    if where is GroupState.IN_FLIGHT:
        return (group for batch in state.delivery.pending() for group in batch.groups)
    return reversed(list(state.past))


def find_group(state: RunState, group_id: int) -> tuple[QueuedGroup, GroupState] | None:
    """Return a group and its state; None if the run does not have it."""
    queued, past = state.queue.get(group_id), state.past.get(group_id)
    if queued is not None:
        return queued, GroupState.QUEUED
    if past is not None:
        return past, GroupState.PAST
    for where in (GroupState.IN_FLIGHT, GroupState.BUFFERED):
        for group in walk_groups(state, where):
            if group.group_id == group_id:
                return group, where
    return None


_HANDLERS: dict[type[Any], Callable[[RunState, Any], AdmittedGroups | None]] = {
    records.GroupsAdmitted: RunState._admit,
    records.TicketReturned: RunState._return_ticket,
    records.TrainerRegistered: RunState._register_trainer,
    records.ConsumerLeft: RunState._release_consumer,
    records.TrainerStarted: RunState._start,
    records.EnvRegistered: RunState._register_env,
    records.EnvDisconnected: RunState._disconnect_env,
    records.EnvRevived: RunState._revive_env,
    records.EnvsSeen: RunState._note_seen,
    records.BatchFormed: RunState._form_batch,
    records.BatchHandedOut: RunState._redeliver,
    records.BatchAcknowledged: RunState._acknowledge,
    records.BatchPassedOver: RunState._pass_over,
    records.BatchesReturned: RunState._take_back,
    records.PolicyVersionSet: RunState._set_policy_version,
    records.GroupsRemoved: RunState._remove_groups,
    records.GroupsSetAside: RunState._set_groups_aside,
    records.RunReset: RunState._reset,
}


def _without_versions_after(step: int, groups: Iterable[QueuedGroup]) -> list[QueuedGroup]:
    return [
        msgspec.structs.replace(group, version=UNKNOWN_VERSION) if group.version > step else group
        for group in groups
    ]
