"""The three queue functions, against the tables of the contract (sizes worked out by hand)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)


def queue_of(*specs: Any) -> list[dict[str, Any]]:
    """Build a queue from sizes, or from (size, env_id); each group is scored by its position."""
    queue = []
    for position, spec in enumerate(specs):
        size, env_id = spec if isinstance(spec, tuple) else (spec, None)
        queue.append({"tokens": [[0]] * size, "scores": [position] * size, "env_id": env_id})
    return queue


def positions(groups: list[dict[str, Any]] | None) -> list[int] | None:
    return None if groups is None else [group["scores"][0] for group in groups]


def sequences_of(batch: list[dict[str, Any]], env_id: int | None = None) -> int:
    return sum(len(g["tokens"]) for g in batch if env_id is None or g["env_id"] == env_id)


def configs(**allocations: float | None) -> list[dict[str, Any]]:
    return [
        {"registered_id": int(name[1:]), "connected": True, "min_batch_allocation": share}
        for name, share in allocations.items()
    ]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "taken", "left"),
    [
        ((4, 2, 2, 4), 8, [0, 1, 2], [3]),
        ((2, 4, 2, 4), 8, [1, 0, 2], [3]),
        ((2, 4, 2), 4, [1], [0, 2]),
        ((1, 4, 1, 2, 1, 2, 1), 8, [1, 3, 5], [0, 2, 4, 6]),
        ((3, 3), 6, [0, 1], []),
        ((3, 3), 3, [0], [1]),
        ((4, 4), 6, None, [0, 1]),
        ((3, 4, 3, 3, 3), 12, None, [0, 1, 2, 3, 4]),
        ((), 4, None, []),
        ((2,), 4, None, [0]),
    ],
)
def test_grab_exact_follows_the_pack_rule(sizes, batch_size, taken, left):
    queue = queue_of(*sizes)

    batch, rest = grab_exact_from_heterogeneous_queue(queue, batch_size)

    assert positions(batch) == taken
    assert positions(rest) == left
    assert (rest is queue) == (taken is None)


def test_grab_exact_ten_thousand_random_queues_give_exact_batches():
    rng = random.Random(0)
    groups = queue_of(*[8] * 100)

    for _ in range(10_000):
        queue = groups[: rng.randint(1, 100)]
        batch_size = 64 * rng.randint(1, 20)
        batch, rest = grab_exact_from_heterogeneous_queue(queue, batch_size)
        if batch is None:
            assert sequences_of(queue) < batch_size
        else:
            assert sequences_of(batch) == batch_size
            assert len(batch) + len(rest) == len(queue)


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [
        ((1, 2, 1), 4, [0, 1, 2]),
        ((2, 2, 4), 4, [0, 1]),
        ((3, 1, 4), 5, [1, 2]),
        ((2, 4), 3, []),
        ((), 4, []),
        ((4,), 4, [0]),
        ((2, 2, 2, 2), 8, [0, 1, 2, 3]),
        ((1, 2, 1, 4, 2), 8, [0, 1, 2, 3]),
        ((16, 8, 8), 32, [0, 1, 2]),
        ((2, 2, 4, 2, 2), 4, [0, 1]),
        ((2, 4, 2, 1), 6, [0, 1]),
        ((1,) * 16, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ((3, 3, 2, 2), 4, [2, 3]),
        ((3, 2, 2, 1), 4, [0, 3]),
        # Two combinations fit; the older groups leave first.
        ((3, 2, 2, 2), 4, [1, 2]),
    ],
)
def test_find_groups_prefers_older_groups(sizes, target, expected):
    found = find_groups_summing_to_target(queue_of(*sizes), target)

    assert found == expected
    assert isinstance(found, list)


@pytest.mark.parametrize(
    ("specs", "batch_size", "shares", "taken", "left"),
    [
        (((2, 0), (2, 1), (2, 0), (2, 1), (2, 1)), 8, {"e0": 0.25, "e1": 0.5}, [0, 1, 3, 2], [4]),
        (((2, 1), (2, 1), (2, 1), (2, 0)), 4, {"e0": 0.5}, [3, 0], [1, 2]),
        (((2, 0), (2, 1)), 4, {"e0": 0.7, "e1": 0.6}, [0, 1], []),
        (((1, 0),) * 8, 4, {"e0": 1.5}, [0, 1, 2, 3], [4, 5, 6, 7]),
        (((2, None), (2, 0), (2, 0)), 4, {"e0": 0.5}, [1, 2], [0]),
        # Groups nobody owns are no longer starved by an allocation of nothing.
        (((2, None), (2, None)), 4, {"e0": 0.0}, [0, 1], []),
        (((2, 0), (2, 0)), 4, {"e0": 0.3, "e1": 0.5}, None, [0, 1]),
        (((1, 0),), 4, {"e0": 0.5}, None, [0]),
        (((1, 0), (1, 0), (1, 1)), 7, {"e0": 0.5, "e1": 0.25}, None, [0, 1, 2]),
        (((1, 0), (1, 0), (1, 0), (4, 1)), 4, {"e0": 0.25, "e1": None}, None, [0, 1, 2, 3]),
        (((2, 0), (2, 0), (2, 0), (8, 1)), 8, {"e0": 0.25, "e1": None}, None, [0, 1, 2, 3]),
        (((1, 0),) * 8, 4, {"e0": None}, [0, 1, 2, 3], [4, 5, 6, 7]),
        (((1, 0), (1, 1)), 2, {"e0": 0.0, "e1": 0.5}, [1, 0], []),
        (((1, 0), (1, 0)), 2, {"e0": 0.5, "e1": None, "e2": 0.3}, [0, 1], []),
    ],
)
def test_grab_with_minimums_follows_the_table(specs, batch_size, shares, taken, left):
    queue = queue_of(*specs)

    batch, rest = grab_batch_with_minimum_allocations(queue, batch_size, configs(**shares))

    assert positions(batch) == taken
    assert positions(rest) == left
    assert (rest is queue) == (taken is None)


def test_grab_with_minimums_ignores_the_share_of_a_disconnected_environment():
    env_configs = [{"registered_id": 0, "connected": False, "min_batch_allocation": 0.5}]

    batch, rest = grab_batch_with_minimum_allocations(queue_of((2, 1), (2, 1)), 4, env_configs)

    assert positions(batch) == [0, 1]
    assert rest == []


def test_grab_with_minimums_without_allocation_keys_takes_what_there_is():
    queue = queue_of((1, 0), (1, 1), (1, 0), (1, 1))
    env_configs = [{"registered_id": i, "connected": True} for i in (0, 1)]

    batch, rest = grab_batch_with_minimum_allocations(queue, 4, env_configs)

    assert positions(batch) == [0, 1, 2, 3]
    assert rest == []


def test_grab_with_minimums_empty_queue_returns_it():
    assert grab_batch_with_minimum_allocations([], 4, configs(e0=0.5)) == (None, [])


def test_grab_with_minimums_sizes_that_never_pack_refuse_the_batch():
    queue = queue_of((2, 0), *[(2, 6)] * 3, *[(4, 2)] * 5, *[(8, 3)] * 3)

    batch, rest = grab_batch_with_minimum_allocations(queue, 16, configs(e0=0.1, e3=0.5))

    assert batch is None
    assert len(rest) == len(queue)


@pytest.mark.parametrize(
    ("specs", "batch_size", "shares", "at_least"),
    [
        (((2, 0), (2, 1), (2, 0), (2, 1)), 8, {"e0": 0.25, "e1": 0.5}, {0: 2, 1: 4}),
        (((2, 0), (2, 0), (2, 1), (2, 1)), 8, {"e0": 0.5, "e1": 0.5}, {0: 4, 1: 4}),
        (((1, 0),) * 16 + ((1, 1),) * 2, 16, {"e0": 0.75, "e1": None}, {0: 12}),
        (
            ((2, 0),) * 4 + ((2, 1),) * 2 + ((2, 2),) * 2,
            16,
            {"e0": 0.4, "e1": 0.2, "e2": None},
            {0: 6, 1: 3},
        ),
        (((1, 1),) * 100, 10, {"e0": None, "e1": 0.3}, {1: 10}),
    ],
)
def test_grab_with_minimums_gives_every_environment_its_share(specs, batch_size, shares, at_least):
    batch, _ = grab_batch_with_minimum_allocations(queue_of(*specs), batch_size, configs(**shares))

    assert batch is not None
    assert sequences_of(batch) == batch_size
    for env_id, least in at_least.items():
        assert sequences_of(batch, env_id) >= least


def test_grab_with_minimums_random_queues_give_exact_batches_or_none():
    rng = random.Random(1)
    formed = 0
    for _ in range(100):
        num_envs = rng.randint(2, 4)
        specs = []
        for env_id in range(num_envs):
            specs += [(2 ** rng.randint(0, 3), env_id)] * rng.randint(5, 20)
        rng.shuffle(specs)
        batch_size = rng.choice([64, 128, 256])
        shares = {f"e{env_id}": 0.9 / num_envs for env_id in range(num_envs)}
        queue = queue_of(*specs)

        batch, rest = grab_batch_with_minimum_allocations(queue, batch_size, configs(**shares))

        if batch is None:
            assert rest is queue
            continue
        formed += 1
        assert sequences_of(batch) == batch_size
        assert sorted(positions(batch) + positions(rest)) == list(range(len(queue)))
        assert positions(rest) == sorted(positions(rest))
    assert formed > 0
