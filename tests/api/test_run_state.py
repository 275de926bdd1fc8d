"""Whatever happens to a run: snapshot and replay give the same state, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api import records
from atroposlib.api.journal import freeze, restore, snapshot
from atroposlib.api.queue import QueuedGroup, RunLimits
from atroposlib.api.records import Record, decode_record, encode_record
from atroposlib.api.state import RunState
from atroposlib.errors import ConfigError
from tests.api.run_helpers import env_request, registration

pytestmark = pytest.mark.slow

LIMITS = RunLimits(keep_past_groups=4, keep_past_bytes=40)


def trainer_registered(at: float = 0.0, **changes: Any) -> Record:
    return records.TrainerRegistered(registration(**changes).model_dump(), "2a", at)


def admitted(*group_ids: int, epoch: int = 0, size: int = 1, **changes: Any) -> Record:
    groups = [QueuedGroup(i, None, size, size, num_bytes=10) for i in group_ids]
    return records.GroupsAdmitted(epoch, groups, 0.0, **changes)


def state_of(*history: Record, limits: RunLimits = LIMITS) -> RunState:
    state = RunState(limits)
    for record in history:
        state.apply(record)
    return state


class History:
    """Draws records that make sense in the state they meet, and some that do not."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.state = RunState(LIMITS)
        self.records: list[Record] = []
        self.num_groups = 0

    def number(self, high: int, low: int = 0) -> int:
        return self.data.draw(st.integers(low, high))

    def grow(self) -> None:
        record = self._next()
        self.records.append(record)
        self.state.apply(record)

    def _next(self) -> Record:
        kind = self.data.draw(st.sampled_from("aaaaaaffffhkkkkrrtewdvspgx"))
        at = float(len(self.records))
        delivery = self.state.delivery
        batch_id, attempt = self.number(delivery.next_id + 1), self.number(3, 1)
        match kind:
            case "a":
                return self._admit(at)
            case "f":
                planned = self.state.queue.plan_batch(2, self.state.envs.minimums) or []
                ids = [group.group_id for group in planned]
                return records.BatchFormed(delivery.next_id, ids, "r", at, None)
            case "h":
                return records.BatchHandedOut(batch_id, attempt, "r", at, at + 5)
            case "k":
                kinds = [records.BatchAcknowledged, records.BatchPassedOver]
                return self.data.draw(st.sampled_from(kinds))(batch_id, attempt, at)
            case "r":
                return records.BatchesReturned([(batch_id, attempt)], "lost", at)
            case "t":
                batch_size = self.number(3, 2)
                return trainer_registered(at, batch_size=batch_size, replace=batch_size == 3)
            case "e":
                request = env_request(group_size=self.number(4, 1)).model_dump()
                return records.EnvRegistered(self.number(len(self.state.envs) + 1), request, at)
            case "w":
                return records.EnvRevived(self.number(3), at)
            case "d":
                return records.EnvDisconnected(self.number(3), bool(self.number(1)), at)
            case "v":
                return records.PolicyVersionSet(self._epoch(), self.number(9))
            case "s":
                return records.EnvsSeen(self._epoch(), {self.number(3): at})
            case "g":
                return records.GroupsRemoved([self.number(max(self.num_groups, 1))], at)
            case "p":
                return records.TrainerStarted(self._epoch())
            case _:
                return records.RunReset(at)

    def _epoch(self) -> int:
        return max(0, self.state.epoch - self.number(1))

    def _admit(self, at: float) -> Record:
        groups = []
        for _ in range(self.number(2, 1)):
            env_id = self.data.draw(st.sampled_from([None, 0, 1]))
            size = self.number(4, 1)
            groups.append(QueuedGroup(self.num_groups, env_id, size, size, num_bytes=10))
            self.num_groups += 1
        key = self.data.draw(st.sampled_from([None, "a", "b"]))
        digest = self.number(2, 1)
        return records.GroupsAdmitted(self._epoch(), groups, at, 0, key, digest)


@settings(max_examples=75)
@given(st.data())
def test_snapshot_and_the_rest_of_the_log_give_the_same_state(data):
    history = History(data)
    for _ in range(data.draw(st.integers(0, 40))):
        history.grow()
    cut = data.draw(st.integers(0, len(history.records)))

    restored = RunState(LIMITS)
    restore(restored, snapshot(state_of(*history.records[:cut])))
    for record in history.records[cut:]:
        restored.apply(decode_record(encode_record(record)))

    assert snapshot(restored) == snapshot(history.state)
    assert restored.waiting == history.state.waiting
    assert restored.delivery.num_sequences == history.state.delivery.num_sequences


@settings(max_examples=75)
@given(st.data())
def test_every_payload_is_held_by_somebody_or_given_up_once(data):
    history = History(data)
    for _ in range(data.draw(st.integers(0, 40))):
        history.grow()
    state = history.state

    held = [group.group_id for group in state.queue]
    held += [group.group_id for env in state.envs for group in env.buffer]
    held += [i for batch in state.delivery.pending() for i in batch.group_ids]
    held += [group.group_id for group in state.past]
    if state.payloads.latest_is_held:
        held.append(state.latest_group_id)

    assert sorted([*held, *state.payloads.discardable]) == list(range(history.num_groups))
    assert state.fence == sum(record.is_guarded for record in history.records)


def test_step_grows_only_with_acknowledged_batches():
    state = state_of(
        trainer_registered(batch_size=1, starting_step=5),
        admitted(0, 1),
        records.BatchFormed(0, [0], "", 0.0),
    )
    assert state.step == 5

    for _ in range(2):
        state.apply(records.BatchAcknowledged(0, 1, 0.0))

    assert state.step == 6
    assert [group.group_id for group in state.past] == [0]


def test_batch_that_was_passed_over_is_gone_and_no_step():
    state = state_of(
        trainer_registered(batch_size=1, starting_step=5),
        admitted(0, 1),
        records.BatchFormed(0, [0], "", 0.0),
    )

    for _ in range(2):
        state.apply(records.BatchPassedOver(0, 1, 0.0))
    state.apply(records.BatchAcknowledged(0, 1, 0.0))

    assert (state.step, len(state.delivery.pending())) == (5, 0)
    assert [group.group_id for group in state.past] == [0]
    assert (state.counters["batches/delivered"], state.counters["batches/without_step"]) == (1, 1)


def test_payloads_are_given_up_when_newer_ones_are_past():
    history: list[Record] = [trainer_registered(batch_size=1), admitted(*range(7))]
    for i in range(6):
        history += [records.BatchFormed(i, [i], "", 0.0), records.BatchAcknowledged(i, 1, 0.0)]

    state = state_of(*history)

    # Past holds 4 groups of 10 bytes: the newest of the six that left.
    assert [group.group_id for group in state.past] == [2, 3, 4, 5]
    assert state.payloads.take_discardable(9) == [0, 1]
    assert state.payloads.take_discardable(9) == []


def test_replacing_the_settings_dissolves_returned_batches_to_the_front():
    state = state_of(
        trainer_registered(batch_size=2),
        admitted(0, 1, 2, 3, 4, 5),
        records.BatchFormed(0, [0, 1], "", 0.0),
        records.BatchFormed(1, [2, 3], "", 0.0),
        records.BatchesReturned([(1, 1), (0, 1)], "lost", 0.0),
        trainer_registered(batch_size=3, replace=True, starting_step=9),
    )

    assert [group.group_id for group in state.queue] == [0, 1, 2, 3, 4, 5]
    assert (len(state.delivery.pending()), state.step, state.batch_size) == (0, 9, 3)


def test_trainer_that_goes_back_knows_no_versions_it_has_not_reached():
    groups = [QueuedGroup(i, None, 1, 1, version=version) for i, version in enumerate([3, 9, 5, 9])]
    state = state_of(
        trainer_registered(batch_size=1, starting_step=9),
        records.GroupsAdmitted(0, groups, 0.0),
        records.BatchFormed(0, [3], "", 0.0),
        trainer_registered(batch_size=1, starting_step=5, replace=True),
    )

    (in_flight,) = state.delivery.in_flight.values()
    waiting = [*state.queue, *in_flight.groups]
    assert [group.known_version for group in waiting] == [3, None, 5, None]
    assert [state.staleness_of(group) for group in waiting] == [2, None, 0, None]
    assert state.oldest_staleness == 2


def test_joining_trainer_changes_nothing_but_its_id():
    state = state_of(trainer_registered(), trainer_registered(starting_step=7))

    assert (state.step, len(state.trainer_ids)) == (0, 2)


def test_groups_of_an_epoch_that_is_over_belong_to_nothing():
    state = state_of(records.RunReset(0.0), admitted(5, epoch=0))

    assert (len(state.queue), state.payloads.discardable) == (0, [5])


def test_restore_takes_past_groups_that_the_limits_still_allow():
    first = state_of(
        trainer_registered(batch_size=3),
        admitted(0, 1, 2, 3),
        records.BatchFormed(0, [0, 1, 2], "", 0.0),
        records.BatchAcknowledged(0, 1, 0.0),
    )

    again = RunState(RunLimits(keep_past_groups=1))
    restore(again, snapshot(first))

    assert [group.group_id for group in again.past] == [2]
    assert again.payloads.discardable == [0, 1]


def test_frozen_run_is_not_touched_by_what_happens_while_it_is_encoded():
    history: list[Record] = [
        trainer_registered(batch_size=1),
        records.TrainerStarted(0),
        records.EnvRegistered(0, env_request(group_size=4).model_dump(), 0.0),
        admitted(0, 1, key="k", digest=1),
    ]
    state = state_of(*history)
    before = snapshot(state)

    parts = []
    for number, part in enumerate(freeze(state), start=2):
        parts.append(part)
        state.apply(admitted(number))
        state.apply(records.EnvDisconnected(0, False, 0.0))
    state.apply(records.RunReset(0.0))

    assert b"".join(parts) == before


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", b"nonsense", b"\x01h\x09\x00", b"\x01h" + bytes(8), b"\x02h" + bytes(8)],
)
def test_snapshot_that_cannot_be_read_is_refused(content):
    with pytest.raises(ConfigError, match="snapshot"):
        restore(RunState(), content)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x02\x91\xa9run_reset", b"\x01\x91\xa5other", b"\x01\x91\xa9run_reset", b"\x01\xc1"],
)
def test_record_that_cannot_be_read_is_refused(content):
    with pytest.raises(ConfigError, match="the run holds a record"):
        decode_record(content)
