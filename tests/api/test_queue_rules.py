"""Tables for the queue, its plans and its limits; the numbers were computed by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from atroposlib.api.queue import (
    MAX_BATCH_SIZE,
    UNKNOWN_VERSION,
    AdmittedGroups,
    GroupQueue,
    OversizedGroupError,
    QueuedGroup,
    QueueFullError,
    RunLimits,
    Waiting,
    check_figures,
    check_room,
    check_sizes,
    checksum_of,
    is_reachable,
    oldest_combination,
    pack_exact,
    pack_with_minimums,
    room_for,
)
from atroposlib.errors import GroupError


def entry(group_id: int, size: int, env_id: int | None = None, version: int = 0) -> QueuedGroup:
    return QueuedGroup(group_id, env_id, size, size * 7, num_bytes=size * 10, version=version)


def queue_of(*groups: QueuedGroup) -> GroupQueue:
    queue = GroupQueue()
    for group in groups:
        queue.append(group)
    return queue


def sizes(*values: int) -> GroupQueue:
    return queue_of(*(entry(group_id, size) for group_id, size in enumerate(values)))


def ids(groups: list[QueuedGroup] | None) -> list[int] | None:
    return None if groups is None else [group.group_id for group in groups]


def test_counters_follow_what_is_queued():
    queue = queue_of(entry(0, 4, 1, version=3), entry(1, 2, 1), entry(2, 2), entry(3, 4, 2))

    assert (len(queue), queue.num_sequences, queue.num_tokens, queue.num_bytes) == (4, 12, 84, 120)
    assert queue.sequences_by_env == {1: 6, None: 2, 2: 4}
    assert queue.groups_by_version == {3: 1, 0: 3}
    assert queue.groups_by_size() == {4: 2, 2: 2}
    assert [queue.largest_group_of(env_id) for env_id in (1, 2, 3)] == [4, 4, 0]
    assert ids(queue.remove([3, 0])) == [3, 0]
    assert (len(queue), queue.num_sequences, queue.num_tokens, queue.num_bytes) == (2, 4, 28, 40)
    assert (queue.largest_group, queue.sequences_by_env) == (2, {1: 2, None: 2})
    assert queue.groups_by_version == {0: 2}
    queue.remove([1, 2])
    assert (queue.largest_group, queue.sequences_by_env, queue.groups_by_size()) == (0, {}, {})


def test_largest_group_stays_while_another_of_its_size_is_queued():
    queue = sizes(4, 4, 2)

    queue.remove([0])
    assert queue.largest_group == 4
    queue.remove([1])
    assert queue.largest_group == 2
    queue.restore_front([entry(7, 3)])
    assert queue.largest_group == 3


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [(1, True), (2, True), (3, False), (4, False), (5, False)],
)
def test_whole_packs_of_the_largest_size(env_id, expected):
    queue = queue_of(
        entry(0, 4, 1),  # a pack of its own
        entry(1, 2, 2), entry(2, 2, 2),  # 2 + 2
        entry(3, 2, 3), entry(4, 1, 3),  # one of each
        entry(5, 3, 4), entry(6, 3, 4),  # 3 does not divide 4
    )  # fmt: skip

    assert queue.has_packable(env_id) is expected
    assert queue.unpackable_sequences == 6


def test_window_reads_from_a_position():
    queue = sizes(1, 1, 1, 1)

    assert [ids(queue.window(*at)) for at in ((0, 2), (1, 2), (3, 5), (4, 1), (0, 0))] == [
        [0, 1], [1, 2], [3], [], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("queued", "batch_size", "expected"),
    [
        ((3, 3, 3), 6, [0, 1]),
        ((3, 3, 3), 7, [0, 1]),  # the third would exceed it
        ((3, 3, 3), 9, [0, 1, 2]),
        ((3, 3, 3), 10, None),  # fewer wait
        ((5, 1, 1), 4, [0]),  # at least one group
        ((), 1, None),
    ],
)
def test_oldest_groups_within_a_batch(queued, batch_size, expected):
    assert ids(sizes(*queued).plan_oldest(batch_size)) == expected


@pytest.mark.parametrize(
    ("queued", "batch_size", "expected"),
    [
        ((3, 3, 3), 6, [0, 1]),  # they add up
        ((1, 3, 1, 2), 4, [0, 1]),  # an exact combination comes first
        ((3, 3, 3), 8, [0, 1]),
        ((24, 26), 32, [0]),
        ((5, 7, 2, 5), 8, [0, 2]),  # the second does not fit, the third does
        ((3, 3, 3), 10, None),  # fewer wait than a batch has
        ((9, 5, 7), 8, [1]),  # the first was posted for a larger batch
        ((9, 9), 8, None),
    ],
)
def test_short_batches_take_the_oldest_groups_that_fit(queued, batch_size, expected):
    assert ids(sizes(*queued).plan_batch(batch_size, short_batches=True)) == expected


def test_short_batches_in_order_do_not_depend_on_later_groups():
    assert ids(sizes(5, 7, 3, 5).plan_in_order(8, short_batches=True)) == [0]
    assert ids(sizes(5, 7).plan_in_order(8, short_batches=True)) == [0]


@pytest.mark.parametrize(
    ("queued", "expected"),
    [
        (((3, 1), (3, 0), (3, 1), (3, 0)), [0, 2]),  # the half of 1 takes two of its groups
        (((3, 0), (3, 0), (2, 1), (3, 1)), [0, 2, 3]),  # the oldest is always taken
        (((3, 0), (3, 0), (3, 0)), None),  # 1 has nothing for its half
        (((3, 0), (3, 0), (3, 1)), None),  # 1 has less than its half
        (((4, 0), (4, 0), (2, 1)), None),  # all sizes pack: 1 is waited for
    ],
)
def test_short_batches_keep_guaranteed_shares(queued, expected):
    queue = queue_of(*(entry(i, size, env_id) for i, (size, env_id) in enumerate(queued)))

    assert ids(queue.plan_batch(8, {1: 0.5}, short_batches=True)) == expected


def test_plan_in_order_takes_the_batch_that_formed_first():
    queue = sizes(2, 1, 4, 1)

    # 2 + 1 + 1 forms first with all four; with the first three groups, the group of 4 alone.
    assert ids(queue.plan_in_order(4)) == [2]
    assert queue.plan_in_order(9) is None
    assert ids(sizes(2, 1, 1, 4).plan_in_order(4)) == [0, 1, 2]
    assert ids(sizes(2, 2).plan_in_order(4)) == [0, 1]


def test_plan_is_the_same_until_the_queue_changes():
    queue = queue_of(entry(0, 2, 1), entry(1, 2, 1), entry(2, 2))
    shares = {1: 0.5}

    assert [ids(queue.plan_batch(4, shares)) for _ in range(2)] == [[0, 1]] * 2
    assert [queue.plan_batch(8, shares) for _ in range(2)] == [None] * 2
    queue.append(entry(3, 2))
    assert ids(queue.plan_batch(8, shares)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("queued", "largest", "batch_size", "expected"),
    [
        ((2, 4, 2), 4, 4, [1]),  # the pack of 4 is complete first
        ((2, 2, 4), 4, 4, [0, 1]),
        ((2, 2, 4), 4, 2, [0]),  # the last pack in part
        ((2, 2, 4), 4, 6, None),  # 2 + 2 + 4 exceeds 6
        ((2, 2, 4), 4, 8, [0, 1, 2]),
        ((3, 3, 4), 4, 8, None),  # groups of 3 make no pack of 4
        ((2, 1, 2, 1, 1, 1), 4, 8, [0, 2, 1, 3, 4, 5]),
        ((), 0, 1, None),
    ],
)
def test_pack_exact_table(queued, largest, batch_size, expected):
    assert pack_exact(queued, largest=largest, batch_size=batch_size) == expected


@pytest.mark.parametrize(
    ("groups", "minimums", "expected"),
    [
        # Owner 1 gets its half first: its second group before older ones of others.
        ([(2, 0), (2, 0), (2, 0), (2, 1), (2, 1)], {1: 0.5}, [3, 4, 0, 1]),
        ([(2, 0), (2, 0), (2, 0), (2, 1)], {1: 0.25}, [3, 0, 1, 2]),
        ([(2, 0), (2, 0), (2, 0), (2, 0)], {1: 0.5}, None),  # owner 1 has nothing
        ([(2, 0), (2, 0), (2, 0), (2, 0)], {1: 0.1}, [0, 1, 2, 3]),  # int(0.8) is nothing owed
        ([(2, 0), (2, 0), (2, 0)], {0: 0.5}, None),  # six sequences
        # Two of three groups of 2 are whole packs of 4; the third would break one.
        ([(4, 0), (2, 1), (2, 1), (2, 1)], {1: 0.5}, [1, 2, 0]),
        ([(2, None), (2, 1), (2, None), (2, 1)], {1: 0.5}, [1, 3, 0, 2]),
        ([(4, 1), (4, 2), (4, 0)], {1: 0.5, 2: 0.5}, [0, 1]),
        ([(4, 1), (4, 2), (4, 0)], {2: 0.5}, [1, 0]),
        ([(4, 1), (4, 1), (4, 2), (4, 2)], {1: 1.0, 2: 1.0}, [0, 2]),  # scaled to a half each
    ],
)
def test_pack_with_minimums_table(groups, minimums, expected):
    largest = max(size for size, _ in groups)

    positions = pack_with_minimums(groups, largest=largest, batch_size=8, minimums=minimums)

    assert positions == expected
    rows = Counter((owner, size) for size, owner in groups)
    assert expected == pack_with_minimums(
        groups, largest=largest, batch_size=8, minimums=minimums, num_by_row=rows
    )


def test_groups_without_an_owner_can_go_last():
    groups = [(2, None), (2, 0), (2, None), (2, 0), (2, 0), (2, None)]

    chosen = {
        last: pack_with_minimums(
            groups, largest=2, batch_size=8, minimums={0: 0.25}, ownerless_last=last
        )
        for last in (False, True)
    }

    assert chosen == {False: [1, 0, 2, 3], True: [1, 3, 4, 0]}


@pytest.mark.parametrize(
    ("queued", "target", "expected"),
    [
        ((3, 2, 2), 4, [1, 2]),
        ((3, 2, 1), 3, [0]),
        ((2, 1, 3), 3, [0, 1]),  # older ones first
        ((5, 3), 4, []),
        ((1, 1), 3, []),  # more than there is
        ((1, 1), 2, [0, 1]),
        ((1, 1), 0, []),
        ((4, 4), 4, [0]),
        ((9, 4), 4, [1]),
    ],
)
def test_combination_table(queued, target, expected):
    assert oldest_combination(queued, target) == expected
    if target:
        assert is_reachable(Counter(queued), target) is bool(expected)


@pytest.mark.parametrize(("target", "expected"), [(0, False), (-1, False), (7, True), (8, False)])
def test_reachable_sums_of_many_groups_of_one_size(target, expected):
    assert is_reachable({1: 7}, target) is expected
    assert is_reachable({10: 7}, 10 * target) is expected
    assert not is_reachable({10: 7}, 10 * target + 1)


@pytest.mark.parametrize(("num_others", "expected"), [(7, True), (8, False)])
def test_search_that_would_take_too_long_is_given_up(num_others, expected):
    # Eight steps over 2**28 bits are the limit; the last size would be the ninth.
    num_by_size = dict.fromkeys(range(1, num_others + 1), 1) | {1 << 28: 1}

    assert is_reachable(num_by_size, 1 << 28) is expected


def test_combination_for_a_target_beyond_the_search_is_refused_at_once():
    assert not is_reachable({1 << 28: 2}, 1 << 29)
    assert is_reachable({1 << 20: 2}, 1 << 20)


PAYLOAD = b'{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "content", "expected"),
    [
        ({"checksum": checksum_of(PAYLOAD)}, PAYLOAD, True),
        ({"checksum": checksum_of(PAYLOAD)}, b'{"a": 2}', False),
        ({"num_bytes": 8}, PAYLOAD, True),
        ({"num_bytes": 8}, PAYLOAD + b" ", False),
        ({"num_bytes": 0}, PAYLOAD, True),
        ({"num_bytes": 8}, b'{"a": 1 ', False),
        ({"num_bytes": 8, "wire_format": "msgpack"}, b"anything", True),
        ({"num_bytes": 8, "wire_format": "msgpack"}, b"shorter", False),
    ],
)
def test_payload_is_recognized(fields, content, expected):
    assert QueuedGroup(0, None, 1, 1, **fields).is_payload(content) is expected


def test_version_that_is_unknown_is_none():
    assert entry(0, 1, version=3).known_version == 3
    assert entry(0, 1, version=UNKNOWN_VERSION).known_version is None


def test_waiting_adds_and_subtracts():
    both = Waiting.of([entry(0, 2), entry(1, 3)])

    assert both == (5, 50)
    assert both.plus(Waiting(1, 2)) == (6, 52)
    assert both.plus(Waiting(1, 2), -1) == (4, 48)
    assert Waiting.of([]) == (0, 0)


LIMITS = RunLimits(max_queue_sequences=10, max_queue_bytes=100)


@pytest.mark.parametrize(
    ("limits", "waiting", "arriving", "unit"),
    [
        (LIMITS, (6, 0), (4, 0), None),  # exactly the limit
        (LIMITS, (6, 0), (5, 0), "6 sequences wait"),
        (LIMITS, (1, 60), (1, 40), None),
        (LIMITS, (1, 60), (1, 41), "60 bytes wait"),
        (LIMITS, (0, 0), (99, 999), None),  # nothing waits
        (LIMITS, (1, 0), (99, 0), "1 sequences wait"),
        (RunLimits(), (10**6, 10**9), (1, 1), None),  # no limit
    ],
)
def test_room_table(limits, waiting, arriving, unit):
    def check() -> None:
        check_room(
            limits, waiting=Waiting(*waiting), arriving=Waiting(*arriving), retry_after_s=2.5
        )

    if unit is None:
        check()
        return
    with pytest.raises(QueueFullError, match=unit) as refused:
        check()
    assert (refused.value.status, refused.value.retry_after_s) == (503, 2.5)


@pytest.mark.parametrize(
    ("changes", "waiting", "pending", "batch_size", "expected"),
    [
        ({}, (5, 50), 0, 4, None),
        ({"max_queue_sequences": 10}, (4, 0), 3, 4, 6),
        ({"max_queue_sequences": 10}, (11, 0), 0, 4, 0),
        ({"max_queue_bytes": 100}, (4, 40), 0, 4, 6),  # 60 bytes left, 10 per sequence
        ({"max_queue_bytes": 100}, (4, 2), 0, 4, 98),  # at least one byte per sequence
        ({"max_queue_bytes": 100}, (1, 1), 0, 4, 99),
        ({"max_queue_bytes": 100}, (0, 0), 0, 4, None),  # sizes are unknown
        ({"max_staleness_steps": 2}, (5, 0), 4, 4, 3),  # 4 * 3 - 5 - 4
        ({"max_staleness_steps": 2}, (5, 0), 0, 0, None),  # no trainer yet
        ({"max_staleness_steps": 2, "max_queue_sequences": 7}, (5, 0), 0, 4, 2),
    ],
)
def test_room_for_new_sequences_table(changes, waiting, pending, batch_size, expected):
    room = room_for(
        replace(RunLimits(), **changes),
        waiting=Waiting(*waiting),
        pending_sequences=pending,
        batch_size=batch_size,
    )

    assert room == expected


@pytest.mark.parametrize(
    ("group", "is_possible"),
    [
        (QueuedGroup(0, None, 1, 0, num_bytes=0), True),
        (QueuedGroup(2**63 - 1, None, 2**48, 2**48, num_bytes=2**48), True),
        (QueuedGroup(0, None, 0, 0), False),
        (QueuedGroup(0, None, 2**48 + 1, 0), False),
        (QueuedGroup(0, None, 1, -1), False),
        (QueuedGroup(0, None, 1, 2**48 + 1), False),
        (QueuedGroup(0, None, 1, 1, num_bytes=-1), False),
        (QueuedGroup(0, None, 1, 1, num_bytes=2**48 + 1), False),
        (QueuedGroup(-1, None, 1, 1), False),
        (QueuedGroup(2**63, None, 1, 1), False),
    ],
)
def test_impossible_figures_are_refused(group, is_possible):
    if is_possible:
        check_figures([group], counts=[0, 1])
    else:
        with pytest.raises(GroupError, match=f"group {group.group_id}:"):
            check_figures([group], counts=[])


@pytest.mark.parametrize("count", [-1, 2])
def test_impossible_counts_are_refused(count):
    with pytest.raises(GroupError, match=f"{count} of 1 groups"):
        check_figures([entry(0, 1)], counts=[count])


@pytest.mark.parametrize(
    ("batch_size", "queued", "index"),
    [
        (4, (4, 1), None),
        (4, (1, 5, 6), 1),
        (0, (MAX_BATCH_SIZE,), None),
        (0, (MAX_BATCH_SIZE + 1,), 0),
    ],
)
def test_group_larger_than_a_batch_is_refused_with_its_position(batch_size, queued, index):
    if index is None:
        check_sizes(queued, batch_size=batch_size)
        return
    with pytest.raises(OversizedGroupError) as refused:
        check_sizes(queued, batch_size=batch_size)
    assert refused.value.index == index


def test_defaults_of_limits_and_results():
    assert RunLimits() == RunLimits(
        max_queue_sequences=0, max_queue_bytes=0, max_staleness_steps=0, env_expiry_s=600.0,
        max_waiting_requests=4096, max_batches_in_flight=1024, keep_past_groups=256,
        keep_past_bytes=2**28, ordered_envs=0, ordered_wait_s=0.0,
    )  # fmt: skip
    assert AdmittedGroups([]) == ([], False, False)
    assert (GroupQueue().largest_group, UNKNOWN_VERSION) == (0, -1)  # the latter is stored
    assert QueuedGroup(1, 2, 3, 4) == QueuedGroup(1, 2, 3, 4, 0, "json", 0, 0.0, 0.0, 0.0)
