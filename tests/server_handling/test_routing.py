from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.server_manager import free_slots, least_loaded, parts_of


def server(*, train: int = 4, eval_: int = 4, is_healthy: bool = True, weight: float = 1.0) -> Any:
    """A server of four slots per split, of which so many are unused."""
    sem, eval_sem = AsyncSemWithAdaptiveWeight(4), AsyncSemWithAdaptiveWeight(4)
    sem.update_weight(weight)
    sem._value, eval_sem._value = train, eval_
    return SimpleNamespace(sem=sem, eval_sem=eval_sem, server_healthy=is_healthy)


@pytest.mark.parametrize(
    ("train", "eval_", "weight", "train_free", "eval_free"),
    [
        (4, 4, 1.0, 4, 4),
        (3, 4, 1.0, 3, 4),
        (4, 3, 1.0, 1, 3),  # evaluation runs: its 3 unused slots are kept free for it
        (2, 3, 1.0, 0, 3),
        (4, 0, 1.0, 4, 0),
        (4, 4, 0.5, 2, 4),
        (0, 4, 1.0, 0, 4),
    ],
)
def test_free_slots_leave_room_for_a_running_evaluation(
    train: int, eval_: int, weight: float, train_free: float, eval_free: float
) -> None:
    one = server(train=train, eval_=eval_, weight=weight)

    assert free_slots(one, is_training=True) == train_free
    assert free_slots(one, is_training=False) == eval_free


def test_least_loaded_takes_the_healthy_server_with_most_unused_slots() -> None:
    busy, idle, down = server(train=1, eval_=4), server(train=3, eval_=1), server(is_healthy=False)

    assert least_loaded([busy, idle, down]) is idle
    assert least_loaded([busy, idle, down], is_training=False) is busy


def test_least_loaded_breaks_ties_by_sessions_and_then_by_order() -> None:
    first, second = server(), server()

    assert least_loaded([first, second]) is first
    assert least_loaded([first, second], open_sessions={id(first): 1}) is second
    assert least_loaded([first, second], open_sessions={id(first): 1, id(second): 1}) is first


def test_least_loaded_reads_only_the_counter_of_a_semaphore() -> None:
    busy, idle = (
        SimpleNamespace(sem=SimpleNamespace(_value=value), server_healthy=True) for value in (1, 2)
    )

    assert least_loaded([busy, idle]) is idle  # type: ignore[type-var]


def test_least_loaded_without_a_healthy_server_is_the_first() -> None:
    servers = [server(is_healthy=False, train=1), server(is_healthy=False)]

    assert least_loaded(servers) is servers[0]


@pytest.mark.parametrize(
    ("n", "largest", "expected"), [(20, 8, [8, 8, 4]), (16, 8, [8, 8]), (3, 8, [3]), (9, 8, [8, 1])]
)
def test_parts_add_up_and_stay_within_the_limit(n: int, largest: int, expected: list[int]) -> None:
    assert parts_of(n, largest=largest) == expected
