"""The watch over the processes an engine runs on, with stand-ins that carry its titles."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from example_trainer.demo.engine_watch import EngineWatch
from example_trainer.processes import ManagedProcess, ProcessFailedError

ENGINE = "(exec -a VLLM::Worker sleep 60) & (exec -a helper sleep 60) & wait; sleep 60"


def child_of(engine: ManagedProcess, title: str) -> psutil.Process:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for child in psutil.Process(engine.pid).children(recursive=True):
            if child.cmdline()[:1] == [title]:
                return child
        time.sleep(0.01)
    raise AssertionError(f"{title} did not start")


def test_engine_watch_lost_process_is_named_and_others_do_not_count(tmp_path: Path) -> None:
    with ManagedProcess("engine", ["bash", "-c", ENGINE], log_path=tmp_path / "log") as engine:
        worker, helper = child_of(engine, "VLLM::Worker"), child_of(engine, "helper")
        watch = EngineWatch(engine)

        helper.kill()
        watch.check()
        worker.kill()
        worker.wait(timeout=10)

        with pytest.raises(ProcessFailedError, match=r"lost its process VLLM::Worker"):
            watch.check()
