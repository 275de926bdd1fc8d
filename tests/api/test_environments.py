"""The registry of environments: names, buffers of small groups, and their sums."""

from __future__ import annotations

import pytest

from atroposlib.api.environments import MIN_ENV_WEIGHT, EnvRecord, EnvRegistry, weight_share
from atroposlib.api.queue import QueuedGroup, queue_view, scaled_needs
from atroposlib.api.schemas import MAX_GROUP_SIZE, RegisterEnv


def registered(registry: EnvRegistry, name: str = "env", **fields: object) -> EnvRecord:
    request = {"desired_name": name, "max_token_length": 1000, "weight": 1.0, **fields}
    return registry.add(RegisterEnv.model_construct(**request), now=5.0)


def small_group(group_id: int, size: int, env_id: int = 0) -> QueuedGroup:
    return QueuedGroup(group_id, env_id, size, size * 7, num_bytes=size * 10)


def ids(groups: list[QueuedGroup]) -> list[int]:
    return [group.group_id for group in groups]


def sums_of(registry: EnvRegistry) -> tuple[int, int, list[int]]:
    by_env = [registry.buffered_sequences_of(env.env_id) for env in registry]
    return registry.buffered_sequences, registry.buffered_bytes, by_env


def test_ids_count_up_and_names_are_numbered_by_their_own_kind():
    registry = EnvRegistry()
    names = [registered(registry, name).real_name for name in ("a", "b", "a")]
    registry.add_unreadable(now=6.0)
    registry.add_unreadable(now=7.0)

    assert names == ["a_0", "b_0", "a_1"]
    assert [env.env_id for env in registry] == [0, 1, 2, 3, 4]
    assert len(registry) == 5
    unreadable = registry.find(4)
    assert unreadable is not None
    assert (unreadable.real_name, unreadable.is_connected) == ("unreadable_1", False)
    assert (unreadable.largest_group, unreadable.group_size, unreadable.buffer) == (1, None, [])
    assert (unreadable.max_token_length, unreadable.weight, unreadable.last_seen) == (0, 0.0, 7.0)


def test_environment_is_found_by_its_id_only():
    registry = EnvRegistry()
    env = registered(registry)

    assert registry.find(0) is env
    assert [registry.find(env_id) for env_id in (None, -1, 1)] == [None, None, None]


@pytest.mark.parametrize(("group_size", "unit"), [(None, 1), (4, 4)])
def test_registration_sets_times_state_and_unit(group_size, unit):
    env = registered(EnvRegistry(), group_size=group_size, min_batch_allocation=0.5)

    assert (env.last_update, env.last_seen, env.largest_group) == (5.0, 5.0, unit)
    assert (env.is_connected, env.is_expired, env.min_batch_allocation) == (True, False, 0.5)


@pytest.mark.parametrize(
    ("group_size", "num_sequences", "expected"),
    [(None, 1, False), (4, 3, True), (4, 4, False), (4, 5, False)],
)
def test_only_groups_below_the_registered_size_are_buffered(group_size, num_sequences, expected):
    env = registered(EnvRegistry(), group_size=group_size)

    assert env.must_buffer(num_sequences) is expected


@pytest.mark.parametrize(
    ("group_size", "expected"),
    [(None, True), (0, False), (1, True), (MAX_GROUP_SIZE, True), (MAX_GROUP_SIZE + 1, False)],
)
def test_sizes_within_the_bounds_are_searched(group_size, expected):
    assert registered(EnvRegistry(), group_size=group_size).has_searchable_size is expected


def test_groups_are_released_as_soon_as_some_add_up():
    registry = EnvRegistry()
    env = registered(registry, group_size=8)

    assert [ids(registry.buffer(env, small_group(i, 3))) for i in range(2)] == [[], []]
    assert sums_of(registry) == (6, 60, [6])
    assert ids(registry.buffer(env, small_group(2, 7))) == []
    assert sums_of(registry) == (13, 130, [13])
    # 3 + 5 = 8, with the older of the two groups of 3
    assert ids(registry.buffer(env, small_group(3, 5))) == [0, 3]
    assert sums_of(registry) == (10, 100, [10])
    assert ids(env.buffer) == [1, 2]
    assert ids(registry.buffer(env, small_group(4, 1))) == [2, 4]
    assert (ids(env.buffer), env.buffered_sequences) == ([1], 3)


def test_buffers_of_environments_are_apart():
    registry = EnvRegistry()
    first, second = (registered(registry, group_size=4) for _ in range(2))

    assert registry.buffer(first, small_group(0, 3)) == []
    assert registry.buffer(second, small_group(1, 1, env_id=1)) == []
    assert sums_of(registry) == (4, 40, [3, 1])


def test_removed_groups_leave_every_buffer_and_every_sum():
    registry = EnvRegistry()
    first, second = (registered(registry, group_size=8) for _ in range(2))
    for group_id, size in enumerate((3, 2)):
        registry.buffer(first, small_group(group_id, size))
    registry.buffer(second, small_group(2, 1, env_id=1))

    assert ids(registry.remove_buffered({0, 7})) == [0]
    assert sums_of(registry) == (3, 30, [2, 1])
    assert registry.remove_buffered({0}) == []
    # The group of 3 no longer counts: 2 + 5 is below 8, and 2 + 6 is 8.
    assert registry.buffer(first, small_group(3, 5)) == []
    assert ids(registry.buffer(first, small_group(4, 6))) == [1, 4]


def test_environment_that_stops_buffering_queues_groups_of_any_size():
    registry = EnvRegistry()
    env, other = registered(registry, group_size=8), registered(registry, group_size=8)
    registry.buffer(env, small_group(0, 3))
    registry.buffer(other, small_group(1, 2, env_id=1))

    assert ids(registry.stop_buffering(env)) == [0]
    assert sums_of(registry) == (2, 20, [0, 2])
    assert (env.buffer, env.group_size, env.largest_group) == ([], None, 1)
    assert not env.must_buffer(1)
    assert registry.stop_buffering(env) == []
    assert sums_of(registry) == (2, 20, [0, 2])


def test_restored_registry_continues_names_and_sums():
    before = EnvRegistry()
    env = registered(before, group_size=8, min_batch_allocation=0.5)
    registered(before)
    before.buffer(env, small_group(0, 3))
    registry = EnvRegistry()
    assert (registry.minimums, registry.total_weight) == ({}, 0)

    registry.restore(before)

    assert sums_of(registry) == (3, 30, [3, 0])
    assert (registry.minimums, registry.total_weight) == ({0: 0.5}, 2000)
    assert registered(registry).real_name == "env_2"


def test_sums_follow_every_registration_and_disconnect():
    registry = EnvRegistry()
    env = registered(registry, min_batch_allocation=0.25)
    assert (registry.total_weight, registry.unallocated_fraction) == (1000, 0.75)
    registered(registry, min_batch_allocation=0.5, weight=2.0)
    assert (registry.total_weight, registry.unallocated_fraction) == (3000, 0.25)
    assert registry.minimums == {0: 0.25, 1: 0.5}

    registry.connect(env, False, is_expired=True)
    assert (env.is_connected, env.is_expired) == (False, True)
    assert (registry.total_weight, registry.unallocated_fraction) == (2000, 0.5)
    assert registry.minimums == {1: 0.5}
    registry.connect(env, True)
    assert (env.is_connected, env.is_expired) == (True, False)
    assert registry.unallocated_fraction == 0.25


@pytest.mark.parametrize(
    ("weight", "total", "expected"),
    [(1.0, 4000.0, 0.25), (1.0, 0.5, 2000.0), (1.0, 0.0, MIN_ENV_WEIGHT), (1e-9, 4000.0, 0.01)],
)
def test_weight_share_is_bounded_below(weight, total, expected):
    env = registered(EnvRegistry(), weight=weight)

    assert weight_share(env, total) == expected
    assert MIN_ENV_WEIGHT == 0.01


def test_queue_view_of_an_environment_without_groups():
    # 5 sequences are two packs of 3; int(7 * 0.3) = 2 of the 6 are reserved for their sender.
    view = queue_view(
        0, {1: 5, None: 1}, group_size=2, pack_size=3, batch_size=7, minimums={1: 0.3}
    )

    assert view == (2 + 3 // 2, 0)  # (6 - 2 + 3) // 2


def test_queue_view_never_counts_a_reserve_beyond_the_queued():
    view = queue_view(0, {0: 4, 1: 1}, group_size=1, pack_size=1, batch_size=100, minimums={1: 0.5})

    assert view == (4, 4)


@pytest.mark.parametrize(
    ("minimums", "smallest", "expected"),
    [
        ({0: 0.5, 1: 0.25}, {0: 1, 1: 1}, {0: 8, 1: 4}),  # 12 of 16
        ({0: 0.5, 1: 0.5}, {0: 1, 1: 1}, {0: 8, 1: 8}),  # exactly 16
        ({0: 0.05, 1: 0.0625}, {0: 1, 1: 1}, {1: 1}),  # int(0.8) = 0 is left out
        ({0: 1.0, 1: 1.0}, {0: 1, 1: 1}, {0: 8, 1: 8}),  # 32 scaled by a half
        ({0: 1.0, 1: 0.5}, {0: 4, 1: 7}, {0: 10, 1: 7}),  # 16 + 8 scaled by 2/3: 10 and 5
        ({}, {}, {}),
    ],
)
def test_needs_are_scaled_down_to_the_batch(minimums, smallest, expected):
    assert scaled_needs(minimums, smallest, 16) == expected
