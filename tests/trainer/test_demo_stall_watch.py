"""A training that stands still is noticed, and the right part is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_trainer.demo.stall_watch import StallWatch
from example_trainer.processes import ManagedProcess, ProcessFailedError
from tests.trainer.test_processes import SLEEP


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[ManagedProcess]:
    with ManagedProcess(
        "trainer", [sys.executable, "-c", SLEEP], log_path=tmp_path / "trainer.log"
    ) as process:
        yield process


def test_stall_watch_steps_go_on_says_nothing(trainer: ManagedProcess) -> None:
    clock = Clock()
    watch = StallWatch(100.0, clock=clock)

    for num_steps in range(5):
        clock.now += 99.0
        watch.check(num_steps + 1, trainer=trainer, environment=trainer)


def test_stall_watch_no_step_for_too_long_names_the_trainer(trainer: ManagedProcess) -> None:
    clock = Clock()
    watch = StallWatch(100.0, clock=clock)
    clock.now = 50.0
    watch.check(1, trainer=trainer, environment=trainer)
    clock.now = 150.0

    with pytest.raises(ProcessFailedError, match="trainer has made no step for 100 s"):
        watch.check(1, trainer=trainer, environment=trainer)


def test_stall_watch_environment_ended_early_is_named_sooner(
    trainer: ManagedProcess, tmp_path: Path
) -> None:
    clock = Clock()
    watch = StallWatch(1000.0, clock=clock)
    environment = ManagedProcess(
        "environment", [sys.executable, "-c", "pass"], log_path=tmp_path / "environment.log"
    )
    environment.start()
    environment.wait(timeout_s=10)
    watch.check(0, trainer=trainer, environment=environment)
    clock.now = 61.0

    with pytest.raises(ProcessFailedError, match="environment ended, but the trainer has steps"):
        watch.check(0, trainer=trainer, environment=environment)
