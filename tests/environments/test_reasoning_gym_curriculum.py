from __future__ import annotations

import pytest

from environments.reasoning_gym_environment.reasoning_gym_environment import Curriculum


def after(*accuracies: float) -> float:
    curriculum = Curriculum(target_accuracy=0.7)
    for accuracy in accuracies:
        curriculum.record("t", accuracy)
    return curriculum.complexity("t")


@pytest.mark.parametrize(
    ("accuracies", "complexity"),
    [
        ((), 0.3),
        ((1.0,), 0.4),
        ((0.0,), 0.2),
        ((0.8,), 0.35),
        ((0.5,), 0.25),
        ((0.7,), 0.3),
        # 0.3 + 0.05; then mean 0.75 with deviation 0.05: 0.05 * 0.95 more
        ((0.8, 0.7), 0.3975),
    ],
)
def test_complexity_moves_towards_the_target(
    accuracies: tuple[float, ...], complexity: float
) -> None:
    assert after(*accuracies) == pytest.approx(complexity)


def test_complexity_stays_between_zero_and_one() -> None:
    assert after(*[1.0] * 30) == 1.0
    assert after(*[0.0] * 30) == 0.0


def test_only_the_last_five_groups_count() -> None:
    curriculum = Curriculum(target_accuracy=0.7)
    for accuracy in (0, 0, 0, 1, 1, 1, 1, 1):
        curriculum.record("t", accuracy)

    assert curriculum.state()["accuracies"] == {"t": [1, 1, 1, 1, 1]}


def test_tasks_move_apart_and_metrics_name_them() -> None:
    curriculum = Curriculum(target_accuracy=0.7)
    curriculum.record("a", 1.0)
    curriculum.record("b", 0.0)

    assert curriculum.metrics() == pytest.approx(
        {"curriculum/a": 0.4, "curriculum/b": 0.2, "curriculum/mean_complexity": 0.3}
    )


def test_state_restores_the_curriculum() -> None:
    curriculum = Curriculum(target_accuracy=0.7)
    curriculum.record("a", 0.9)

    again = Curriculum(target_accuracy=0.7, **curriculum.state())

    assert again.state() == curriculum.state()
