"""Failures of a run whose processes are alive are detected, and the cause is named."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from example_trainer.launch.stack import EngineWorkerWatch, TrainerStallWatch
from example_trainer.processes import ManagedProcess, ProcessFailedError
from tests.trainer.test_processes import SLEEP


class Clock:
    """A clock that advances on request."""

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
    watch = TrainerStallWatch(100.0, clock=clock)

    for num_steps in range(5):
        clock.now += 99.0
        watch.check(num_steps + 1, trainer=trainer, environments=[trainer])


def test_stall_watch_no_step_for_too_long_names_the_trainer(trainer: ManagedProcess) -> None:
    clock = Clock()
    watch = TrainerStallWatch(100.0, clock=clock)
    clock.now = 50.0
    watch.check(1, trainer=trainer, environments=[trainer])
    clock.now = 150.0

    with pytest.raises(ProcessFailedError, match="trainer has made no step for 100 s"):
        watch.check(1, trainer=trainer, environments=[trainer])


def test_stall_watch_environment_ended_early_is_named_sooner(
    trainer: ManagedProcess, tmp_path: Path
) -> None:
    clock = Clock()
    watch = TrainerStallWatch(1000.0, clock=clock)
    environment = ManagedProcess(
        "environment", [sys.executable, "-c", "pass"], log_path=tmp_path / "environment.log"
    )
    environment.start()
    environment.wait(timeout_s=60)
    watch.check(0, trainer=trainer, environments=[environment])
    clock.now = 61.0

    with pytest.raises(ProcessFailedError, match="environment ended, but the trainer has steps"):
        watch.check(0, trainer=trainer, environments=[environment])


# Stand-ins that carry the titles of an engine's processes.
ENGINE = "(exec -a VLLM::Worker sleep 600) & (exec -a helper sleep 600) & wait; sleep 600"


def child_of(engine: ManagedProcess, title: str) -> psutil.Process:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        for child in psutil.Process(engine.pid).children(recursive=True):
            if child.cmdline()[:1] == [title]:
                return child
        time.sleep(0.01)
    raise AssertionError(f"{title} did not start")


def test_engine_watch_lost_process_is_named_and_others_do_not_count(tmp_path: Path) -> None:
    with ManagedProcess("engine", ["bash", "-c", ENGINE], log_path=tmp_path / "log") as engine:
        worker, helper = child_of(engine, "VLLM::Worker"), child_of(engine, "helper")
        watch = EngineWorkerWatch(engine)

        helper.kill()
        watch.check()
        worker.kill()
        worker.wait(timeout=60)

        with pytest.raises(ProcessFailedError, match=r"lost its process VLLM::Worker"):
            watch.check()


# It does not wait for its child, which has ended and stays a zombie.
ENGINE_WITH_ZOMBIE = """
import os, time
if os.fork() == 0:
    os._exit(0)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the state of a zombie")
def test_engine_watch_ignores_a_child_that_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", ENGINE_WITH_ZOMBIE]
    with ManagedProcess("engine", command, log_path=tmp_path / "log") as engine:
        while not any(is_zombie(child) for child in psutil.Process(engine.pid).children()):
            time.sleep(0.01)

        EngineWorkerWatch(engine).check()


def is_zombie(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_ZOMBIE)


def test_engine_watch_leaves_an_ended_engine_to_its_supervisor(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "pass"]
    with ManagedProcess("engine", command, log_path=tmp_path / "log") as engine:
        engine.wait(timeout_s=60)

        EngineWorkerWatch(engine).check()
