"""One run, as the service operates it: decides on the state, writes records, then responds.

    route ──► Run ──► EnvLifecycle, Admissions, Deliveries ── decide ──► RunLog ── append ──► store
                                     ▲                                     │ apply in log order,
                                     └─────────── RunState ◄───────────────┘ also of other replicas

`EnvLifecycle` handles registration and heartbeats of environments, `Admissions` posted groups,
`Deliveries` (in `run_delivery`) batches.

Invariant: the state changes only through the log. Coroutines wait for the store. Cancelling one
leaves the run consistent: a record is written in full or not at all, and a batch delivered to a
cancelled caller returns to the front.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from uuid import uuid4

from atroposlib.api import records
from atroposlib.api.concurrency import divide_sequences
from atroposlib.api.environments import EnvRecord, weight_share
from atroposlib.api.journal import RunLog
from atroposlib.api.queue import (
    UNKNOWN_VERSION,
    AdmittedGroups,
    BusyError,
    KeyReusedError,
    OversizedGroupError,
    QueuedGroup,
    QueueFullError,
    RunLimits,
    Waiting,
    check_room,
    check_sizes,
    checksum_of,
    queue_view,
    room_for,
)
from atroposlib.api.records import (
    BatchFormed,
    EnvDisconnected,
    EnvRegistered,
    EnvRevived,
    EnvsSeen,
    GroupsAdmitted,
    PayloadFlaw,
    Record,
    ReturnReason,
)
from atroposlib.api.run_delivery import Deliveries
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.stalls import Stall, StallWatch
from atroposlib.api.state import (
    AckResult,
    DeliveredBatch,
    GroupState,
    RunState,
    check_key,
    find_group,
)
from atroposlib.api.store.base import DamagedPayloadError, Payload, RunStore, StoreFullError
from atroposlib.api.tickets import Ticket, repeatable_digest
from atroposlib.errors import ConfigError
from atroposlib.wire import DecodedGroup, StoredPayload

logger = logging.getLogger(__name__)


def steady_clock(
    *, unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock of Unix time that does not jump when the system clock is changed.

    It reads Unix time once, at this call, and then advances with the monotonic clock.
    """
    offset = unix() - monotonic()
    return lambda: offset + monotonic()


class EnvView(NamedTuple):
    """The values with which one environment decides how much to produce."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    groups_to_start: int | None = None
    """Groups of its size that it may have in progress; None without a limit."""
    max_running_sequences: int | None = None
    """Sequences that the engines may generate for it at once; None without engines to share."""


def env_view(state: RunState, env: EnvRecord) -> EnvView:
    """Return the view of one environment, in units of the largest group it has queued."""
    pack_size = max(1, state.queue.largest_group)
    group_size = max(env.largest_group, state.queue.largest_group_of(env.env_id))
    held = state.tickets.held_of(env.env_id) if state.tickets.is_used else []
    view = queue_view(
        env.env_id,
        state.queue.sequences_by_env,
        group_size=group_size,
        pack_size=pack_size,
        batch_size=state.batch_size,
        minimums=state.envs.minimums,
    )
    weight = weight_share(env, state.envs.total_weight)
    return EnvView(
        current_step=state.step,
        queue_size=view.queue_groups + len(held),
        unallocated_fraction=state.envs.unallocated_fraction,
        self_queue_size=view.own_groups + len(held),
        max_group_size=pack_size,
        env_weight=weight,
        groups_to_start=_groups_to_start(state, held, weight=weight, group_size=group_size),
    )


def _groups_to_start(
    state: RunState, held: Sequence[QueuedGroup], *, weight: float, group_size: int
) -> int | None:
    """Divide the free space of the queue among environments.

    Of the groups that are held for a ticket, only those of the environment itself, `held`, count:
    it may be the one for whose ticket the others wait.

    If there is any, each environment may start at least one group: rounding shares down to 0 would
    stall a run in which many environments share little space.
    """
    waiting = state.waiting
    if state.tickets.is_used:
        waiting = waiting.plus(state.tickets.waiting, -1).plus(Waiting.of(held))
    room = room_for(
        state.limits,
        waiting=waiting,
        pending_sequences=state.delivery.num_sequences,
        batch_size=state.batch_size,
    )
    if room is None:
        return None
    return max(1, int(room * min(1.0, weight)) // group_size) if room > 0 else 0


_HEARTBEAT_INTERVAL_S = 30.0


class EnvLifecycle:
    """Handles registration, heartbeats and timeouts of the environments of a run.

    Each replica receives requests of some environments. It writes their heartbeats in one record,
    at most every 30 s, so that all replicas agree which environments are silent. Silence is
    measured by the clock of this process, from when it applied the last record that names an
    environment, or a snapshot, because the clocks of other processes may be hours off.
    """

    def __init__(self, log: RunLog, clock: Callable[[], float]) -> None:
        self._log = log
        self._state = log.state
        self._clock = clock
        self._expiry_s = log.state.limits.env_expiry_s
        self._interval_s = min(_HEARTBEAT_INTERVAL_S, self._expiry_s / 4 or _HEARTBEAT_INTERVAL_S)
        self._seen: dict[int, float] = {}
        """Environment id → time of its last request to this process."""
        self._recorded: dict[int, float] = {}
        """Environment id → time at which this process last applied a record that names it."""
        self._epoch = 0
        self._written_at = self._since = 0.0
        self.awaits_trainer = False
        """Whether environments that register wait, as before the first request for a batch."""
        log.on_loaded.append(self._start)

    def _start(self) -> None:
        self._since = self._written_at = self._clock()

    async def register(self, request: RegisterEnv) -> EnvRecord | None:
        """Add an environment to the run; None until a trainer has requested a batch."""

        def decide() -> tuple[Record | None, int | None]:
            has_trainer = self._state.registration is not None and self._state.is_started
            if not has_trainer or self.awaits_trainer:
                return None, None
            if self._has_been_taken_over(request):
                return None, request.env_id
            env_id = len(self._state.envs)
            ordered = self._state.limits.ordered_envs
            return EnvRegistered(env_id, request.model_dump(), self._clock(), ordered), env_id

        env = self._state.envs.find(await self._log.guarded(decide))
        if env is not None:
            logger.info("environment %d registered as %s", env.env_id, env.real_name)
        return env

    def _has_been_taken_over(self, request: RegisterEnv) -> bool:
        """Whether the sender is already registered, in the run that a trainer has taken over."""
        env = self._state.envs.find(request.env_id)
        return (
            env is not None
            and env.is_connected
            and env.desired_name == request.desired_name
            and request.run_id is not None
            and request.run_id == self._state.taken_over_run_id
        )

    async def disconnect(self, env_id: int) -> bool:
        await self._find(env_id)

        def decide() -> tuple[Record | None, bool]:
            if self._state.envs.find(env_id) is None:
                return None, False
            return EnvDisconnected(env_id, False, self._clock()), True

        return await self._log.guarded(decide)

    async def view_for(self, env_id: int) -> EnvView | None:
        """Record a heartbeat and return the view of its environment; None for an unknown id.

        Also records the largest group that the environment has queued, the unit of later views.
        """
        env = await self.record_heartbeat(env_id)
        if env is None:
            return None
        largest = self._state.queue.largest_group_of(env_id)
        env.largest_group = max(env.largest_group, largest)
        return env_view(self._state, env)

    async def record_heartbeat(self, env_id: int | None) -> EnvRecord | None:
        """Record a heartbeat, which reconnects an environment that had timed out.

        Returns:
            The environment; None for an unknown id.
        """
        env = await self._find(env_id)
        if env is None:
            return None
        now = self._clock()
        self._forget_former_epoch()
        self._seen[env.env_id] = now
        if env.is_expired:

            def decide() -> tuple[Record | None, None]:
                found = self._state.envs.find(env_id)
                is_expired = found is not None and found.is_expired
                return EnvRevived(env.env_id, now) if is_expired else None, None

            await self._log.guarded(decide)
            logger.info("environment %d (%s) reconnected", env.env_id, env.real_name)
        return env

    def note(self, record: Record) -> None:
        """Update from an applied record, of any replica."""
        env_ids: Iterable[int | None]
        if isinstance(record, GroupsAdmitted):
            env_ids = {group.env_id for group in record.groups}
        elif isinstance(record, EnvsSeen):
            env_ids = record.seen
        elif isinstance(record, EnvRegistered | EnvRevived):
            env_ids = [record.env_id]
        else:
            return
        self._forget_former_epoch()
        now = self._clock()
        for env_id in env_ids:
            if env_id is not None and self._state.envs.find(env_id) is not None:
                self._recorded[env_id] = now

    def last_heartbeat(self, env_id: int) -> float:
        """Return the time of the last heartbeat of an environment, by the clock of this process."""
        self._forget_former_epoch()
        return max(self._recorded.get(env_id, 0.0), self._seen.get(env_id, 0.0), self._since)

    async def watch(self) -> None:
        """Write heartbeats if due, and disconnect environments that timed out."""
        seen = self._heartbeats_due(self._clock())
        if seen is not None:
            await self._log.append(seen)

        def decide() -> tuple[Record | None, int | None]:
            now = self._clock()
            for env in self._state.envs if self._expiry_s else ():
                if env.is_connected and now - self.last_heartbeat(env.env_id) > self._expiry_s:
                    return EnvDisconnected(env.env_id, True, now), env.env_id
            return None, None

        while (env_id := await self._log.guarded(decide)) is not None:
            logger.warning(
                "environment %d sent no request for %g s and counts as disconnected",
                env_id,
                self._expiry_s,
            )

    def _heartbeats_due(self, now: float) -> EnvsSeen | None:
        if now - self._written_at < self._interval_s:
            return None
        self._written_at = now
        self._forget_former_epoch()
        seen = {
            env_id: at
            for env_id, at in self._seen.items()
            if at > self._recorded.get(env_id, 0.0) and self._state.envs.find(env_id) is not None
        }
        return EnvsSeen(self._state.epoch, seen) if seen else None

    def _forget_former_epoch(self) -> None:
        if self._epoch != self._state.epoch:
            self._seen.clear()
            self._recorded.clear()
            self._epoch = self._state.epoch

    async def _find(self, env_id: int | None) -> EnvRecord | None:
        """Find an environment; if its id is unknown, apply the records of other replicas first."""
        if env_id is not None and self._state.envs.find(env_id) is None:
            await self._log.store.sync()
        return self._state.envs.find(env_id)


_DEMAND_S = 30.0
_DIVIDE_S = 0.5


class EngineShares:
    """Divides the sequences of the engines among the connected environments of a run.

    An environment reports how many sequences it runs with its status requests; it may use a quarter
    more and one group. Without a report in the last half minute it may use any number.

    Args:
        state: the run.
        limit: returns the sequences of all engines.
        clock: seconds.
    """

    def __init__(
        self, state: RunState, limit: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._limit = limit
        self._clock = clock
        self._running: dict[int, tuple[float, int]] = {}
        """Environment id → time and number of its last report."""
        self._parts: dict[int, int] = {}
        self._divided_at = 0.0

    def of(self, env_id: int, *, running_sequences: int | None = None) -> int:
        """Return the part of one environment, which may report what it runs."""
        now = self._clock()
        if running_sequences is not None:
            self._running[env_id] = (now, running_sequences)
        if env_id not in self._parts or not 0 <= now - self._divided_at < _DIVIDE_S:
            self._divide(now)
        return self._parts.get(env_id, 1)

    def _divide(self, now: float) -> None:
        # O(environments), hence not at every request.
        envs = {env.env_id: env for env in self._state.envs if env.is_connected}
        total = self._state.envs.total_weight
        self._running = {
            env_id: report
            for env_id, report in self._running.items()
            if env_id in envs and now - report[0] < _DEMAND_S
        }
        self._parts = divide_sequences(
            self._limit(),
            {env_id: weight_share(env, total) for env_id, env in envs.items()},
            {
                env_id: 1.25 * number + max(envs[env_id].largest_group, 1)
                for env_id, (_, number) in self._running.items()
            },
        )
        self._divided_at = now


_MAX_DIGEST = (1 << 64) - 1
_RETRY_AFTER_BOUNDS_S = (1.0, 30.0)
_RETRY_AFTER_S = 5.0


class Admissions:
    """Admits groups to a run.

    Invariant: groups that are being written count as waiting, so that concurrent requests cannot
    exceed a limit together.
    """

    def __init__(self, log: RunLog, clock: Callable[[], float]) -> None:
        self._log = log
        self._state = log.state
        self._clock = clock
        self._arriving = Waiting(0, 0)
        self._formed_at = (0.0, 0.0)
        """Times at which the last two batches were formed."""

    def note(self, record: Record) -> None:
        """Update the rate of batches from an applied record."""
        if isinstance(record, BatchFormed):
            self._formed_at = (self._formed_at[1], record.at)

    async def admit(
        self,
        groups: Sequence[DecodedGroup],
        *,
        key: str | None = None,
        digest: int = 0,
        ticket: Ticket | None = None,
    ) -> AdmittedGroups:
        """Store groups, all or none, then queue or buffer each in order.

        If cancelled, either all groups are admitted or none.

        Args:
            groups: the groups of one request.
            key: idempotency key of the request; if it was used before, nothing is stored and the
                earlier result is returned.
            digest: digest of the body, to distinguish a repetition from another use of the key; the
                lowest 64 bits count.
            ticket: ticket of the rollout; its groups are held until its turn.

        Raises:
            GroupError: the key or the ticket is invalid.
            KeyReusedError: the key was used for another body.
            OversizedGroupError: a group holds more than a batch; nothing is stored.
            QueueFullError: the queue is full; retry after `retry_after_s`.
        """
        digest &= _MAX_DIGEST
        repeated = self._find_repeated(key, digest)
        if repeated is not None or not groups:
            return repeated or AdmittedGroups([])
        is_exact = self._state.consumer is None  # a consumer accepts groups of any size
        check_sizes(
            (group.num_sequences for group in groups),
            batch_size=self._state.batch_size if is_exact else 0,
        )
        arriving = Waiting(
            sum(group.num_sequences for group in groups), sum(len(g.payload) for g in groups)
        )
        waiting, needed = self._state.waiting, arriving
        if ticket is not None:
            waiting, needed = self._state.tickets.counted(ticket, waiting, arriving)
        check_room(
            self._state.limits,
            waiting=waiting.plus(self._arriving),
            arriving=needed,
            retry_after_s=self._retry_after_s(),
        )
        self._arriving = self._arriving.plus(arriving)
        try:
            return await self._admit(groups, key, digest, ticket)
        finally:
            self._arriving = self._arriving.plus(arriving, -1)

    async def _admit(
        self,
        groups: Sequence[DecodedGroup],
        key: str | None,
        digest: int,
        ticket: Ticket | None,
    ) -> AdmittedGroups:
        contents: list[int] = []
        if ticket is not None:
            self._state.tickets.check(ticket)
            contents = await asyncio.to_thread(lambda: list(map(repeatable_digest, groups)))
        group_ids = await self._log.store.new_group_ids(len(groups))
        now = self._clock()
        record = GroupsAdmitted(
            epoch=self._state.epoch,
            groups=[self._describe(i, g, now) for i, g in zip(group_ids, groups, strict=True)],
            at=now,
            num_loose=sum(group.is_loose for group in groups),
            num_from_text=sum(group.is_from_text for group in groups),
            key=key,
            digest=digest,
            ticket=None if ticket is None else ticket.number,
            contents=contents,
        )
        payloads = [Payload(i, g.payload) for i, g in zip(group_ids, groups, strict=True)]
        admission = await self._log.append_groups(record, payloads)
        if admission.is_key_reused:
            raise _key_reused(key)
        return admission

    def _describe(self, group_id: int, group: DecodedGroup, now: float) -> QueuedGroup:
        env = self._state.envs.find(group.env_id)
        version = group.policy_version
        if version is None:
            # The batches of a consumer are not steps of a policy.
            version = self._state.current_version if self._state.has_trainer else UNKNOWN_VERSION
        return QueuedGroup(
            group_id=group_id,
            env_id=None if env is None else env.env_id,
            num_sequences=group.num_sequences,
            num_tokens=group.num_tokens,
            num_bytes=len(group.payload),
            wire_format=group.wire_format,
            version=version,
            received_at=now,
            min_score=group.min_score,
            max_score=group.max_score,
            checksum=checksum_of(group.payload),
            traceparent=group.traceparent,
        )

    def _find_repeated(self, key: str | None, digest: int) -> AdmittedGroups | None:
        if key is None:
            return None
        check_key(key)
        known = self._state.keys.find(key)
        if known is None:
            return None
        if known.digest != digest:
            raise _key_reused(key)
        return AdmittedGroups(known.placements, is_repeat=True)

    def _retry_after_s(self) -> float:
        """Estimate the seconds until the trainer takes the next batch."""
        before, last = self._formed_at
        if not before:
            return _RETRY_AFTER_S
        low, high = _RETRY_AFTER_BOUNDS_S
        return float(min(high, max(low, round(last - before))))


def _key_reused(key: str | None) -> KeyReusedError:
    return KeyReusedError(
        f"the idempotency key {key!r} was used for another body; a new request needs a new key",
        status=422,
    )


_REFUSALS: Mapping[type[Exception], str] = {
    QueueFullError: "queue_full",
    StoreFullError: "store_full",
    OversizedGroupError: "oversized",
    KeyReusedError: "key_reused",
}
"""Reason of a rejection in the name of its counter, by error class."""

CONSUMER_PATIENCE_S = 30.0
"""Seconds without a request for a batch after which another consumer may replace a consumer."""


class RegistrationConflictError(ConfigError):
    """A registration conflicts with the settings, or the trainer, of the running run."""


class Run:
    """One run of one trainer with any number of environments, served by this replica.

    Args:
        store: store of the run; opened by `open`, closed by `close`.
        limits: limits of the run.
        replica: name of this process among those that serve the run.
        clock: Unix time in seconds; it must not jump. By default a `steady_clock`.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        limits: RunLimits | None = None,
        replica: str = "",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.limits = limits or RunLimits()
        self.replica = replica
        self.state = RunState(self.limits)
        self.counters: Counter[str] = Counter()
        """Counters of this process, such as rejected requests; `state` has those of the run."""
        self.on_delivered: Callable[[DeliveredBatch], None] = lambda batch: None
        """Called with every batch that this process delivers; must not raise."""
        self.engine_shares: EngineShares | None = None
        """Parts of the engines; None: no limit."""
        self.on_applied: Callable[[Record], None] | None = None
        """Called after every record, also those of other replicas; must not raise."""
        self._clock = clock = clock or steady_clock()
        self._log = RunLog(store, self.state, on_applied=self._on_applied)
        self._envs = EnvLifecycle(self._log, clock)
        self._admissions = Admissions(self._log, clock)
        self._stalls = StallWatch(self.state, self._envs.last_heartbeat, clock=clock)
        self._deliveries = Deliveries(
            self._log, clock, replica=replica, report_stall=self._stalls.report
        )
        self._consumer_asked_at: float | None = None
        self._blocking: tuple[Ticket | None, float] = (None, 0.0)
        """The ticket for which groups are held, and since when, by the clock of this process."""
        self._opening = asyncio.Lock()
        self._is_open = False
        self.is_new = True
        """Whether the run had no records before it was opened here."""

    async def open(self) -> None:
        """Load the run and return batches that this replica was sending when it ended; idempotent.

        Raises:
            ConfigError: the store cannot be used, or its format is unknown to this version.
        """
        if self._is_open:
            return
        async with self._opening:
            if self._is_open:
                return
            await self._log.open()
            self.is_new = self._log.is_new
            self._deliveries.start()
            # The engines of a run that is continued may have other weights until its trainer
            # requests a batch. With several replicas, it may have done so at another one.
            is_shared = await self.store.alive_replicas() is not None
            self._envs.awaits_trainer = not (self.is_new or is_shared)
            self._is_open = True
            await self._return_orphans()

    @property
    def now(self) -> float:
        return self._clock()

    def stop_waiting(self) -> None:
        self._deliveries.stop_waiting()

    async def close(self) -> None:
        """Finish pending work and close the store."""
        await self._deliveries.close()
        await self.store.close()

    @property
    def failure(self) -> ConfigError | None:
        return self._log.failure

    @property
    def full_reason(self) -> str | None:
        return self.store.full_reason

    async def register_trainer(self, registration: Registration) -> int:
        """Start a run, or join the running one with the same settings.

        The first registration always starts a run; groups that arrived earlier stay queued. A later
        one may differ in `starting_step` only, unless it has `replace` set or replaces a consumer.

        Returns:
            A random 128-bit id.

        Raises:
            RegistrationConflictError: the settings differ, or a consumer may not register now.
        """
        await self.open()
        trainer_id = uuid4()
        replaced: str | None = None

        def decide() -> tuple[Record, int]:
            nonlocal replaced
            current = self.state.registration
            replaced = self.state.consumer
            if registration.consumer is not None:
                self._refuse_consumer()
            elif current is not None and replaced is None and not registration.replace:
                _refuse(current.differences(registration))
            settings = registration.model_dump()
            record = records.TrainerRegistered(settings, trainer_id.hex, self._clock())
            return record, trainer_id.int

        number = await self._log.guarded(decide)
        self._consumer_asked_at = None
        if replaced is not None:
            by = registration.consumer or "a trainer"
            logger.info("%s has registered in place of %s", by, replaced)
        elif registration.consumer is not None:
            logger.info("%s stands in for a trainer until one registers", registration.consumer)
        return number

    async def release_consumer(self, consumer: str) -> bool:
        """Unregister a consumer by its id, a decimal number; False if it is not registered."""
        await self.open()

        def decide() -> tuple[Record | None, bool]:
            if not self.state.is_consumer(consumer):
                return None, False
            return records.ConsumerLeft(f"{int(consumer):x}", self._clock()), True

        name = self.state.consumer
        has_left = await self._log.guarded(decide)
        if has_left:
            logger.info("%s has ended; no trainer is registered", name)
        return has_left

    def note_consumer_request(self) -> None:
        self._consumer_asked_at = self._clock()

    @property
    def consumer_idle_s(self) -> float | None:
        """Seconds since the consumer last requested a batch; None if it has not requested one."""
        asked_at = self._consumer_asked_at
        return None if asked_at is None else max(0.0, self._clock() - asked_at)

    def _refuse_consumer(self) -> None:
        """Raise if a trainer or another active consumer is registered."""
        if self.state.registration is None:
            return
        if self.state.consumer is None:
            raise RegistrationConflictError(
                "a trainer is registered, and takes the groups; a consumer can only look at them"
            )
        idle_s = self.consumer_idle_s
        if idle_s is not None and idle_s < CONSUMER_PATIENCE_S:
            raise RegistrationConflictError(
                f"{self.state.consumer} already takes the groups of this run (it asked for a batch "
                f"{idle_s:.0f} s ago); stop it first, or only look at the groups"
            )

    async def register_env(self, request: RegisterEnv) -> EnvRecord | None:
        return await self._envs.register(request)

    def awaits_tickets_of(self, env: EnvRecord) -> bool:
        """Whether an environment must number its rollouts, from 0."""
        return self.state.tickets.is_used and not self.state.tickets.has_joined(env.env_id)

    async def disconnect_env(self, env_id: int) -> bool:
        return await self._envs.disconnect(env_id)

    def share_engines(self, limit: Callable[[], int]) -> None:
        """Divide sequences among environments from now on; `limit` returns their number."""
        self.engine_shares = EngineShares(self.state, limit, self._clock)

    async def view_for(
        self, env_id: int, *, running_sequences: int | None = None
    ) -> EnvView | None:
        view = await self._envs.view_for(env_id)
        if view is None or self.engine_shares is None:
            return view
        part = self.engine_shares.of(env_id, running_sequences=running_sequences)
        return view._replace(max_running_sequences=part)

    async def admit(
        self,
        groups: Sequence[DecodedGroup],
        *,
        key: str | None = None,
        digest: int = 0,
        ticket: Ticket | None = None,
    ) -> AdmittedGroups:
        """Store groups, all or none; see `Admissions.admit`. A ticket without groups is returned.

        A ticket is ignored unless all groups are of its environment and admission is by tickets.
        """
        await self.open()
        for env_id in {group.env_id for group in groups}:
            await self._envs.record_heartbeat(env_id)
        ticket = self._valid_ticket(ticket, groups)
        if ticket is not None and not groups:
            await self._return_ticket(ticket, is_expired=False)
        try:
            admission = await self._admissions.admit(groups, key=key, digest=digest, ticket=ticket)
        except tuple(_REFUSALS) as error:
            reason = next(name for kind, name in _REFUSALS.items() if isinstance(error, kind))
            self.counters[f"groups/refused_{reason}"] += 1
            raise
        self.counters["requests/repeated"] += admission.is_repeat
        return admission

    def _valid_ticket(self, ticket: Ticket | None, groups: Sequence[DecodedGroup]) -> Ticket | None:
        if ticket is None or not self.state.tickets.is_used:
            return None
        is_known = self.state.envs.find(ticket.env_id) is not None
        is_own = all(group.env_id == ticket.env_id for group in groups)
        return ticket if is_known and is_own else None

    async def _return_ticket(self, ticket: Ticket, *, is_expired: bool) -> None:
        self.state.tickets.check(ticket)
        epoch, now = self.state.epoch, self._clock()
        await self._log.append(records.TicketReturned(epoch, *ticket, is_expired, now))

    async def _expire_ticket(self) -> None:
        """Return the ticket for which groups have been held for `ordered_wait_s`."""
        blocking = self.state.tickets.blocking
        if blocking is None or blocking != self._blocking[0]:
            self._blocking = (blocking, self._clock())
            return
        waited_s = self._clock() - self._blocking[1]
        if 0 < self.limits.ordered_wait_s <= waited_s:
            logger.warning(
                "groups were held for %.0f s for ticket %s; it has expired", waited_s, blocking
            )
            await self._return_ticket(blocking, is_expired=True)

    async def next_batch(
        self, *, lease_s: float | None = None, wait_s: float = 0.0, key: str | None = None
    ) -> tuple[DeliveredBatch, list[StoredPayload]] | None:
        """Deliver the oldest batch that can be formed; see `Deliveries.next_batch`."""
        self._envs.awaits_trainer = False
        try:
            found = await self._deliveries.next_batch(lease_s=lease_s, wait_s=wait_s, key=key)
        except BusyError:
            self.counters["requests/refused_busy"] += 1
            raise
        if found is not None:
            self.on_delivered(found[0])
        return found

    async def acknowledge(self, token: str, *, steps_done: int | None = None) -> AckResult:
        """Acknowledge a batch and discard its groups; see `Deliveries.acknowledge`."""
        result = await self._deliveries.acknowledge(token, steps_done=steps_done)
        await self._log.discard()
        return result

    async def return_batch(self, token: str, *, reason: ReturnReason = "lost") -> AckResult:
        return await self._deliveries.return_batch(token, reason=reason)

    async def set_aside(self, token: str, flaws: Mapping[int, PayloadFlaw]) -> AckResult:
        return await self._deliveries.set_aside(token, flaws)

    async def set_policy_version(self, version: int) -> None:
        await self._log.append(records.PolicyVersionSet(self.state.epoch, version))

    def stalls(self) -> list[Stall]:
        """Return the reasons why queued groups do not form a batch."""
        # A consumer accepts groups of any size.
        return [] if self.state.consumer is not None else self._stalls.find_all()

    async def payload(self, group_id: int) -> StoredPayload | None:
        """Return the bytes of a group that waits or was delivered recently.

        None if it is no longer kept, or its payload is missing or damaged.
        """
        group = self._find_group(group_id)
        if group is None:
            await self.store.sync()
            group = self._find_group(group_id)
        if group is None:
            return None
        try:
            (content,) = await self.store.fetch([group_id], [group.is_payload])
        except (KeyError, DamagedPayloadError):
            return None
        return StoredPayload(group.wire_format, content)

    def _find_group(self, group_id: int) -> QueuedGroup | None:
        """Return a group whose payload the store has, in any state."""
        latest = self.state.latest
        if latest is not None and latest.group_id == group_id:
            return latest
        found = find_group(self.state, group_id)
        return None if found is None else found[0]

    async def remove_group(self, group_id: int) -> bool:
        """Remove a queued or buffered group from the run; False if there is none."""
        await self.open()
        await self.store.sync()

        def decide() -> tuple[Record | None, bool]:
            found = find_group(self.state, group_id)
            if found is None or found[1] not in (GroupState.QUEUED, GroupState.BUFFERED):
                return None, False
            return records.GroupsRemoved([group_id], self._clock()), True

        is_removed = await self._log.guarded(decide)
        if is_removed:
            logger.warning("group %d was removed", group_id)
            await self._log.discard()
        return is_removed

    async def reset(self) -> None:
        """Delete everything: registration, environments, groups, batches and the step."""
        await self.open()
        await self._log.guarded(lambda: (records.RunReset(self._clock()), None))
        await self._log.discard()

    async def tick(self) -> None:
        """Run periodic work; call about once a second.

        Applies records of other replicas, returns batches whose lease expired or whose replica has
        stopped, writes heartbeats, discards payloads, and compacts the log.
        """
        await self.store.sync()
        self._log.check()
        await self._deliveries.settle_unwritten()
        await self._deliveries.return_expired()
        await self._return_orphans()
        await self._envs.watch()
        await self._expire_ticket()
        await self._log.discard()
        await self._log.compact_if_due()

    async def _return_orphans(self) -> None:
        await self._deliveries.return_orphans(await self.store.alive_replicas())

    def _on_applied(self, record: Record) -> None:
        self._admissions.note(record)
        self._deliveries.note(record)
        self._envs.note(record)
        self._deliveries.wake()
        if self.on_applied is not None:
            self.on_applied(record)


def _refuse(differences: Sequence[str]) -> None:
    if not differences:
        return
    message = (
        f"a trainer is already registered with other settings: {'; '.join(differences)}; "
        "send the same settings to join its run, `replace: true` to take it over with these "
        "(--replace-run of the trainer), or start another run of run-api"
    )
    logger.warning("refused a registration: %s", message)
    raise RegistrationConflictError(message)
