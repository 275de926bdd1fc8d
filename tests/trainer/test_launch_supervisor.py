"""When one process of several fails, it is named and all end."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from example_trainer.launch import stack
from example_trainer.launch.stack import Supervisor, ending_signals
from example_trainer.processes import ManagedProcess, ProcessFailedError
from tests.trainer.running_command import without_coverage
from tests.trainer.test_processes import SLEEP, eventually, is_running


def make(name: str, folder: Path, code: str = SLEEP) -> ManagedProcess:
    return ManagedProcess(name, [sys.executable, "-c", code], log_path=folder / f"{name}.log")


def test_supervisor_exit_ends_every_process(tmp_path: Path) -> None:
    processes = [make(name, tmp_path) for name in ("a", "b", "c")]

    with Supervisor() as supervisor:
        for process in processes:
            supervisor.start(process)
        pids = [process.pid for process in processes]
        assert all(is_running(pid) for pid in pids)

    assert not any(is_running(pid) for pid in pids)


def test_supervisor_check_all_well_says_nothing(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        supervisor.start(make("a", tmp_path))

        supervisor.check()


def test_supervisor_check_killed_process_is_named_with_its_log(tmp_path: Path) -> None:
    victim = make("victim", tmp_path, "print('hello', flush=True); " + SLEEP)
    with Supervisor() as supervisor:
        supervisor.start(victim)
        assert eventually(lambda: victim.log_tail() == "hello")
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(timeout_s=60)

        with pytest.raises(ProcessFailedError, match=r"(?s)victim was killed by SIGKILL.*hello"):
            supervisor.check()


def test_supervisor_check_finished_process_is_a_failure_unless_allowed(tmp_path: Path) -> None:
    allowed, forbidden = make("allowed", tmp_path, "pass"), make("forbidden", tmp_path, "pass")
    with Supervisor() as supervisor:
        supervisor.start(allowed, may_finish=True)
        allowed.wait(timeout_s=60)
        supervisor.check()
        supervisor.start(forbidden)
        forbidden.wait(timeout_s=60)

        with pytest.raises(ProcessFailedError, match="forbidden ended with exit code 0"):
            supervisor.check()


def test_supervisor_check_allowed_to_finish_but_failed_is_named(tmp_path: Path) -> None:
    process = make("trainer", tmp_path, "raise SystemExit(4)")
    with Supervisor() as supervisor:
        supervisor.start(process, may_finish=True)
        process.wait(timeout_s=60)

        with pytest.raises(ProcessFailedError, match="trainer ended with exit code 4"):
            supervisor.check()


def test_supervisor_check_cause_that_ends_a_moment_later_is_named(tmp_path: Path) -> None:
    engine, trainer = make("engine", tmp_path), make("trainer", tmp_path, "raise SystemExit(1)")
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait(timeout_s=60)

    with Supervisor(clock=lambda: now, sleep=sleep) as supervisor:
        supervisor.start(engine)
        supervisor.start(trainer)
        trainer.wait(timeout_s=60)

        with pytest.raises(ProcessFailedError, match="engine was killed"):
            supervisor.check()


def test_supervisor_wait_another_process_ends_is_noticed(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        slow, other = make("slow", tmp_path), make("other", tmp_path, "raise SystemExit(2)")
        supervisor.start(other)
        supervisor.start(slow)
        other.wait(timeout_s=60)

        with pytest.raises(ProcessFailedError, match="other ended with exit code 2"):
            supervisor.wait_until_ready(slow, lambda: False, timeout_s=30)


class InterruptedDestructor:
    """Receives a signal in its destructor, where Python drops the exception of the handler."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_supervisor_check_raises_an_interruption_that_a_destructor_lost(
    number: signal.Signals, expected: type[BaseException]
) -> None:
    with Supervisor() as supervisor:
        with ending_signals():
            interrupted = InterruptedDestructor(number)
            del interrupted

            with pytest.raises(expected):
                supervisor.check()

        supervisor.check()


def import_interrupted(folder: Path) -> bool:
    """Receive SIGINT while a module is imported; returns whether the import was finished."""
    name = "interrupted_module"
    (folder / f"{name}.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\nis_whole = True\n"
    )
    return bool(importlib.import_module(name).is_whole)


@pytest.mark.parametrize(
    ("longest_s", "is_finished"), [(60.0, True), (0.0, False)], ids=["short import", "long import"]
)
def test_interruption_during_an_import_is_raised_after_it_or_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest_s: float, is_finished: bool
) -> None:
    monkeypatch.setattr(stack, "_LONGEST_IMPORT_S", longest_s)
    monkeypatch.syspath_prepend(tmp_path)
    finished = []

    def run() -> None:
        with ending_signals():
            finished.append(import_interrupted(tmp_path))
            threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        run()

    assert finished == [True] * is_finished
    sys.modules.pop("interrupted_module", None)


STUCK = """
import pathlib, sys, threading, time
from example_trainer.launch import stack
from example_trainer.processes import ManagedProcess

stack._LONGEST_END_S = float(sys.argv[2])
folder = pathlib.Path(sys.argv[1])
process = ManagedProcess("sleep", [sys.executable, "-c", sys.argv[3]], log_path=folder / "log")
lock = threading.Lock()
with stack.ending_signals(), stack.Supervisor() as supervisor:
    supervisor.start(process)
    try:
        print(process.pid, flush=True)
        time.sleep(600)
    finally:
        lock.acquire()
        print("stuck", flush=True)
        lock.acquire(timeout=float(sys.argv[4]))
"""


@pytest.mark.parametrize(
    ("longest_end_s", "stuck_s", "ending"),
    [
        pytest.param(0.0, 600.0, "ended at once; the other processes are ended as well", id="late"),
        pytest.param(600.0, 1.0, "KeyboardInterrupt", id="soon"),
    ],
)
def test_second_signal_ends_a_stuck_process_after_a_while_and_is_ignored_before(
    tmp_path: Path, longest_end_s: float, stuck_s: float, ending: str
) -> None:
    arguments = [str(tmp_path), str(longest_end_s), SLEEP, str(stuck_s)]
    program = subprocess.Popen(
        [sys.executable, "-c", STUCK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=without_coverage(os.environ),
    )
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    program.send_signal(signal.SIGINT)
    assert program.stdout.readline() == "stuck\n"

    program.send_signal(signal.SIGINT)

    _, errors = program.communicate(timeout=60)
    assert program.returncode in (130, -signal.SIGINT)
    assert ending in errors
    assert eventually(lambda: not is_running(pid))
