"""Parts that fail are started again with back-off, in their order, and all end together."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from example_trainer.cluster.parts import Part, Resources, RestartPolicy, Role
from example_trainer.cluster.placement import RunStatus
from example_trainer.cluster.supervision import RunSupervisor
from example_trainer.launch.stack import ending_signals
from example_trainer.processes import ManagedProcess, find_free_port
from tests.trainer.test_launch_supervisor import InterruptedDestructor
from tests.trainer.test_processes import is_running
from tests.viewer.waiting import wait_until

POLICY = RestartPolicy(attempts=2, first_backoff_s=0, longest_backoff_s=0, healthy_s=600)
SERVER = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(60)"


def part(
    name: str, code: str, *, role: Role = "trainer", after: tuple[str, ...] = (), **changes: object
) -> Part:
    made = Part(
        name=name,
        role=role,
        command=(sys.executable, "-S", "-c", code, name),
        variables={},
        resources=Resources(),
        ready_url=None,
        after=after,
        restarts=POLICY,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def supervise(
    parts: list[Part], folder: Path, on_change: Callable[[RunStatus], None] = lambda status: None
) -> tuple[RunStatus, list[str], list[ManagedProcess]]:
    """Run to the end; returns the last status, the events and every process that was made."""
    events: list[str] = []
    made: list[ManagedProcess] = []

    def make(part: Part) -> ManagedProcess:
        log = folder / f"{part.name}.log"
        made.append(ManagedProcess(part.name, part.command, log_path=log, cwd=folder))
        return made[-1]

    supervisor = RunSupervisor(
        parts, make, start_limit_s=30, on_event=events.append, on_change=on_change
    )
    return supervisor.run(), events, made


def test_run_finishes_with_its_trainer_and_ends_the_others(tmp_path):
    status, _, made = supervise(
        [
            part("environment", SERVER, role="environment"),
            part("trainer", "pass", after=("environment",)),
        ],
        tmp_path,
    )

    assert status.state == "finished"
    assert [each.state for each in status.parts] == ["stopped", "finished"]
    assert not any(is_running(process.pid) for process in made)


def test_full_disk_ends_no_run(tmp_path):
    written: list[RunStatus] = []
    events: list[str] = []
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(status: RunStatus) -> None:
        if len(events) < 2:
            raise full
        written.append(status)

    def print_line(line: str) -> None:
        events.append(line)
        raise full

    def make(part: Part) -> ManagedProcess:
        log = tmp_path / "log"
        return ManagedProcess(part.name, part.command, log_path=log, cwd=tmp_path)

    status = RunSupervisor(
        [part("trainer", "pass")], make, start_limit_s=30, on_event=print_line, on_change=write
    ).run()

    assert status.state == "finished"
    assert "the state of the run cannot be written: [Errno 28] No space left on device" in events
    assert written[-1] == status


def test_part_whose_log_cannot_be_opened_is_started_again(tmp_path):
    in_the_way = tmp_path / "logs"
    in_the_way.write_text("")

    def make(part: Part) -> ManagedProcess:
        log = in_the_way / "log"
        return ManagedProcess(part.name, part.command, log_path=log, cwd=tmp_path)

    events: list[str] = []

    def note(line: str) -> None:
        events.append(line)
        if in_the_way.is_file():
            in_the_way.unlink()

    status = RunSupervisor(
        [part("trainer", "pass")],
        make,
        start_limit_s=30,
        on_event=note,
        on_change=lambda status: None,
    ).run()

    assert (status.state, status.parts[0].restarts) == ("finished", 1)
    assert "trainer could not be started: " in events[0]


def test_killed_part_is_started_again(tmp_path):
    # The trainer ends once the environment has started twice.
    trainer = (
        "import os, time\n"
        "while not os.path.exists('environment') or os.path.getsize('environment') < 2:\n"
        "    time.sleep(0.05)"
    )
    made: list[int] = []

    def kill_first(status: RunStatus) -> None:
        [environment, _] = status.parts
        if environment.state == "running" and not made:
            counted = tmp_path / "environment"
            wait_until(lambda: counted.exists() and counted.stat().st_size)
            made.append(int(environment.detail.removeprefix("pid ")))
            os.kill(made[0], signal.SIGKILL)

    status, events, _ = supervise(
        [part("environment", SERVER, role="environment"), part("trainer", trainer)],
        tmp_path,
        kill_first,
    )

    assert status.state == "finished"
    assert status.parts[0].restarts == 1
    assert "environment was killed by SIGKILL; restart 1 in 0 s" in events


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interruption_that_a_destructor_lost_ends_the_run(tmp_path):
    states: list[str] = []

    def note(status: RunStatus) -> None:
        states.append(status.state)
        if len(states) == 1:
            InterruptedDestructor(signal.SIGTERM)

    with ending_signals(), pytest.raises(SystemExit) as caught:
        supervise([part("trainer", SERVER)], tmp_path, note)

    assert (caught.value.code, states[-1]) == (143, "stopped")


def test_run_fails_when_a_part_has_no_attempts_left(tmp_path):
    status, events, made = supervise(
        [
            part("environment", SERVER, role="environment"),
            part("trainer", "raise ValueError('no')"),
        ],
        tmp_path,
    )

    assert status.state == "failed"
    assert status.parts[1].restarts == 2
    assert "trainer ended with exit code 1: ValueError: no" in status.detail
    assert events[-1] == "trainer ended with exit code 1; not started again"
    assert not any(is_running(process.pid) for process in made)


def test_invalid_settings_are_not_tried_again(tmp_path):
    status, _, made = supervise([part("trainer", "raise SystemExit(2)")], tmp_path)

    assert (status.state, status.parts[0].restarts, len(made)) == ("failed", 0, 1)


def test_exit_2_is_tried_again_if_a_needed_part_does_not_answer(tmp_path):
    # The engine serves nothing when the trainer asks, as while it is started again.
    code = (
        "import os, sys, time\n"
        "first = not os.path.exists('trainer')\n"
        "open('trainer', 'a').close()\n"
        "while not os.path.exists('engine has ended'): time.sleep(0.05)\n"
        "sys.exit(2 if first else 0)"
    )
    engine = part("engine", SERVER, role="environment")
    needs = part("trainer", code, after=("engine",))
    supervisor_parts = [engine, needs]

    status, _, _ = supervise(supervisor_parts, tmp_path, _FailsOnce(tmp_path))

    assert status.state == "finished"
    assert status.parts[1].restarts == 1


class _FailsOnce:
    """Kills the first part after the first start of the second, and notes that it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_done = False

    def __call__(self, status: RunStatus) -> None:
        [engine, trainer] = status.parts
        if trainer.state == "running" and not self._is_done:
            self._is_done = True
            os.kill(int(engine.detail.removeprefix("pid ")), signal.SIGKILL)
        elif self._is_done and engine.state != "running":
            (self._folder / "engine has ended").touch()


def test_part_that_cannot_be_executed_is_named(tmp_path):
    broken = part("trainer", "", command=("/does/not/exist",))

    status, _, _ = supervise([broken], tmp_path)

    assert status.state == "failed"
    assert "could not be started" in status.detail


def test_engine_that_was_started_again_counts_as_running_after_its_return(tmp_path):
    port = find_free_port()
    serve = (
        "from http.server import HTTPServer, SimpleHTTPRequestHandler\n"
        f"HTTPServer(('127.0.0.1', {port}), SimpleHTTPRequestHandler).serve_forever()"
    )
    engine = part("engine", serve, role="engine", ready_url=f"http://127.0.0.1:{port}/")
    # The trainer ends once the engine has returned.
    trainer = "import os, time\nwhile not os.path.exists('returned'): time.sleep(0.05)"
    killed: list[int] = []

    def kill_first(status: RunStatus) -> None:
        if status.parts[0].state == "running" and not killed:
            killed.append(int(status.parts[0].detail.removeprefix("pid ")))
            os.kill(killed[0], signal.SIGKILL)

    def on_return(returned: Part) -> str:
        (tmp_path / "returned").touch()
        return f"{returned.name} has its weights"

    events: list[str] = []
    supervisor = RunSupervisor(
        [engine, part("trainer", trainer)],
        lambda each: ManagedProcess(
            each.name, each.command, log_path=tmp_path / each.name, cwd=tmp_path
        ),
        start_limit_s=30,
        on_event=events.append,
        on_change=kill_first,
        on_return=on_return,
    )

    status = supervisor.run()

    assert status.state == "finished"
    assert events.count("engine has its weights") == 1


def test_trainer_without_progress_is_started_again(tmp_path):
    hanging = part(
        "trainer",
        "import time; time.sleep(60)",
        progress_file=tmp_path / "metrics",
        stall_limit_s=0.5,
        restarts=replace(POLICY, attempts=1),
    )

    status, events, _ = supervise([hanging], tmp_path)

    assert status.state == "failed"
    assert events.count("trainer made no progress for 0.5 s; restart 1 in 0 s") == 1


def test_server_that_never_answers_has_failed(tmp_path):
    silent = part(
        "service",
        "import time; time.sleep(60)",
        role="service",
        ready_url="http://127.0.0.1:9/health",
        restarts=replace(POLICY, attempts=0),
    )
    events: list[str] = []

    def make(part: Part) -> ManagedProcess:
        return ManagedProcess(part.name, part.command, log_path=tmp_path / "log")

    now = iter(range(10_000))
    supervisor = RunSupervisor(
        [silent],
        make,
        start_limit_s=30,
        on_event=events.append,
        on_change=lambda status: None,
        clock=lambda: float(next(now)),
        sleep=lambda seconds: None,
    )

    status = supervisor.run()

    assert status.state == "failed"
    assert "service was not ready for 30 s" in status.detail
