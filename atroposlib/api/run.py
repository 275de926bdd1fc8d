"""One run as the service runs it: decides on the state, writes records, answers when they are safe.

    route ──► Run ──► a desk ── decide ──► RunLog ── append ──► store
                        ▲                    │ apply, in log order, also what other replicas wrote
                        └───── RunState ◄────┘

The desks: `EnvDesk` for environments, `AdmissionDesk` for groups that come, `DeliveryDesk` for
batches that leave.

Nothing here changes the state except through the log. Coroutines wait for the store; cancelling one
leaves the run whole: what was to be written is written in full or not at all, and a batch handed
out to a caller that is gone goes back to the front.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

from atroposlib.api import records
from atroposlib.api.admission import (
    Admission,
    BusyError,
    KeyReusedError,
    OversizedGroupError,
    QueueFullError,
    RunLimits,
)
from atroposlib.api.delivery import AckResult, Handout
from atroposlib.api.env_registry import EnvRecord
from atroposlib.api.env_view import EnvView
from atroposlib.api.presence import Presence
from atroposlib.api.records import PayloadFlaw, Record, ReturnReason
from atroposlib.api.run_admission import AdmissionDesk
from atroposlib.api.run_delivery import DeliveryDesk
from atroposlib.api.run_envs import EnvDesk
from atroposlib.api.run_log import RunLog
from atroposlib.api.run_state import RunState
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.stall_watch import StallWatch
from atroposlib.api.stalls import Stall
from atroposlib.api.store.base import DamagedPayloadError, RunStore, StoreFullError
from atroposlib.errors import ConfigError
from atroposlib.utils.steady_clock import steady_clock
from atroposlib.wire import DecodedGroup, StoredPayload

__all__ = ["RegistrationConflictError", "Run"]

logger = logging.getLogger(__name__)

CONSUMER_PATIENCE_S = 30.0
"""Seconds without a request for a batch after which another consumer may replace one."""


class RegistrationConflictError(ConfigError):
    """A trainer registered settings that differ from those of the running run."""


class Run:
    """One run of one trainer with any number of environments, served by this replica.

    Args:
        store: where the run lives; opened by `open`, closed by `close`.
        limits: what the run may hold.
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
        """What this process counted beside the run's own `state.counters`, e.g. refusals."""
        self.on_handed_out: Callable[[Handout], None] = lambda handout: None
        """Told of every batch this process hands out; must not raise."""
        self._clock = clock = clock or steady_clock()
        self._log = RunLog(store, self.state, on_applied=self._on_applied)
        self._presence = Presence(self.state, expiry_s=self.limits.env_expiry_s)
        self._envs = EnvDesk(
            self._log, self.state, store, self._presence, limits=self.limits, clock=clock
        )
        self._admissions = AdmissionDesk(
            self._log, self.state, store, limits=self.limits, clock=clock
        )
        self._stalls = StallWatch(self.state, self._presence, clock=clock)
        self._deliveries = DeliveryDesk(
            self._log,
            self.state,
            store,
            replica=replica,
            report_stall=self._stalls.report,
            limits=self.limits,
            clock=clock,
        )
        self._consumer_asked_at: float | None = None
        self._opening = asyncio.Lock()
        self._is_open = False
        self.is_new = True
        """Whether nothing was written to this run before it was opened here."""

    async def open(self) -> None:
        """Load the run, and take back what this replica was sending when it ended; idempotent.

        Raises:
            ConfigError: the store cannot be used, or holds what this version cannot read.
        """
        if self._is_open:
            return
        async with self._opening:
            if self._is_open:
                return
            await self._log.open()
            self.is_new = self._log.is_new
            self._presence.start(self._clock())
            self._deliveries.start()
            self._is_open = True
            await self._return_orphans(is_start=True)

    @property
    def now(self) -> float:
        """Unix time in seconds, by the clock of this run."""
        return self._clock()

    def stop_waiting(self) -> None:
        """Answer everybody who waits for a batch, or begins to, that there is none."""
        self._deliveries.stop_waiting()

    async def close(self) -> None:
        """Finish what is under way and close the store."""
        await self._deliveries.close()
        await self.store.close()

    @property
    def failure(self) -> ConfigError | None:
        """Why the run cannot go on; None as long as it can."""
        return self._log.failure

    @property
    def full_reason(self) -> str | None:
        """Why the store rejects new groups; None while it accepts them."""
        return self.store.full_reason

    async def register_trainer(self, registration: Registration) -> int:
        """Start a run, or join the running one with the same settings.

        The first registration always starts a run; groups that arrived earlier stay queued. A
        later one may differ in `starting_step` only, unless it asks to `replace` the settings, or
        finds a consumer in the trainer's place.

        Returns:
            A random 128-bit id.

        Raises:
            RegistrationConflictError: the settings differ, or there is no place for a consumer;
                the message says which.
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
        """Free the place of a tool that ends; False when it does not hold it.

        Args:
            consumer: the id it was given, a decimal number.
        """
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

    def hear_consumer(self) -> None:
        """Take note that the consumer has asked for a batch."""
        self._consumer_asked_at = self._clock()

    @property
    def consumer_idle_s(self) -> float | None:
        """Seconds since the consumer asked for a batch; None when it never did."""
        asked_at = self._consumer_asked_at
        return None if asked_at is None else max(0.0, self._clock() - asked_at)

    def _refuse_consumer(self) -> None:
        """Raise when a trainer, or another consumer that is at work, has the place."""
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
        """Add an environment to the run; None while there is no trainer asking for batches."""
        return await self._envs.register(request)

    async def disconnect_env(self, env_id: int) -> bool:
        """Note that an environment signed off; False when nobody is registered under the id."""
        return await self._envs.disconnect(env_id)

    async def view_for(self, env_id: int) -> EnvView | None:
        """Return what one environment needs to know; see `EnvDesk.view_for`."""
        return await self._envs.view_for(env_id)

    async def admit(
        self, groups: Sequence[DecodedGroup], *, key: str | None = None, digest: int = 0
    ) -> Admission:
        """Store groups, all or none, then queue or buffer each in order.

        Arguments, result and errors are those of `AdmissionDesk.admit`.
        """
        await self.open()
        for env_id in {group.env_id for group in groups}:
            await self._envs.hear(env_id)
        try:
            admission = await self._admissions.admit(groups, key=key, digest=digest)
        except QueueFullError:
            self.counters["groups/refused_queue_full"] += 1
            raise
        except StoreFullError:
            self.counters["groups/refused_store_full"] += 1
            raise
        except OversizedGroupError:
            self.counters["groups/refused_oversized"] += 1
            raise
        except KeyReusedError:
            self.counters["groups/refused_key_reused"] += 1
            raise
        self.counters["requests/repeated"] += admission.is_repeat
        return admission

    async def next_batch(
        self, *, lease_s: float | None = None, wait_s: float = 0.0
    ) -> tuple[Handout, list[StoredPayload]] | None:
        """Hand out the oldest batch that can be formed; see `DeliveryDesk.next_batch`."""
        try:
            found = await self._deliveries.next_batch(lease_s=lease_s, wait_s=wait_s)
        except BusyError:
            self.counters["requests/refused_busy"] += 1
            raise
        if found is not None:
            self.on_handed_out(found[0])
        return found

    async def acknowledge(self, handout_token: str, *, steps_done: int | None = None) -> AckResult:
        """Count a batch as delivered: `acked`, `repeated`, `expired` or `unknown`.

        Arguments are those of `DeliveryDesk.acknowledge`.
        """
        result = await self._deliveries.acknowledge(handout_token, steps_done=steps_done)
        await self._log.discard()
        return result

    async def give_back(self, handout_token: str, *, reason: ReturnReason = "lost") -> AckResult:
        """Let a batch leave again with the next call: `returned`, or what hinders it."""
        return await self._deliveries.give_back(handout_token, reason=reason)

    async def set_aside(self, handout_token: str, flaws: Mapping[int, PayloadFlaw]) -> AckResult:
        """Remove groups of a batch from the run; see `DeliveryDesk.set_aside`."""
        return await self._deliveries.set_aside(handout_token, flaws)

    async def set_policy_version(self, version: int) -> None:
        """Note which policy the trainer serves now."""
        await self._log.append(records.PolicyVersionSet(self.state.epoch, version))

    def stalls(self) -> list[Stall]:
        """Name what keeps queued groups from becoming a batch."""
        # A consumer takes groups of every size.
        return [] if self.state.consumer is not None else self._stalls.find_all()

    async def payload(self, group_id: int) -> StoredPayload | None:
        """Return the bytes of a group that waits or was delivered lately.

        None when it is gone, or its payload is missing or damaged.
        """
        group = self.state.find_group(group_id)
        if group is None:
            await self.store.sync()
            group = self.state.find_group(group_id)
        if group is None:
            return None
        try:
            (content,) = await self.store.fetch([group_id], [group.is_payload])
        except (KeyError, DamagedPayloadError):
            return None
        return StoredPayload(group.lane, content)

    async def remove_group(self, group_id: int) -> bool:
        """Take a group that is queued or buffered out of the run; False when none is."""
        await self.open()
        await self.store.sync()

        def decide() -> tuple[Record | None, bool]:
            if not self.state.is_waiting(group_id):
                return None, False
            return records.GroupsRemoved([group_id], self._clock()), True

        is_removed = await self._log.guarded(decide)
        if is_removed:
            logger.warning("group %d was removed", group_id)
            await self._log.discard()
        return is_removed

    async def reset(self) -> None:
        """Forget everything: registration, environments, groups, batches and the step."""
        await self.open()
        await self._log.guarded(lambda: (records.RunReset(self._clock()), None))
        await self._log.discard()

    async def tick(self) -> None:
        """Do what time brings; call about once a second.

        Learns what other replicas did, takes back batches whose lease or sender is gone, notes
        which environments are there, forgets payloads, and shortens the log.
        """
        await self.store.sync()
        self._log.check()
        await self._deliveries.settle_owed()
        await self._deliveries.return_expired()
        await self._return_orphans(is_start=False)
        await self._envs.watch()
        await self._log.discard()
        await self._log.compact_if_due()

    async def _return_orphans(self, *, is_start: bool) -> None:
        alive = await self.store.alive_replicas()
        await self._deliveries.return_orphans(alive, is_start=is_start)

    def _on_applied(self, record: Record) -> None:
        self._admissions.note(record)
        self._deliveries.note(record)
        self._presence.note_record(record, self._clock())
        self._deliveries.wake()


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
