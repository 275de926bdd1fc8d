"""The queue: nothing lost, nothing doubled, order kept, counters always right."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.api.queue import GroupQueue, QueuedGroup, oldest_combination, pack_exact

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=40)
ENVS = st.sampled_from([None, 0, 1, 2])


def entry(group_id: int, size: int, env_id: int | None = None) -> QueuedGroup:
    return QueuedGroup(group_id, env_id, size, size * 10, 0)


def queue_of(*sizes: int, env_id: int | None = None) -> GroupQueue:
    queue = GroupQueue()
    for group_id, size in enumerate(sizes):
        queue.append(entry(group_id, size, env_id))
    return queue


def take_batch(queue: GroupQueue, batch_size: int, minimums=None) -> list[QueuedGroup] | None:
    planned = queue.plan_batch(batch_size, minimums)
    queue.remove(group.group_id for group in planned or ())
    return planned


def ids(groups) -> list[int] | None:
    return None if groups is None else [group.group_id for group in groups]


def assert_counters_match(queue: GroupQueue) -> None:
    by_env: Counter = Counter()
    for group in queue:
        by_env[group.env_id] += group.num_sequences
    assert dict(queue.sequences_by_env) == dict(by_env)
    assert queue.num_sequences == sum(by_env.values())
    assert queue.largest_group == max((g.num_sequences for g in queue), default=0)
    for env_id in (0, 1, 2):
        own = [g.num_sequences for g in queue if g.env_id == env_id]
        assert queue.largest_group_of(env_id) == max(own, default=0)


@given(
    sizes=SIZES,
    envs=st.lists(ENVS, min_size=40, max_size=40),
    batch_size=st.integers(1, 24),
    minimums=st.dictionaries(st.sampled_from([0, 1]), st.floats(0, 1.5), max_size=2),
)
def test_take_batch_until_empty_loses_and_doubles_nothing(sizes, envs, batch_size, minimums):
    queue = GroupQueue()
    for group_id, (size, env_id) in enumerate(zip(sizes, envs, strict=False)):
        queue.append(entry(group_id, size, env_id))
    delivered: list[int] = []

    while (batch := take_batch(queue, batch_size, minimums)) is not None:
        assert sum(group.num_sequences for group in batch) == batch_size
        delivered += ids(batch)
        assert_counters_match(queue)

    rest = ids(queue)
    assert sorted(delivered + rest) == list(range(len(sizes)))
    assert rest == sorted(rest)


@given(count=st.integers(0, 60), size=st.sampled_from([1, 2, 4]), packs=st.integers(1, 5))
def test_take_batch_of_equal_groups_keeps_the_order(count, size, packs):
    queue = queue_of(*[size] * count)
    delivered: list[int] = []

    while (batch := take_batch(queue, size * packs)) is not None:
        delivered += ids(batch)

    assert delivered == list(range(count - count % packs))


@given(sizes=SIZES, target=st.integers(1, 30))
def test_oldest_combination_is_the_first_of_all_combinations(sizes, target):
    found = oldest_combination(sizes[:10], target)

    combinations = [
        [i for i in range(len(sizes[:10])) if bits >> i & 1] for bits in range(1 << len(sizes[:10]))
    ]
    exact = [c for c in combinations if sum(sizes[i] for i in c) == target]
    assert found == (min(exact) if exact else [])


@given(sizes=SIZES.filter(bool), batch_size=st.integers(1, 40))
def test_pack_exact_that_finds_a_batch_is_what_the_queue_takes(sizes, batch_size):
    packed = pack_exact(sizes, largest=max(sizes), batch_size=batch_size)

    taken = take_batch(queue_of(*sizes), batch_size)

    if packed is not None:
        assert ids(taken) == packed


def test_take_batch_sizes_that_do_not_pack_take_the_oldest_exact_combination():
    queue = queue_of(3, 4, 3, 3, 3)

    batch = take_batch(queue, 12)

    # 3 never packs to 4; without the 4 (position 1) four groups of 3 make 12.
    assert ids(batch) == [0, 2, 3, 4]
    assert ids(queue) == [1]


def test_unpackable_sequences_counts_sizes_that_do_not_divide_the_largest():
    assert queue_of(3, 4, 3, 2).unpackable_sequences == 6
    assert queue_of(4, 2, 1).unpackable_sequences == 0
    assert queue_of().unpackable_sequences == 0


def test_take_batch_with_a_share_lets_groups_without_owner_leave_in_order():
    queue = GroupQueue()
    for group_id, env_id in enumerate([None, 0, 0]):
        queue.append(entry(group_id, 2, env_id))

    batch = take_batch(queue, 4, {0: 0.5})

    assert ids(batch) == [1, 0]
    assert ids(queue) == [2]


def test_append_the_same_group_twice_is_refused():
    queue = queue_of(1)

    with pytest.raises(ValueError, match="group 0 is already queued"):
        queue.append(entry(0, 1))
