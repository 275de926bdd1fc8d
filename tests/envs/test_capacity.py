"""Tables for the capacity rule; the numbers were worked out by hand, as the comments show."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from atroposlib.envs.service_session import (
    CapacityLimits,
    QueueStatus,
    crossed_boundary,
    derived_batch_size,
    failure_pause_s,
    is_queue_full,
    is_run_finished,
    own_share_groups,
    worker_limit,
)


def status(queue: int = 0, own: int = 0, largest: int = 1, free: float = 1.0) -> QueueStatus:
    return QueueStatus(
        current_step=0,
        queue_groups=queue,
        own_queue_groups=own,
        max_group_size=largest,
        unallocated_fraction=free,
    )


def limits(
    group: int = 4,
    batch: int = 16,
    ahead: int = 3,
    workers: int = 64,
    share: float | None = None,
    total: int = -1,
) -> CapacityLimits:
    return CapacityLimits(
        group_size=group,
        batch_size=batch,
        max_batches_offpolicy=ahead,
        max_workers=workers,
        min_batch_allocation=share,
        total_steps=total,
    )


@pytest.mark.parametrize(
    ("old", "new", "interval", "expected"),
    [
        (0, 1, 2, None),
        (0, 2, 2, 2),
        (0, 3, 2, 2),  # the remainders 0 and 1 would miss this one
        (40, 250, 100, 200),  # two boundaries, reported once
        (99, 100, 100, 100),
        (100, 101, 100, None),
        (7, 3, 2, None),  # the service was reset
        (0, 5, 0, None),
        (0, 5, -1, None),
    ],
)
def test_crossed_boundary_table(old: int, new: int, interval: int, expected: int | None) -> None:
    assert crossed_boundary(old_step=old, new_step=new, interval=interval) == expected


def test_crossed_boundary_jumping_steps_fires_once_per_boundary() -> None:
    steps = [0, 3, 4, 4, 9, 10]

    fired = [
        crossed_boundary(old_step=old, new_step=new, interval=2)
        for old, new in itertools.pairwise(steps)
    ]

    assert fired == [2, 4, None, 8, 10]


@pytest.mark.parametrize(
    ("current", "total", "expected"),
    [(0, 10, False), (9, 10, False), (10, 10, True), (11, 10, True), (5, -1, False), (0, 0, True)],
)
def test_is_run_finished_table(current: int, total: int, expected: bool) -> None:
    assert is_run_finished(current_step=current, total_steps=total) is expected


@pytest.mark.parametrize(
    ("batch", "free", "share", "expected"),
    [
        (16, 1.0, None, 16),
        (16, 0.5, None, 8),
        (16, 0.5, 0.25, 12),
        (10, 0.25, 0.3, 5),  # 5.5 truncated
        (16, 0.0, None, 0),
        (-1, 1.0, None, -1),
    ],
)
def test_derived_batch_size_table(
    batch: int, free: float, share: float | None, expected: int
) -> None:
    size = derived_batch_size(
        batch_size=batch, unallocated_fraction=free, min_batch_allocation=share
    )

    assert size == expected


@pytest.mark.parametrize(
    ("now", "bounds", "expected"),
    [
        (status(queue=11), limits(), False),  # 44 of 3 * 16 sequences
        (status(queue=12), limits(), True),  # 48
        (status(queue=500), limits(ahead=0), False),  # no limit
        (status(), limits(batch=-1), True),  # batch size unknown
        # a = 0.25: ceil(12 / 8) = 2 packs of 8, 4 groups of 2 in each: 8 groups reserved
        (status(queue=24, own=7, largest=8), limits(group=2, share=0.25), False),
        (status(queue=24, own=8, largest=8), limits(group=2, share=0.25), True),
        # Others' groups of 2 fill the queue: M counts as 4, ceil(12 / 4) = 3 groups reserved.
        (status(queue=12, own=2, largest=2), limits(share=0.25), False),
        (status(queue=12, own=3, largest=2), limits(share=0.25), True),
        # total 2: 12 groups are 3 batches, step 0 + 3 > 2; 11 groups are 2 batches
        (status(queue=12), limits(ahead=9, total=2), True),
        (status(queue=11), limits(ahead=9, total=2), False),
    ],
)
def test_is_queue_full_table(now: QueueStatus, bounds: CapacityLimits, expected: bool) -> None:
    assert is_queue_full(now, bounds) is expected


@pytest.mark.parametrize(
    ("now", "bounds", "expected"),
    [
        (status(), limits(), 0),
        # (ceil(12 / 8) + 8 // 2) * 8 = 48 sequences, less 5 * 2, over 2
        (status(own=5, largest=8), limits(group=2, share=0.25), 19),
        # (ceil(24 / 4) + 1) * 4 = 28, less 2 * 4 = 20, over 4
        (status(own=2, largest=4), limits(share=0.5), 5),
        # (ceil(24 / 1) + 0) * 1 = 24 over 4
        (status(largest=1), limits(share=0.5), 6),
        (status(own=50, largest=4), limits(share=0.5), 0),
    ],
)
def test_own_share_groups_table(now: QueueStatus, bounds: CapacityLimits, expected: int) -> None:
    assert own_share_groups(now, bounds) == expected


@pytest.mark.parametrize(
    ("now", "bounds", "ratio", "expected"),
    [
        (status(), limits(), 1.0, 12),  # 3 * 16 // 4
        (status(queue=5), limits(), 1.0, 7),
        (status(queue=20), limits(), 1.0, 0),  # never negative
        (status(), limits(workers=8), 1.0, 8),
        (status(), limits(workers=8), 0.5, 4),  # LIMIT_TRAIN
        (status(), limits(workers=7), 0.5, 3),
        (status(), limits(), 0.0, 0),  # STOP_TRAIN
        (status(queue=1000), limits(ahead=-1, workers=8), 1.0, 8),  # no limit
        (status(free=0.5), limits(), 1.0, 6),  # 3 * 8 // 4
        (status(), limits(batch=-1), 1.0, 0),
        # queue rule: 3 * int(16 * 0.5) // 4 - 20 < 0; own share: 5 (table above)
        (status(queue=20, own=2, largest=4, free=0.0), limits(share=0.5), 1.0, 5),
        (status(queue=20, own=2, largest=4, free=0.0), limits(share=0.5, workers=3), 1.0, 3),
    ],
)
def test_worker_limit_table(
    now: QueueStatus, bounds: CapacityLimits, ratio: float, expected: int
) -> None:
    assert worker_limit(now, bounds, evaluation_ratio=ratio) == expected


@pytest.mark.parametrize(
    ("groups_to_start", "expected"),
    [
        (None, 12),  # 3 batches of 16 in groups of 4
        (5, 5),
        (0, 0),
        (100, 12),
    ],
)
def test_worker_limit_never_exceeds_what_the_service_lets_start(
    groups_to_start: int | None, expected: int
) -> None:
    now = replace(status(), groups_to_start=groups_to_start)

    assert worker_limit(now, limits()) == expected


def test_worker_limit_what_the_service_lets_start_goes_before_a_reserved_share() -> None:
    bounds = limits(share=0.5)

    assert worker_limit(status(queue=12), bounds) > 1
    assert worker_limit(replace(status(queue=12), groups_to_start=1), bounds) == 1


def test_worker_limit_what_the_service_lets_start_holds_without_an_offpolicy_limit() -> None:
    now = replace(status(), groups_to_start=2)

    assert worker_limit(now, limits(ahead=0)) == 2


@pytest.mark.parametrize(("unreported", "left"), [(0, 3), (2, 1), (9, 0)])
def test_queue_status_takes_groups_sent_since_off_what_may_start(
    unreported: int, left: int
) -> None:
    reply = {"current_step": 0, "queue_size": 0, "groups_to_start": 3}

    assert QueueStatus.from_reply(reply, unreported_groups=unreported).groups_to_start == left


def test_queue_status_reply_of_an_old_service_takes_defaults() -> None:
    reply = {"current_step": 3, "queue_size": 5, "env_weight": 1.0}

    read = QueueStatus.from_reply(reply)

    assert read == QueueStatus(3, 5, 0, 1, 1.0)


def test_queue_status_counts_groups_sent_since() -> None:
    reply = {"current_step": 3, "queue_size": 5, "self_queue_size": 2, "max_group_size": 4}

    read = QueueStatus.from_reply(reply, unreported_groups=3)

    assert (read.queue_groups, read.own_queue_groups) == (8, 5)


def test_failure_pause_grows_only_after_many_failures() -> None:
    pauses = [failure_pause_s(n) for n in (0, 15, 16, 17, 18, 22, 10_000)]

    assert pauses == [0.0, 0.0, 0.1, 0.2, 0.4, 5.0, 5.0]


@pytest.mark.parametrize(
    ("running", "finished", "expected"),
    [
        (None, 0, 12),
        (20, 0, 5),  # 20 sequences in groups of 4
        (23, 0, 5),
        (20, 4, 6),  # finished ones of unfinished groups occupy no engine
        (3, 0, 1),  # one group may always be made
        (0, 0, 1),
        (1000, 0, 12),
    ],
)
def test_worker_limit_table_of_running_sequences(
    running: int | None, finished: int, expected: int
) -> None:
    now = replace(status(), max_running_sequences=running)

    assert worker_limit(now, limits(), finished_sequences=finished) == expected


@pytest.mark.parametrize(
    ("finished", "batches", "expected"),
    [
        (8, 0.0, 12),
        (8, 1.0, 14),  # (48 + 8) // 4
        (40, 1.0, 16),  # at most one batch of 16: (48 + 16) // 4
        (40, 0.3, 13),  # int(4.8) = 4
    ],
)
def test_worker_limit_table_of_stragglers(finished: int, batches: float, expected: int) -> None:
    bounds = replace(limits(), straggler_batches=batches)

    assert worker_limit(status(), bounds, finished_sequences=finished) == expected


def test_defaults_are_neutral() -> None:
    assert worker_limit(replace(status(), max_running_sequences=19), limits()) == 4
    assert QueueStatus(0, 0) == QueueStatus(
        0, 0, own_queue_groups=0, max_group_size=1, unallocated_fraction=1.0
    )
    bounds = CapacityLimits(group_size=4, batch_size=16, max_batches_offpolicy=3, max_workers=8)
    assert (bounds.total_steps, bounds.straggler_batches) == (-1, 0.0)
    assert worker_limit(status(), bounds, finished_sequences=100) == 8


def test_queue_status_reads_every_key() -> None:
    reply = {
        "current_step": "3", "queue_size": 5, "self_queue_size": 2, "max_group_size": 4,
        "unallocated_fraction": 0.25, "groups_to_start": 9, "max_running_sequences": 70,
    }  # fmt: skip

    assert QueueStatus.from_reply(reply) == QueueStatus(3, 5, 2, 4, 0.25, 9, 70)


@pytest.mark.parametrize(
    ("step", "queue", "total", "expected"),
    [
        (0, 0, 0, False),  # 0 + 0 does not exceed 0
        (0, 4, 0, True),  # one batch more than the run takes
        (2, 4, 3, False),
        (3, 4, 3, True),
        (9, 0, -1, False),  # the end is unknown
    ],
)
def test_is_queue_full_once_the_rest_of_the_run_waits(
    step: int, queue: int, total: int, expected: bool
) -> None:
    now = replace(status(queue=queue), current_step=step)

    assert is_queue_full(now, limits(total=total)) is expected


@pytest.mark.parametrize(("ahead", "expected"), [(0, False), (1, True), (-1, False)])
def test_is_queue_full_only_with_an_offpolicy_limit(ahead: int, expected: bool) -> None:
    assert is_queue_full(status(queue=4), limits(ahead=ahead)) is expected


def test_own_share_with_a_share_of_nothing_is_the_slack() -> None:
    # (0 + 8 // 2) * 8 = 32 sequences of 2
    assert own_share_groups(status(largest=8), limits(group=2, share=0.0)) == 16
