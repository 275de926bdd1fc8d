"""Batching, buffering and flow control over HTTP: the worked examples of the contract."""

from __future__ import annotations

import logging

import pytest

from tests.api.helpers import Service, make_group

pytestmark = pytest.mark.slow


@pytest.fixture
def service() -> Service:
    return Service()


def test_batches_leave_oldest_first_and_count_one_step_each(service):
    service.register(batch_size=4, starting_step=3)
    service.push(2, 2, 2, 2, 2)

    seen = [(service.take(), service.get("/status").json()["current_step"]) for _ in range(3)]

    assert seen == [([0, 1], 4), ([2, 3], 5), (None, 5)]
    assert service.get("/status").json()["queue_size"] == 1


@pytest.mark.parametrize(
    ("sizes", "batch_size", "expected"),
    [
        ((4, 2, 2, 4), 8, [0, 1, 2]),
        ((2, 4, 2, 4), 8, [1, 0, 2]),
        ((2, 4, 2), 4, [1]),
        ((1, 4, 1, 2, 1, 2, 1), 8, [1, 3, 5]),
        ((3, 3), 6, [0, 1]),
        ((4, 4), 6, None),
        ((16,), 32, None),
    ],
)
def test_batch_packs_mixed_sizes(service, sizes, batch_size, expected):
    service.register(batch_size=batch_size)
    service.push(*sizes)

    assert service.take() == expected


@pytest.mark.parametrize(
    ("owners", "batch_size", "allocations", "expected"),
    [
        ([0, 1, 0, 1, 1], 8, [0.25, 0.5], [0, 1, 3, 2]),
        ([1, 1, 1, 0], 4, [0.5, None], [3, 0]),
        ([0, 1], 4, [0.7, 0.6], [0, 1]),
        ([0, 0], 4, [0.3, 0.5], None),
        # Nobody's groups are old data too: they leave in their turn.
        ([None, 0, 0], 4, [0.5], [1, 0]),
        ([None, None], 4, [0.0], [0, 1]),
    ],
)
def test_batch_gives_environments_their_share(service, owners, batch_size, allocations, expected):
    service.start(batch_size=batch_size)
    for share in allocations:
        service.register_env(min_batch_allocation=share, group_size=2)
    for position, owner in enumerate(owners):
        service.post("/scored_data", json=make_group(2, score=position, env_id=owner))

    assert service.take() == expected


def test_batch_share_of_a_disconnected_environment_is_not_waited_for(service, caplog):
    service.start(batch_size=4)
    service.register_env(min_batch_allocation=0.5, group_size=2)
    service.register_env(group_size=2)
    service.push(2, 2, env_id=1)
    with caplog.at_level(logging.WARNING):
        assert service.take() is None
        assert service.take() is None
    assert [r.message for r in caplog.records if "reserves 2 sequences" in r.message] != []
    assert len(caplog.records) == 1
    stall = service.get("/status").json()["stalls"][0]
    assert (stall["reason"], stall["num_sequences"]) == ("allocation/unfilled", 2)

    service.post("/disconnect-env", json={"env_id": 0})

    assert service.take() == [0, 1]


def test_small_groups_are_buffered_until_they_add_up(service):
    service.start(batch_size=8)
    service.register_env(group_size=8)

    answers = service.push(3, 2, 5, env_id=0)

    assert answers == [{"status": "buffered", "buffer_size": n} for n in (3, 5, 2)]
    status = service.get("/status").json()
    assert (status["queue_size"], status["buffered_sequences"]) == (2, 2)
    assert service.take() == [0, 2]


@pytest.mark.parametrize("env_id", [None, -1, 1, 99])
def test_groups_of_unknown_senders_are_never_buffered(service, env_id):
    service.start()
    service.register_env(group_size=8)

    assert service.push(3, env_id=env_id) == [{"status": "received"}]


def test_groups_of_an_environment_without_group_size_are_never_buffered(service):
    service.start()
    service.register_env()

    assert service.push(3, 5, env_id=0) == [{"status": "received"}] * 2
    assert service.status_env(0).json()["self_queue_size"] == 8 // 5


def test_oversized_groups_are_queued_and_do_not_change_what_is_buffered(service):
    service.start()
    service.register_env(group_size=4)

    assert service.push(8, env_id=0) == [{"status": "received"}]
    assert service.status_env(0).json()["self_queue_size"] == 1
    assert service.push(4, 2, env_id=0) == [
        {"status": "received"},
        {"status": "buffered", "buffer_size": 2},
    ]


def test_sizes_that_never_pack_are_named(service):
    service.register(batch_size=64)
    service.push(3, 4, 3)

    stall = service.get("/status").json()["stalls"][0]

    assert (stall["reason"], stall["num_sequences"]) == ("queue/unpackable", 6)


def test_status_env_worked_example(service):
    service.start(batch_size=16)
    for length, weight, group_size, allocation in (
        (1000, 1, 4, None),
        (1000, 3, 2, 0.25),
        (500, 1, 8, 0.5),
        (1000, -1, 1, None),
    ):
        service.register_env(
            max_token_length=length,
            weight=weight,
            group_size=group_size,
            min_batch_allocation=allocation,
        )
    for count, size, env_id in ((3, 4, 0), (5, 2, 1), (2, 8, 2), (3, 1, 3), (1, 2, None)):
        service.push(*[size] * count, env_id=env_id)

    answers = [service.status_env(env_id).json() for env_id in range(4)]

    assert service.get("/status").json()["queue_size"] == 14
    assert [a["queue_size"] for a in answers] == [12, 25, 7, 47]
    assert [a["self_queue_size"] for a in answers] == [3, 5, 2, 3]
    assert {a["max_group_size"] for a in answers} == {8}
    assert {a["unallocated_fraction"] for a in answers} == {0.25}
    assert [a["env_weight"] for a in answers] == pytest.approx([2 / 9, 6 / 9, 1 / 9, 0.01])
