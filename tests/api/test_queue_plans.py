"""The queue against a plain list of groups and the packing rules, move by move."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.queue import (
    GroupQueue,
    QueuedGroup,
    oldest_combination,
    pack_exact,
    pack_with_minimums,
)
from tests.api.test_queue import take_batch

pytestmark = pytest.mark.slow

ENVS = st.sampled_from([None, 0, 1, 2])
SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 4, 6, 8, 12])
MINIMUMS = st.dictionaries(st.integers(0, 3), st.floats(0, 1.5), max_size=3)
BATCH_SIZES = st.integers(1, 24)
MOVES = st.one_of(
    st.tuples(st.just("append"), st.lists(st.tuples(SIZES, ENVS), min_size=1, max_size=12)),
    st.tuples(st.just("plan"), st.tuples(BATCH_SIZES, MINIMUMS)),
    st.tuples(st.just("take"), st.tuples(BATCH_SIZES, MINIMUMS)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 60), max_size=6)),
    st.tuples(st.just("restore"), st.integers(1, 8)),
)


def entry(group_id: int, size: int, env_id: int | None = None) -> QueuedGroup:
    return QueuedGroup(
        group_id, env_id, size, num_tokens=size * 10, num_bytes=size * 7, version=group_id % 3
    )


def ids(groups) -> list[int] | None:
    return None if groups is None else [group.group_id for group in groups]


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, ENVS), max_size=30), BATCH_SIZES, MINIMUMS)
def test_short_batches_leave_no_group_waiting_for_ever(groups, batch_size, minimums) -> None:
    queue = GroupQueue()
    for group_id, (size, env_id) in enumerate(groups):
        queue.append(entry(group_id, size, env_id))
    exact = queue.plan_batch(batch_size, minimums)

    planned = queue.plan_batch(batch_size, minimums, short_batches=True)

    if exact is not None:
        assert planned == exact
    elif planned is not None:
        assert 0 < sum(group.num_sequences for group in planned) <= batch_size
        assert len(set(ids(planned))) == len(planned)
    fitting = [group for group in queue if group.num_sequences <= batch_size]
    if exact is None and planned is not None:
        assert planned[0] == fitting[0]
    if not minimums and queue.num_sequences >= batch_size:
        assert (planned is None) == (not fitting)


def expected_plan(
    groups: list[QueuedGroup], batch_size: int, minimums: Mapping[int, float]
) -> list[int] | None:
    sizes = [group.num_sequences for group in groups]
    if sum(sizes) < batch_size:
        return None
    if minimums:
        positions = pack_with_minimums(
            [(group.num_sequences, group.env_id) for group in groups],
            largest=max(sizes),
            batch_size=batch_size,
            minimums=minimums,
        )
    else:
        positions = pack_exact(sizes, largest=max(sizes), batch_size=batch_size)
        positions = positions or oldest_combination(sizes, batch_size) or None
    return None if positions is None else [groups[i].group_id for i in positions]


class Model:
    """The queue as a plain list, beside the queue under test."""

    def __init__(self) -> None:
        self.queue = GroupQueue()
        self.groups: list[QueuedGroup] = []
        self.gone: list[QueuedGroup] = []
        self.num_appended = 0

    def play(self, move: str, details) -> None:
        getattr(self, f"_{move}")(details)
        self.assert_same()

    def _append(self, specs) -> None:
        for size, env_id in specs:
            group = entry(self.num_appended, size, env_id)
            self.num_appended += 1
            self.groups.append(group)
            self.queue.append(group)

    def _plan(self, details) -> None:
        assert ids(self.queue.plan_batch(*details)) == expected_plan(self.groups, *details)

    def _take(self, details) -> None:
        expected = expected_plan(self.groups, *details)
        taken = take_batch(self.queue, *details)
        assert ids(taken) == expected
        self._forget(expected or [])

    def _remove(self, group_ids) -> None:
        held = ids(self.groups)
        removed = self.queue.remove(group_ids)
        assert ids(removed) == [i for i in dict.fromkeys(group_ids) if i in held]
        self._forget(group_ids)

    def _restore(self, count) -> None:
        restored, self.gone = self.gone[:count], self.gone[count:]
        self.queue.restore_front(restored)
        self.groups = restored + self.groups

    def _forget(self, group_ids) -> None:
        self.gone += [group for group in self.groups if group.group_id in group_ids]
        self.groups = [group for group in self.groups if group.group_id not in group_ids]

    def sequences_by_env(self) -> dict[int | None, int]:
        held: dict[int | None, int] = {}
        for group in self.groups:
            held[group.env_id] = held.get(group.env_id, 0) + group.num_sequences
        return held

    def assert_same(self) -> None:
        queue, groups = self.queue, self.groups
        assert list(queue) == groups
        assert len(queue) == len(groups)
        assert queue.window(2, 3) == groups[2:5]
        assert queue.sequences_by_env == self.sequences_by_env()
        assert queue.num_sequences == sum(g.num_sequences for g in groups)
        assert queue.num_tokens == sum(g.num_tokens for g in groups)
        assert queue.num_bytes == sum(g.num_bytes for g in groups)
        assert queue.groups_by_version.total() == len(groups)
        largest = max((g.num_sequences for g in groups), default=0)
        assert queue.largest_group == largest
        stuck = [g.num_sequences for g in groups if largest % g.num_sequences]
        assert queue.unpackable_sequences == sum(stuck)


@settings(max_examples=300)
@given(moves=st.lists(MOVES, max_size=40))
def test_every_plan_equals_the_rules_on_the_whole_queue(moves):
    model = Model()

    for move, details in moves:
        model.play(move, details)


@given(
    first=st.lists(st.tuples(SIZES, ENVS), min_size=10, max_size=60),
    later=st.lists(st.tuples(SIZES, ENVS), max_size=30),
    batch_size=BATCH_SIZES,
    minimums=MINIMUMS,
)
def test_a_plan_that_failed_is_found_as_soon_as_a_group_makes_it_possible(
    first, later, batch_size, minimums
):
    model = Model()
    model.play("append", first)

    for spec in later:
        model.play("append", [spec])
        model.play("take", (batch_size, minimums))


def test_restore_front_puts_groups_before_all_others_in_the_order_given():
    queue = GroupQueue()
    for group_id in range(6):
        queue.append(entry(group_id, 2))
    first, second = take_batch(queue, 4), take_batch(queue, 4)

    queue.restore_front(second)
    queue.restore_front(first)

    assert ids(queue) == [0, 1, 2, 3, 4, 5]
    assert ids(queue.plan_batch(12)) == [0, 1, 2, 3, 4, 5]


def test_restore_front_with_a_queued_group_changes_nothing():
    queue = GroupQueue()
    queue.append(entry(0, 2))

    with pytest.raises(ValueError, match="group 0 is already queued"):
        queue.restore_front([entry(7, 2), entry(0, 2)])

    assert ids(queue) == [0]


def test_get_finds_groups_wherever_they_are_and_nothing_else():
    queue = GroupQueue()
    queue.append(entry(0, 2))
    queue.append(entry(1, 2))
    queue.restore_front(queue.remove([1]))

    found = [queue.get(group_id) for group_id in (0, 1, 2)]

    assert found == [entry(0, 2), entry(1, 2), None]


def test_remove_skips_groups_that_are_not_queued():
    queue = GroupQueue()
    queue.append(entry(0, 2))

    assert ids(queue.remove([5, 0, 0])) == [0]
    assert len(queue) == 0


def test_plan_with_a_largest_group_that_comes_and_goes_packs_to_what_is_queued():
    queue = GroupQueue()
    for group_id in range(3):
        queue.append(entry(group_id, 2))
    queue.append(entry(3, 8))

    # Packs of 8 need four groups of 2, so the group of 8 is the only pack; 4 is the oldest
    # combination instead. Without the group of 8, packs are single groups of 2.
    assert ids(queue.plan_batch(8)) == [3]
    assert ids(queue.plan_batch(4)) == [0, 1]
    queue.remove([3])
    assert ids(queue.plan_batch(4)) == [0, 1]
    assert queue.plan_batch(8) is None


def test_plan_finds_a_combination_however_far_back_its_groups_are():
    queue = GroupQueue()
    for group_id in range(5000):
        queue.append(entry(group_id, 6))
    queue.append(entry(5000, 1))

    # 6 never adds up to 13 without the one group of 1.
    assert ids(queue.plan_batch(13)) == [0, 1, 5000]


def test_a_sender_whose_pack_breaks_and_mends_is_planned_once():
    queue = GroupQueue()
    queue.append(entry(0, 4, 1))
    for group_id in (1, 2):
        queue.append(entry(group_id, 2, 0))
    assert ids(queue.plan_batch(8, {1: 0.5})) == [0, 1, 2]

    queue.remove([2])
    for group_id in range(3, 8):
        queue.append(entry(group_id, 2, 0))

    # The oldest group of the sender is the same as before its pack broke.
    assert ids(queue.plan_batch(16, {1: 0.25})) == [0, 1, 3, 4, 5, 6, 7]
