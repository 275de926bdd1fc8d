"""Whatever clients do in whatever order, queue and leases of a run are those of a small model."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from atroposlib.api import journal as run_log
from atroposlib.api.queue import (
    BusyError,
    KeyReusedError,
    OversizedGroupError,
    QueueFullError,
    RunLimits,
)
from atroposlib.api.run import Run
from atroposlib.api.store.open import open_store
from tests.adversary.test_apply_is_total import check_readable
from tests.api.run_helpers import Clock, decoded, env_request, registration

pytestmark = pytest.mark.slow

BATCH_SIZE = 4
MOST_QUEUED, MOST_IN_FLIGHT = 40, 5
LIMITS = RunLimits(
    max_queue_sequences=MOST_QUEUED,
    max_batches_in_flight=MOST_IN_FLIGHT,
    env_expiry_s=0,
    keep_past_groups=3,
)
RECORDS_TO_COMPACT = 20
SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 4, 5])
ENVS = st.sampled_from([None, None, 0, 1, 2, 7])
NUMBERS = st.integers(0, 10**6)


@dataclass(frozen=True)
class Group:
    serial: int
    """Number of the group among all that were stored; its content."""
    size: int


@dataclass
class Batch:
    groups: list[Group]
    attempt: int = 1
    lease_s: float | None = None
    lease_until: float | None = None


@dataclass
class Model:
    """A run as its clients may think of it."""

    queue: list[Group] = field(default_factory=list)
    env_sizes: list[int | None] = field(default_factory=list)
    buffers: dict[int, list[Group]] = field(default_factory=dict)
    in_flight: dict[int, Batch] = field(default_factory=dict)
    returned: dict[int, Batch] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)
    keys: dict[str, tuple[int, list[int | None]]] = field(default_factory=dict)
    is_registered: bool = False
    is_started: bool = False
    step: int = 0
    next_batch: int = 0
    next_serial: int = 0
    num_delivered: int = 0
    num_removed: int = 0
    num_forgotten: int = 0

    @property
    def waiting(self) -> list[Group]:
        return [*self.queue, *(group for env in self.buffers.values() for group in env)]

    def place(self, size: int, env_id: int | None) -> int | None:
        group = Group(self.next_serial, size)
        self.next_serial += 1
        target = None
        if env_id is not None and env_id < len(self.env_sizes):
            target = self.env_sizes[env_id]
        if env_id is None or target is None or size >= target:
            self.queue.append(group)
            return None
        buffer = self.buffers.setdefault(env_id, [])
        buffer.append(group)
        released = oldest_combination(buffer, target)
        self.queue += released
        self.buffers[env_id] = [group for group in buffer if group not in released]
        return sum(group.size for group in self.buffers[env_id])

    def plan(self) -> list[Group]:
        if not self.is_registered:
            return []
        return packed(self.queue) or oldest_combination(self.queue, BATCH_SIZE)

    def return_batch(self, batch_ids: Iterable[int]) -> None:
        for batch_id in list(batch_ids):
            self.returned[batch_id] = self.in_flight.pop(batch_id)

    def find(self, batch_id: int, attempt: int) -> Batch | None:
        batch = self.in_flight.get(batch_id) or self.returned.get(batch_id)
        return batch if batch is not None and batch.attempt == attempt else None

    def stale(self, batch_id: int, attempt: int) -> str:
        pending = self.in_flight.get(batch_id) or self.returned.get(batch_id)
        last = pending.attempt if pending else self.acknowledged.get(batch_id, 0)
        return "expired" if 1 <= attempt <= last else "unknown"

    def forget(self) -> None:
        pending = [*self.in_flight.values(), *self.returned.values()]
        self.num_forgotten += len(self.waiting) + sum(len(batch.groups) for batch in pending)
        for part in (self.queue, self.env_sizes, self.buffers, self.in_flight, self.returned,
                     self.acknowledged, self.keys):  # fmt: skip
            part.clear()  # type: ignore[attr-defined]
        self.is_registered = self.is_started = False
        self.step = 0


def packed(queue: list[Group]) -> list[Group]:
    """Take whole packs of equal groups, in the order in which the packs are complete."""
    largest = max((group.size for group in queue), default=0)
    open_packs: dict[int, list[Group]] = {}
    candidates: list[Group] = []
    for group in queue:
        pack = open_packs.setdefault(group.size, [])
        pack.append(group)
        if len(pack) * group.size == largest:
            candidates += open_packs.pop(group.size)
    for end in range(1, len(candidates) + 1):
        if sum(group.size for group in candidates[:end]) == BATCH_SIZE:
            return candidates[:end]
    return []


def oldest_combination(groups: list[Group], target: int) -> list[Group]:
    """Take each group, oldest first, with which the later ones can still make up the target."""
    taken: list[Group] = []
    for position, group in enumerate(groups):
        left = target - sum(each.size for each in taken) - group.size
        if left in sums_of(groups[position + 1 :]):
            taken.append(group)
    return taken


def sums_of(groups: list[Group]) -> set[int]:
    sums = {0}
    for group in groups:
        sums |= {each + group.size for each in sums if each + group.size <= MOST_QUEUED}
    return sums


class RunMachine(RuleBasedStateMachine):
    """A run and its model, told the same."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.name = uuid.uuid4().hex
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.model = Model()
        self.serials: dict[int, int] = {}
        self.tokens: list[tuple[int, int]] = [(0, 1), (3, 2)]
        self.store = self.new_store()
        self.run = self.open()

    def new_store(self):
        return open_store(self.kind, data_dir=Path(self.folder.name), run_name=self.name)

    def open(self) -> Run:
        run = Run(self.store, limits=LIMITS, replica="one", clock=self.clock)
        self.do(run.open())
        return run

    def do(self, work):
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.do(self.run.close())
        self.loop.close()
        self.folder.cleanup()

    @initialize(env_sizes=st.lists(st.sampled_from([None, 2, 3, 4]), max_size=2))
    def begin(self, env_sizes: list[int | None]) -> None:
        if env_sizes:
            self.register()
            self.take(None)
            for size in env_sizes:
                self.register_env(size)

    @precondition(lambda self: not self.model.is_registered)
    @rule()
    def register(self) -> None:
        self.do(self.run.register_trainer(registration(batch_size=BATCH_SIZE)))
        self.model.is_registered = True

    @precondition(lambda self: self.model.is_started and len(self.model.env_sizes) < 3)
    @rule(size=st.sampled_from([None, 2, 3, 4]))
    def register_env(self, size: int | None) -> None:
        env = self.do(self.run.register_env(env_request(group_size=size)))
        assert env.env_id == len(self.model.env_sizes)
        self.model.env_sizes.append(size)

    @rule(
        groups=st.lists(st.tuples(SIZES, ENVS), min_size=1, max_size=4),
        key=st.sampled_from([None, None, None, "a", "b"]),
    )
    def post(self, groups: list[tuple[int, int | None]], key: str | None) -> None:
        model, digest = self.model, hash(tuple(groups)) & 0xFFFF
        first = model.next_serial
        contents = [
            decoded(size, env_id=env_id, content=b"%d" % (first + i))
            for i, (size, env_id) in enumerate(groups)
        ]
        known = model.keys.get(key) if key else None
        num_waiting = sum(group.size for group in model.waiting)
        refusal: type[Exception] | None = None
        if known is not None:
            refusal = None if known[0] == digest else KeyReusedError
        elif model.is_registered and any(size > BATCH_SIZE for size, _ in groups):
            refusal = OversizedGroupError
        elif num_waiting and num_waiting + sum(size for size, _ in groups) > MOST_QUEUED:
            refusal = QueueFullError
        admit = self.run.admit(contents, key=key, digest=digest)
        if refusal is not None:
            with pytest.raises(refusal):
                self.do(admit)
            return
        admission = self.do(admit)
        if known is not None:
            assert admission.is_repeat
            assert [placement.buffered_sequences for placement in admission.placements] == known[1]
            return
        before = set(self.serials)
        placed = [model.place(size, env_id) for size, env_id in groups]
        assert [placement.buffered_sequences for placement in admission.placements] == placed
        if key is not None:
            model.keys[key] = (digest, placed)
        state = self.run.state
        stored = [*state.queue, *(group for env in state.envs for group in env.buffer)]
        new = sorted({group.group_id for group in stored} - before)
        assert len(new) == len(groups)
        self.serials |= {group_id: first + i for i, group_id in enumerate(new)}

    @rule(lease_s=st.sampled_from([None, 5.0, 60.0]))
    def take(self, lease_s: float | None) -> None:
        model = self.model
        batch_id = min(model.returned) if model.returned else model.next_batch
        if model.returned:
            again = model.returned[batch_id]
            expected = Batch(again.groups, again.attempt + 1)
        else:
            expected = Batch(model.plan())
        is_full = len(model.in_flight) >= MOST_IN_FLIGHT
        model.is_started = model.is_started or model.is_registered
        asking = self.run.next_batch(lease_s=lease_s)
        if expected.groups and is_full:
            with pytest.raises(BusyError):
                self.do(asking)
            return
        found = self.do(asking)
        if not expected.groups:
            assert found is None
            return
        batch, payloads = found
        assert (batch.batch_id, batch.attempt) == (batch_id, expected.attempt)
        serials = [group.serial for group in expected.groups]
        assert [int(payload.content) for payload in payloads] == serials
        assert sum(group.size for group in expected.groups) == BATCH_SIZE
        expected.lease_s = lease_s
        expected.lease_until = None if lease_s is None else self.clock.now + lease_s
        if batch_id in model.returned:
            del model.returned[batch_id]
        else:
            model.next_batch += 1
            model.queue = [group for group in model.queue if group.serial not in serials]
        model.in_flight[batch_id] = expected
        self.tokens.append((batch_id, expected.attempt))

    @rule(number=NUMBERS)
    def acknowledge(self, number: int) -> None:
        model = self.model
        batch_id, attempt = self.tokens[-1 - number % min(8, len(self.tokens))]
        result = self.do(self.run.acknowledge(f"{batch_id}-{attempt}"))
        batch = model.find(batch_id, attempt)
        if batch is not None:
            assert result == "acked"
            model.in_flight.pop(batch_id, None)
            model.returned.pop(batch_id, None)
            model.acknowledged[batch_id] = attempt
            model.step += 1
            model.num_delivered += len(batch.groups)
        elif model.acknowledged.get(batch_id) == attempt:
            assert result == "repeated"
        else:
            assert result == model.stale(batch_id, attempt)

    @rule(number=NUMBERS)
    def return_batch(self, number: int) -> None:
        batch_id, attempt = self.tokens[-1 - number % min(8, len(self.tokens))]
        result = self.do(self.run.return_batch(f"{batch_id}-{attempt}", reason="refused"))
        if self.model.find(batch_id, attempt) is None:
            assert result == self.model.stale(batch_id, attempt)
        elif batch_id in self.model.returned:
            assert result == "repeated"
        else:
            assert result == "returned"
            self.model.return_batch([batch_id])

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 5.0, 60.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds
        self.do(self.run.tick())
        expired = [
            batch_id
            for batch_id, batch in self.model.in_flight.items()
            if batch.lease_until is not None and batch.lease_until <= self.clock.now
        ]
        self.model.return_batch(expired)

    @rule(number=NUMBERS)
    def remove_a_group(self, number: int) -> None:
        waiting = {group.serial for group in self.model.waiting}
        ids = [i for i, serial in self.serials.items() if number % 4 == 0 or serial in waiting]
        if not ids:
            return
        group_id = sorted(ids)[number // 4 % len(ids)]
        serial, model = self.serials[group_id], self.model
        is_waiting = serial in {group.serial for group in model.waiting}
        assert self.do(self.run.remove_group(group_id)) is is_waiting
        model.num_removed += is_waiting
        model.queue = [group for group in model.queue if group.serial != serial]
        for env_id, buffer in model.buffers.items():
            model.buffers[env_id] = [group for group in buffer if group.serial != serial]

    @rule()
    def restart(self) -> None:
        self.do(self.run.close())
        if self.kind != "memory":
            self.store = self.new_store()
        self.run = self.open()
        self.model.is_started = False  # until the trainer asks again
        being_sent = [i for i, b in self.model.in_flight.items() if b.lease_until is None]
        self.model.return_batch(being_sent)
        for batch in self.model.in_flight.values():  # leases begin anew
            batch.lease_until = self.clock.now + batch.lease_s

    @precondition(lambda self: self.model.step > 2)
    @rule()
    def reset(self) -> None:
        self.do(self.run.reset())
        self.model.forget()

    @invariant()
    def run_is_as_the_model_says(self) -> None:
        state, model = self.run.state, self.model
        check_readable(state)
        queued = [self.serials[group.group_id] for group in state.queue]
        assert queued == [group.serial for group in model.queue]
        buffered = [[self.serials[g.group_id] for g in env.buffer] for env in state.envs]
        assert buffered == [
            [group.serial for group in model.buffers.get(env_id, [])]
            for env_id in range(len(model.env_sizes))
        ]
        for ours, theirs in (
            (model.in_flight, state.delivery.in_flight),
            (model.returned, state.delivery.returned),
        ):
            assert {i: (b.attempt, [g.serial for g in b.groups]) for i, b in ours.items()} == {
                i: (h.attempt, [self.serials[g] for g in h.group_ids]) for i, h in theirs.items()
            }
        assert (state.step, state.num_set_aside) == (model.step, 0)

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        state, model = self.run.state, self.model
        pending = sum(len(batch.groups) for batch in state.delivery.pending())
        assert state.counters["groups/received"] == model.next_serial
        assert state.counters["groups/delivered"] == model.num_delivered
        assert model.next_serial == (
            len(model.waiting)
            + pending
            + model.num_delivered
            + model.num_removed
            + model.num_forgotten
        )


class SqliteRunMachine(RunMachine):
    kind = "sqlite"


def play(machine: type[RunMachine], *, histories: int, steps: int, seed: bool) -> None:
    with mock.patch.object(run_log, "_MIN_RECORDS_TO_COMPACT", RECORDS_TO_COMPACT):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=histories,
                stateful_step_count=steps,
                deadline=None,
                derandomize=not seed,
                suppress_health_check=list(HealthCheck),
            ),
        )


MACHINES = pytest.mark.parametrize("machine", [RunMachine, SqliteRunMachine], ids=lambda m: m.kind)


@MACHINES
def test_run_agrees_with_its_model(machine: type[RunMachine]):
    play(machine, histories=12, steps=40, seed=False)


@pytest.mark.long
@pytest.mark.timeout(3600)
@MACHINES
def test_run_agrees_with_its_model_for_thousands_of_steps(machine: type[RunMachine]):
    play(machine, histories=150, steps=100, seed=True)
