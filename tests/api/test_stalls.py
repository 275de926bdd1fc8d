"""What keeps groups from being delivered is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atroposlib.api.environments import EnvRegistry
from atroposlib.api.queue import GroupQueue, QueuedGroup
from atroposlib.api.schemas import RegisterEnv
from atroposlib.api.stalls import Patience, Stall, find_stalls


def queue_of(*specs: int | tuple[int, int | None]) -> GroupQueue:
    """Build a queue from sizes, or from (size, env_id)."""
    queue = GroupQueue()
    for group_id, spec in enumerate(specs):
        size, env_id = spec if isinstance(spec, tuple) else (spec, None)
        queue.append(QueuedGroup(group_id, env_id, size, size))
    return queue


def envs_of(*minimums: float | None, group_size: int | None = None) -> EnvRegistry:
    envs = EnvRegistry()
    for share in minimums:
        request = RegisterEnv(
            max_token_length=8,
            desired_name="maths",
            weight=1.0,
            min_batch_allocation=share,
            group_size=group_size,
        )
        envs.add(request, now=0.0)
    return envs


@pytest.mark.parametrize(
    ("specs", "minimums", "expected"),
    [
        ((4, 3, 3, 3), (), []),  # a short batch of 4 and 3 forms
        ((16, 3, 3, 3), (), [("queue/oversized", 16)]),
        ((16,), (), [("queue/oversized", 16), ("batch/unreachable", 16)]),
        # Environment 0 has less than its half of 8.
        (((3, 0), (3, 1), (3, 1), (4, 1)), (0.5, None), [("allocation/unfilled", 1)]),
        (((3, 0), (3, 0), (3, 1), (4, 1)), (0.5, None), []),
        # 1 has less than its half; 0 has more, though its groups do not pack to 5.
        (((2, 0), (2, 0), (2, 0), (3, 1)), (0.5, 0.5), [("allocation/unfilled", 1)]),
        (((2, 0), (2, 0), (2, 0), (5, 1)), (0.5, 0.5), []),
    ],
)
def test_sizes_are_no_stall_if_short_batches_are_accepted(specs, minimums, expected) -> None:
    found = find_stalls(queue_of(*specs), envs_of(*minimums), batch_size=8, short_batches=True)

    assert kinds(found) == expected


def kinds(stalls: Sequence[Stall]) -> list[tuple[str, int]]:
    return [(stall.reason, stall.num_sequences) for stall in stalls]


def patience(now: float, heard: float = 0.0, **limits: float) -> Patience:
    return Patience(now=now, last_heartbeat=lambda _: heard, **limits)


@pytest.mark.parametrize(
    ("specs", "minimums", "batch_size", "expected"),
    [
        ((4, 2, 2), (), 8, []),
        ((), (), 8, []),
        # 3 does not divide 4: three groups of 3 are stuck; 4 + 3 + 3 never make 8.
        ((4, 3, 3, 3), (), 8, [("queue/unpackable", 9), ("batch/unreachable", 13)]),
        # 3 + 3 + 4 make 10, so a batch forms although 3 does not pack.
        ((4, 3, 3), (), 10, [("queue/unpackable", 6)]),
        ((4, 4), (), 6, [("batch/unreachable", 8)]),
        ((4, 4), (), 9, []),  # fewer sequences than a batch: nothing is missing yet
        ((16, 4, 4), (), 8, [("queue/oversized", 16)]),
        # Before a trainer registered there is no batch to be too large for.
        ((16, 3), (), 0, [("queue/unpackable", 3)]),
        # Environment 0 reserves int(8 * 0.5) = 4 and has none.
        (((4, 1), (4, 1)), (0.5, None), 8, [("allocation/unfilled", 4)]),
        # It has 2 of 4 in packs of 2: it fills what it can, and the batch forms.
        (((2, 0), (2, 1), (2, 1), (2, 1)), (0.5, None), 8, []),
        # It has 2 of 4, but no pack of 4.
        (((2, 0), (4, 1), (4, 1)), (0.5, None), 8, [("allocation/unfilled", 2)]),
        # It has 6 of 4, none of which packs.
        (
            ((3, 0), (3, 0), (4, 1), (4, 1)),
            (0.5, None),
            8,
            [("queue/unpackable", 6), ("allocation/unfilled", 6)],
        ),
        # int(8 * 0.1) = 0: too small a share to refuse a batch.
        (((4, 1), (4, 1)), (0.1, None), 8, []),
    ],
)
def test_find_stalls_names_what_refuses_the_batch(specs, minimums, batch_size, expected):
    queue, envs = queue_of(*specs), envs_of(*minimums)

    assert kinds(find_stalls(queue, envs, batch_size=batch_size)) == expected


def test_find_stalls_says_who_reserves_how_much():
    stalls = find_stalls(queue_of((4, 1), (4, 1)), envs_of(0.5, None), batch_size=8)

    assert stalls[0].message == (
        "environment 0 (maths_0) reserves 4 sequences of each batch and has 0 queued, none in a "
        "pack of 4; no batch forms until it catches up or disconnects"
    )


def test_find_stalls_of_an_unreachable_batch_lists_the_first_sizes():
    queue = queue_of(20, 40, 60, 80, 100, 120)

    stalls = find_stalls(queue, envs_of(), batch_size=130)

    assert "groups of 20, 40, 60, 80, 100, … do not add up to a batch of 130" in stalls[-1].message


def test_find_stalls_names_silent_environments_and_what_they_reserve():
    envs = envs_of(0.5, None)

    stalls = find_stalls(queue_of(), envs, batch_size=8, patience=patience(61.0))

    assert kinds(stalls) == [("environment/silent", 4)]
    assert "environments 0 (maths_0, 61 s), 1 (maths_1, 61 s);" in stalls[0].message


@pytest.mark.parametrize(
    ("heard", "limit_s", "is_connected"),
    [(1.0, 60.0, True), (0.0, 0.0, True), (0.0, 60.0, False)],
    ids=["heard of in time", "no limit", "disconnected"],
)
def test_find_stalls_expects_no_sign_of_life(heard, limit_s, is_connected):
    envs = envs_of(None)
    envs.find(0).is_connected = is_connected

    stalls = find_stalls(
        queue_of(), envs, batch_size=8, patience=patience(61.0, heard, silence_s=limit_s)
    )

    assert stalls == []


def test_find_stalls_of_many_silent_environments_names_the_first_five():
    stalls = find_stalls(queue_of(), envs_of(*[None] * 7), batch_size=8, patience=patience(90.0))

    assert len(stalls) == 1
    assert "4 (maths_4, 90 s) and 2 more;" in stalls[0].message


@pytest.mark.parametrize(
    ("now", "limit_s", "expected"),
    [(300.0, 300.0, []), (301.0, 300.0, [("buffer/waiting", 5)]), (301.0, 0.0, [])],
)
def test_find_stalls_names_groups_that_wait_long_for_a_sum(now, limit_s, expected):
    envs = envs_of(None, None, group_size=8)
    for group_id, size in enumerate((3, 2)):
        waiting = QueuedGroup(group_id, 1, size, size, received_at=group_id * 1000.0)
        envs.buffer(envs.find(1), waiting)

    stalls = find_stalls(
        queue_of(), envs, batch_size=8, patience=patience(now, now, buffer_s=limit_s)
    )

    assert kinds(stalls) == expected
