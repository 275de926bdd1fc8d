"""The state of one run: what applying the records of its log, in order, gives; pure.

Invariants:

- `apply` never fails and depends on nothing but the state and the record, so every replica that
  applied the same records holds the same state. A record that comes too late, such as the
  acknowledgement of a batch that has moved on, changes nothing.
- A group's payload is given up for discarding only after its batch was acknowledged and it is no
  longer among `past`, when its request repeats one that was stored, or when the run was reset.
- The step grows by one per acknowledged batch and by nothing else.
- `fence` is the number of guarded records applied.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from atroposlib.api import records
from atroposlib.api.admission import Admission, Placement, RunLimits, Waiting
from atroposlib.api.delivery import BatchToken, Delivery
from atroposlib.api.env_registry import EnvRegistry
from atroposlib.api.idempotency import KeyBook
from atroposlib.api.past import PastGroups
from atroposlib.api.payload_ledger import PayloadLedger
from atroposlib.api.queue import GroupQueue, QueuedGroup
from atroposlib.api.schemas import RegisterEnv, Registration

__all__ = ["RunState"]

_KEPT_TRAINER_IDS = 256
_RUN_ID_DIGITS = 16


class RunState:
    """One run of one trainer with any number of environments; changed by `apply` only."""

    def __init__(self, limits: RunLimits | None = None) -> None:
        self._limits = limits = limits or RunLimits()
        self.registration: Registration | None = None
        self.run_id: str | None = None
        """New for every run: from the first registration until everything is forgotten."""
        self.started_at: float | None = None
        """Unix time of the registration that started the run, in seconds."""
        self.envs = EnvRegistry()
        self.queue = GroupQueue()
        self.delivery = Delivery()
        self.payloads = PayloadLedger(
            max_past_groups=limits.keep_past_groups, max_past_bytes=limits.keep_past_bytes
        )
        """Which payloads are kept for inspection, and which may be discarded."""
        self.keys = KeyBook()
        self.step = 0
        self.is_started = False
        """Whether the trainer has asked for a batch; environments wait until it has."""
        self.policy_version: int | None = None
        """What the trainer told last; None when it never did."""
        self.trainer_ids: deque[int] = deque(maxlen=_KEPT_TRAINER_IDS)
        self.counters: Counter[str] = Counter()
        """Counts over the whole life of the run, resets included."""
        self.epoch = 0
        """How often the run was reset."""
        self.fence = 0
        self._handlers: dict[type[Any], Callable[[Any], Admission | None]] = self._all_handlers()

    def _all_handlers(self) -> dict[type[Any], Callable[[Any], Admission | None]]:
        return {
            records.GroupsAdmitted: self._admit,
            records.TrainerRegistered: self._register_trainer,
            records.TrainerStarted: self._start,
            records.EnvRegistered: self._register_env,
            records.EnvDisconnected: self._disconnect_env,
            records.EnvRevived: self._revive_env,
            records.EnvsSeen: self._note_seen,
            records.BatchFormed: self._form_batch,
            records.BatchHandedOut: self._hand_out_again,
            records.BatchAcknowledged: self._acknowledge,
            records.BatchesReturned: self._take_back,
            records.PolicyVersionSet: self._set_policy_version,
            records.RunReset: self._reset,
        }

    def start_over(self) -> None:
        """Become a state that nothing was applied to."""
        self.__init__(self._limits)  # type: ignore[misc]

    def apply(self, record: records.Record) -> Admission | None:
        """Change the state by what happened.

        Returns:
            For admitted groups what their sender is told; None for everything else.
        """
        if record.is_guarded:
            self.fence += 1
        return self._handlers[type(record)](record)

    @property
    def batch_size(self) -> int:
        """Sequences per batch, 0 before a trainer registered."""
        return self.registration.batch_size if self.registration else 0

    @property
    def past(self) -> PastGroups:
        """Delivered groups whose payloads can still be looked at."""
        return self.payloads.past

    @property
    def latest(self) -> QueuedGroup | None:
        """The group queued last."""
        return self.payloads.latest

    @property
    def latest_group_id(self) -> int | None:
        """The group queued last."""
        return self.latest.group_id if self.latest else None

    @property
    def current_version(self) -> int:
        """The policy version that staleness counts from: as the trainer told, else the step."""
        return self.step if self.policy_version is None else self.policy_version

    @property
    def may_form_batch(self) -> bool:
        """Whether trying to hand out a batch is worth it: one came back, or enough is queued."""
        if self.registration is None:
            return False
        return bool(self.delivery.returned) or self.queue.num_sequences >= self.batch_size

    @property
    def waiting(self) -> Waiting:
        """What is in the queue and in buffers."""
        return Waiting(
            self.queue.num_sequences + self.envs.buffered_sequences,
            self.queue.num_bytes + self.envs.buffered_bytes,
        )

    @property
    def num_alive_groups(self) -> int:
        """Groups whose payloads the store must have, about: buffers are counted by sequences."""
        in_batches = sum(len(handout.groups) for handout in self.delivery.pending())
        return len(self.queue) + self.envs.buffered_sequences + in_batches + len(self.past)

    def find_group(self, group_id: int) -> QueuedGroup | None:
        """Return a group whose payload the store has, wherever it is."""
        if self.latest is not None and self.latest.group_id == group_id:
            return self.latest
        found = self.queue.get(group_id) or self.past.get(group_id)
        if found is not None:
            return found
        elsewhere = chain.from_iterable(
            (
                *(env.buffer for env in self.envs),
                *(handout.groups for handout in self.delivery.pending()),
            )
        )
        return next((group for group in elsewhere if group.group_id == group_id), None)

    def _admit(self, record: records.GroupsAdmitted) -> Admission:
        if record.epoch != self.epoch:
            # The run these groups belong to was reset while they were written.
            self.payloads.give_up(group.group_id for group in record.groups)
            return Admission([Placement(None) for _ in record.groups])
        known = self.keys.find(record.key) if record.key is not None else None
        if known is not None:
            self.payloads.give_up(group.group_id for group in record.groups)
            is_same = known.digest == record.digest
            return Admission(known.placements, is_repeat=is_same, is_key_reused=not is_same)
        placements = [self._place(group) for group in record.groups]
        self.counters["groups/received"] += len(record.groups)
        self.counters["sequences/received"] += sum(g.num_sequences for g in record.groups)
        self.counters["tokens/received"] += sum(group.num_tokens for group in record.groups)
        self.counters["groups/loose"] += record.num_loose
        if record.key is not None:
            self.keys.remember(record.key, record.digest, placements)
        return Admission(placements)

    def _place(self, group: QueuedGroup) -> Placement:
        env = self.envs.find(group.env_id)
        if env is not None:
            env.last_seen = max(env.last_seen, group.received_at)
        if env is None or not env.wants_to_buffer(group.num_sequences):
            self._enqueue(group)
            return Placement(None)
        for released in self.envs.buffer(env, group):
            self._enqueue(released)
        return Placement(self.envs.buffered_sequences_of(env.env_id))

    def _enqueue(self, group: QueuedGroup) -> None:
        if self.queue.get(group.group_id) is not None:
            return
        self.queue.append(group)
        self.payloads.note_queued(group)

    def _register_trainer(self, record: records.TrainerRegistered) -> None:
        self.trainer_ids.append(int(record.trainer_id, 16))
        asked = Registration(**record.settings)
        if self.registration is not None and not asked.replace:
            return
        if self.registration is None:
            self.run_id = record.trainer_id[:_RUN_ID_DIGITS]
        self.started_at = record.at
        self.registration = asked
        self.step = asked.starting_step
        self.policy_version = None
        self._dissolve_misfits()

    def _dissolve_misfits(self) -> None:
        """Let returned batches that do not have the batch size any more be packed anew."""
        misfits = [
            batch_id
            for batch_id, handout in sorted(self.delivery.returned.items())
            if handout.num_sequences != self.batch_size
        ]
        groups = [group for batch_id in misfits for group in self.delivery.dissolve(batch_id)]
        if groups:
            self.queue.restore_front(groups)

    def _start(self, record: records.TrainerStarted) -> None:
        if record.epoch == self.epoch:
            self.is_started = True

    def _register_env(self, record: records.EnvRegistered) -> None:
        if record.env_id == len(self.envs):
            self.envs.add(RegisterEnv(**record.request), now=record.at)

    def _disconnect_env(self, record: records.EnvDisconnected) -> None:
        env = self.envs.find(record.env_id)
        if env is not None:
            self.envs.connect(env, False, is_expired=record.is_expired)

    def _revive_env(self, record: records.EnvRevived) -> None:
        env = self.envs.find(record.env_id)
        if env is not None and env.is_expired:
            env.last_seen = max(env.last_seen, record.at)
            self.envs.connect(env, True)

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
        self.delivery.hand_out(
            groups, owner=record.owner, at=record.at, lease_until=record.lease_until
        )
        self.counters["batches/formed"] += 1

    def _hand_out_again(self, record: records.BatchHandedOut) -> None:
        self.delivery.hand_out_again(
            BatchToken(record.batch_id, record.attempt),
            owner=record.owner,
            at=record.at,
            lease_until=record.lease_until,
        )

    def _acknowledge(self, record: records.BatchAcknowledged) -> None:
        handout = self.delivery.acknowledge(BatchToken(record.batch_id, record.attempt))
        if handout is None:
            return
        self.step += 1
        self.counters["batches/delivered"] += 1
        self.counters["groups/delivered"] += len(handout.groups)
        self.counters["sequences/delivered"] += handout.num_sequences
        self.counters["tokens/delivered"] += sum(group.num_tokens for group in handout.groups)
        self.payloads.note_delivered(handout.groups)

    def _take_back(self, record: records.BatchesReturned) -> None:
        for batch_id, attempt in record.handouts:
            if self.delivery.give_back(BatchToken(batch_id, attempt)) is not None:
                self.counters["batches/returned"] += 1
                self.counters[f"batches/returned_{record.reason}"] += 1
        self._dissolve_misfits()

    def _set_policy_version(self, record: records.PolicyVersionSet) -> None:
        if record.epoch == self.epoch:
            self.policy_version = record.version

    def _reset(self, record: records.RunReset) -> None:
        self.epoch += 1
        forgotten = [group.group_id for group in self.queue]
        forgotten += [group.group_id for env in self.envs for group in env.buffer]
        forgotten += [i for handout in self.delivery.pending() for i in handout.group_ids]
        self.payloads.forget(forgotten)
        self.registration = None
        self.run_id = None
        self.started_at = None
        self.envs.clear()
        self.queue.clear()
        self.delivery.clear()
        self.keys.clear()
        self.step = 0
        self.is_started = False
        self.policy_version = None
        self.trainer_ids.clear()
