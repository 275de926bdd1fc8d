"""The state of one run: registration, environments, queue, step; no HTTP, no globals.

Invariants: a group is in the store before it is in the queue or a buffer, and leaves the store only
after its batch was acknowledged; the step grows by one per acknowledged batch and by nothing else.
Everything between two awaits is one step for other requests, so no lock is needed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import uuid4

from atroposlib.api.allocation import env_weight, queue_view, unallocated_fraction
from atroposlib.api.delivery import Delivery, Handout
from atroposlib.api.env_registry import EnvRecord, EnvRegistry
from atroposlib.api.queue import GroupQueue, QueuedGroup
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.stalls import Stall, find_stalls
from atroposlib.api.store.base import GroupStore, StoredGroup
from atroposlib.errors import ConfigError
from atroposlib.wire import DecodedGroup

__all__ = ["EnvView", "Placement", "RegistrationConflictError", "RunState"]

logger = logging.getLogger(__name__)

_KEPT_TRAINER_IDS = 256


class RegistrationConflictError(ConfigError):
    """A trainer registered settings that differ from those of the running run."""


class Placement(NamedTuple):
    """Where a posted group went."""

    buffered_sequences: int | None
    """Sequences left in the sender's buffer; None when the group went straight to the queue."""


class EnvView(NamedTuple):
    """The service as one environment sees it; every key of `GET /status-env`."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class RunState:
    """One run of one trainer with any number of environments."""

    def __init__(self, store: GroupStore, *, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.registration: Registration | None = None
        self.envs = EnvRegistry()
        self.queue = GroupQueue()
        self.delivery = Delivery()
        self.step = 0
        self.is_started = False
        """Whether the trainer has asked for a batch; environments wait until it has."""
        self.trainer_ids: deque[int] = deque(maxlen=_KEPT_TRAINER_IDS)
        self.latest_payload: bytes | None = None
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._next_group_id = 0
        self._num_resets = 0
        self._last_stall = ""

    @property
    def _batch_size(self) -> int:
        return self.registration.batch_size if self.registration else 0

    def register_trainer(self, registration: Registration) -> int:
        """Start a run, or join the running one with the same settings.

        The first registration always starts a run; groups that arrived earlier stay queued. A
        later one may differ in `starting_step` only, unless it asks to `replace` the settings.

        Returns:
            A random 128-bit id.

        Raises:
            RegistrationConflictError: the settings differ; the message names both values.
        """
        if self.registration is None or registration.replace:
            self.registration = registration
            self.step = registration.starting_step
        else:
            _refuse(self.registration.differences(registration))
        trainer_id = uuid4().int
        self.trainer_ids.append(trainer_id)
        return trainer_id

    def register_env(self, request: RegisterEnv) -> EnvRecord | None:
        """Add an environment to the run; None while there is no trainer asking for batches."""
        if self.registration is None or not self.is_started:
            return None
        env = self.envs.add(request, now=self._clock())
        logger.info("environment %d registered as %s", env.env_id, env.real_name)
        return env

    async def admit(self, groups: Sequence[DecodedGroup]) -> list[Placement]:
        """Store groups, all or none, then queue or buffer each in order.

        Waits for the store. Cancelling before it answers admits nothing.
        """
        num_resets = self._num_resets
        stored = [StoredGroup(self._describe(group), group.payload) for group in groups]
        await self.store.append(stored)
        if num_resets != self._num_resets:
            # The run these groups belong to was reset while they were written.
            await self.store.discard([group.entry.group_id for group in stored])
            return [Placement(None) for _ in groups]
        placements, latest = [], None
        for group in stored:
            placement, queued = self._place(group.entry)
            placements.append(placement)
            latest = queued[-1] if queued else latest
        self.counters["groups/received"] += len(groups)
        self.counters["groups/loose"] += sum(group.is_loose for group in groups)
        if latest is not None:
            await self._remember_latest(latest, stored)
        return placements

    def _describe(self, group: DecodedGroup) -> QueuedGroup:
        env = self.envs.find(group.env_id)
        entry = QueuedGroup(
            group_id=self._next_group_id,
            env_id=None if env is None else env.env_id,
            num_sequences=group.num_sequences,
            num_tokens=group.num_tokens,
            version=self.step,
        )
        self._next_group_id += 1
        return entry

    def _place(self, entry: QueuedGroup) -> tuple[Placement, list[QueuedGroup]]:
        env = self.envs.find(entry.env_id)
        if env is None or not env.wants_to_buffer(entry.num_sequences):
            self.queue.append(entry)
            return Placement(None), [entry]
        released = env.buffer_group(entry)
        for group in released:
            self.queue.append(group)
        return Placement(env.buffered_sequences), released

    async def _remember_latest(self, entry: QueuedGroup, stored: Sequence[StoredGroup]) -> None:
        payloads = {group.entry.group_id: group.payload for group in stored}
        if entry.group_id not in payloads:
            payloads[entry.group_id] = (await self.store.fetch([entry.group_id]))[0]
        self.latest_payload = payloads[entry.group_id]

    async def next_batch(self) -> tuple[Handout, list[bytes]] | None:
        """Hand out the oldest batch that can be formed, returned ones first.

        Must be followed by `acknowledge` or `give_back`. Waits for the store; a batch whose
        payloads could not be read goes back.

        Returns:
            The handout and its payloads in order of delivery; None when no batch can be formed.
        """
        if self.registration is None:
            return None
        self.is_started = True
        handout = self.delivery.next_returned()
        if handout is None:
            groups = self.queue.take_batch(self.registration.batch_size, self.envs.minimums)
            if groups is None:
                self._report_stall()
                return None
            handout = self.delivery.hand_out(groups)
        try:
            return handout, await self.store.fetch(handout.group_ids)
        except BaseException:
            self.delivery.give_back(handout)
            raise

    async def acknowledge(self, handout: Handout) -> None:
        """Count a batch as delivered and forget its groups; nothing happens after a reset."""
        if not self.delivery.acknowledge(handout):
            return
        self.step += 1
        self.counters["batches/delivered"] += 1
        await self.store.discard(handout.group_ids)

    def give_back(self, handout: Handout) -> None:
        """Queue a batch that did not arrive for delivery to whoever asks next."""
        if self.delivery.give_back(handout):
            self.counters["batches/returned"] += 1
            logger.warning("batch %d did not reach the trainer; it is next", handout.batch_id)

    def view_for(self, env: EnvRecord) -> EnvView:
        """Return what one environment needs to decide how much to produce.

        Remembers the largest group the environment has queued: later answers are in that unit.
        """
        env.largest_group = max(env.largest_group, self.queue.largest_group_of(env.env_id))
        minimums = self.envs.minimums
        pack_size = max(1, self.queue.largest_group)
        view = queue_view(
            env.env_id,
            self.queue.sequences_by_env,
            group_size=env.largest_group,
            pack_size=pack_size,
            batch_size=self._batch_size,
            minimums=minimums,
        )
        return EnvView(
            current_step=self.step,
            queue_size=view.queue_groups,
            unallocated_fraction=unallocated_fraction(minimums),
            self_queue_size=view.own_groups,
            max_group_size=pack_size,
            env_weight=env_weight(env, self.envs),
        )

    def stalls(self) -> list[Stall]:
        """Name what keeps queued groups from becoming a batch."""
        return find_stalls(self.queue, self.envs, batch_size=self._batch_size)

    def _report_stall(self) -> None:
        """Log why enough data makes no batch, once per reason."""
        text = ""
        if self.queue.num_sequences >= self._batch_size:
            text = "; ".join(stall.message for stall in self.stalls())
            text = text or "the sizes of the queued groups do not add up"
        if text and text != self._last_stall:
            logger.warning("no batch of %d sequences: %s", self._batch_size, text)
        self._last_stall = text

    async def reset(self) -> None:
        """Forget everything: registration, environments, groups, batches and the step."""
        self._num_resets += 1
        self.registration = None
        self.envs.clear()
        self.queue.clear()
        self.delivery.clear()
        self.step = 0
        self.is_started = False
        self.trainer_ids.clear()
        self.latest_payload = None
        self._last_stall = ""
        await self.store.clear()


def _refuse(differences: Sequence[str]) -> None:
    if not differences:
        return
    message = (
        f"a trainer is already registered with other settings: {'; '.join(differences)}; "
        "send the same settings to join its run, `replace: true` to change them, "
        "or GET /reset_data to start anew"
    )
    logger.warning("refused a registration: %s", message)
    raise RegistrationConflictError(message)
