"""A managed process and everything it started end together, whatever is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_trainer import process_guardian, processes
from example_trainer.processes import (
    ManagedProcess,
    ProcessFailedError,
    find_cause,
    find_free_port,
    find_free_ports,
    is_same_process,
    process_identity,
    wait_until_ready,
)

pytestmark = pytest.mark.slow

SLEEP = "import time; time.sleep(600)"
# A command with a child in its session, and one that left for a session of its own.
FAMILY = """
import pathlib, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
target = pathlib.Path(sys.argv[1])
target.with_suffix(".new").write_text(" ".join(map(str, pids)))
target.with_suffix(".new").rename(target)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
OWNER = """
import pathlib, sys, time
from example_trainer.processes import ManagedProcess
folder = pathlib.Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2], str(folder / "pids")]
process = ManagedProcess("family", command, log_path=folder / "log")
process.start()
(folder / "owner").write_text(f"{process.pid} {process.guardian_pid}")
time.sleep(600)
"""


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def eventually(claim: Callable[[], bool], *, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def read_pids(path: Path) -> list[int]:
    assert eventually(lambda: path.exists() and path.read_text() != "")
    return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[ManagedProcess, list[int]]]:
    """A running process and the ids of its two children."""
    command = python(FAMILY, str(tmp_path / "pids"))
    with ManagedProcess("family", command, log_path=tmp_path / "log") as process:
        yield process, read_pids(tmp_path / "pids")


def test_start_command_runs_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    process = ManagedProcess(
        "talker", python("print('hello'); raise SystemExit(3)"), log_path=tmp_path / "a" / "log"
    )

    process.start()

    assert process.wait(timeout_s=60) == 3
    assert process.describe_exit() == "ended with exit code 3"
    assert process.log_tail() == "hello"


def test_start_missing_program_raises_with_reason(tmp_path: Path) -> None:
    process = ManagedProcess("ghost", ["no-such-program"], log_path=tmp_path / "log")

    with pytest.raises(ProcessFailedError, match="no-such-program"):
        process.start()

    assert not process.is_alive()


def test_start_that_takes_too_long_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_START_TIMEOUT_S", 0.0)
    process = ManagedProcess("slow", python(SLEEP), log_path=tmp_path / "log")

    with pytest.raises(ProcessFailedError, match="could not be started"):
        process.start()

    assert not process.is_alive()


def test_start_uses_given_environment_and_folder(tmp_path: Path) -> None:
    code = "import os; print(os.environ['COLOUR'], os.getcwd())"
    env = {**os.environ, "COLOUR": "green"}
    process = ManagedProcess("env", python(code), log_path=tmp_path / "log", env=env, cwd=tmp_path)

    process.start()
    process.wait(timeout_s=60)

    assert process.log_tail() == f"green {tmp_path}"


def test_describe_exit_killed_command_names_the_signal(tmp_path: Path) -> None:
    with ManagedProcess("sleeper", python(SLEEP), log_path=tmp_path / "log") as process:
        os.kill(process.pid, signal.SIGKILL)

        assert process.wait(timeout_s=60) == -signal.SIGKILL
        assert process.describe_exit() == "was killed by SIGKILL"


def test_stop_ends_children_in_any_session(family: tuple[ManagedProcess, list[int]]) -> None:
    process, children = family

    process.stop(grace_s=5)

    assert not [pid for pid in (process.pid, *children) if is_running(pid)]


def test_kill_9_of_command_ends_children(family: tuple[ManagedProcess, list[int]]) -> None:
    process, children = family

    os.kill(process.pid, signal.SIGKILL)

    assert process.wait(timeout_s=60) == -signal.SIGKILL
    assert not [pid for pid in children if is_running(pid)]


def test_kill_9_of_guardian_ends_command_and_its_session(
    family: tuple[ManagedProcess, list[int]],
) -> None:
    process, children = family
    try:
        os.kill(process.guardian_pid, signal.SIGKILL)

        assert eventually(lambda: not process.is_alive())
        assert eventually(lambda: not is_running(process.pid) and not is_running(children[0]))
    finally:
        os.kill(children[1], signal.SIGKILL)  # left the session: nobody but the guardian finds it


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_owner_dies_everything_ends(tmp_path: Path, signum: signal.Signals) -> None:
    owner = subprocess.Popen(python(OWNER, str(tmp_path), FAMILY))
    everyone = [*read_pids(tmp_path / "pids"), *read_pids(tmp_path / "owner")]
    assert all(is_running(pid) for pid in everyone)

    owner.send_signal(signum)
    owner.wait(timeout=60)

    assert eventually(lambda: not any(is_running(pid) for pid in everyone))


def test_stop_stubborn_command_is_killed_after_grace(tmp_path: Path) -> None:
    process = ManagedProcess("stubborn", python(STUBBORN), log_path=tmp_path / "log")
    process.start()
    assert eventually(lambda: process.log_tail() == "ready")

    code = process.stop(grace_s=0.1)

    assert code == -signal.SIGKILL


def test_requests_to_stop_that_are_read_at_once_keep_their_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(process_guardian, "CONTROL_FD", theirs.fileno())
        ours.sendall(b"300.0\n300.0\n")

        assert process_guardian._read_request() == 300.0


def test_stop_polite_command_needs_no_grace(tmp_path: Path) -> None:
    process = ManagedProcess("sleeper", python(SLEEP), log_path=tmp_path / "log")
    process.start()

    assert process.stop(grace_s=60) == -signal.SIGTERM


def test_wait_until_ready_returns_when_the_answer_is_yes(tmp_path: Path) -> None:
    answers = iter([False, False, True])
    waits: list[float] = []
    with ManagedProcess("sleeper", python(SLEEP), log_path=tmp_path / "log") as process:
        wait_until_ready(
            process, lambda: next(answers), timeout_s=10, poll_s=0.001, on_wait=waits.append
        )

    assert len(waits) == 2


def test_wait_until_ready_process_ended_raises_with_log(tmp_path: Path) -> None:
    code = "print('out of memory'); raise SystemExit(1)"
    with (
        ManagedProcess("engine", python(code), log_path=tmp_path / "log") as process,
        pytest.raises(ProcessFailedError, match="exit code 1 before") as failure,
    ):
        wait_until_ready(process, lambda: False, timeout_s=30, poll_s=0.01)

    assert failure.value.process is process
    assert "out of memory" in str(failure.value)


def test_wait_until_ready_too_slow_raises(tmp_path: Path) -> None:
    with (
        ManagedProcess("engine", python(SLEEP), log_path=tmp_path / "log") as process,
        pytest.raises(ProcessFailedError, match=r"engine was not ready after 0\.02 s"),
    ):
        wait_until_ready(process, lambda: False, timeout_s=0.02, poll_s=0.01)


def test_log_tail_long_log_gives_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(50_000)))

    tail = ManagedProcess("quiet", ["true"], log_path=log).log_tail(lines=2)

    assert tail == "line 49998\nline 49999"


def test_free_ports_differ_and_are_not_those_of_outgoing_connections() -> None:
    ports = find_free_ports(50)

    assert len(set(ports)) == 50
    assert all(1024 <= port < 32768 for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_taken_ports_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ports = [listener.getsockname()[1], next(_unused_ports())]
        monkeypatch.setattr("example_trainer.processes._SERVER_PORTS", ports)

        with pytest.raises(OSError, match="1 of 2 ports are free"):
            find_free_ports(2)


def test_port_that_was_found_is_not_found_again_before_its_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("example_trainer.processes._SERVER_PORTS", list(_unused_ports())[:3])
    search = "from example_trainer import processes; processes._SERVER_PORTS = {}; "
    search += "print(processes.find_free_port())"

    first = find_free_port()
    command = [sys.executable, "-c", search.format(processes._SERVER_PORTS)]
    second = int(subprocess.run(command, capture_output=True, check=True).stdout)
    third = find_free_port("0.0.0.0")

    assert {first, second, third} == set(processes._SERVER_PORTS)
    with pytest.raises(OSError, match="0 of 1 ports are free"):
        find_free_port()
    for port in (first, second, third):
        with socket.create_server(("127.0.0.1", port)):
            pass


def _unused_ports() -> Iterator[int]:
    """Yield ports that nothing uses, out of those that no other test is given."""
    for port in random.sample(range(2_000, 10_000), 200):
        with socket.socket() as probe:
            is_unused = probe.connect_ex(("127.0.0.1", port)) != 0
        if is_unused:
            yield port


def test_free_port_of_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="address"):
        find_free_port("203.0.113.1")


ENGINE_LOG = """\
INFO 01-31 23:59:57 [api_server.py:80] vLLM API server version 0.1
Traceback (most recent call last):
  File "optional.py", line 1, in <module>
ImportError: cannot import name 'fast'
(EngineCore pid=7) ERROR 01-31 23:59:58 [core.py:1100] EngineCore failed to start.
(EngineCore pid=7) ERROR 01-31 23:59:58 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 01-31 23:59:58 [core.py:1100]   File "core.py", line 9, in run
(EngineCore pid=7) ERROR 01-31 23:59:58 [core.py:1100]     raise ValueError(
(EngineCore pid=7) ERROR 01-31 23:59:58 [core.py:1100] ValueError: available memory is too small
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "core.py", line 9, in run
(EngineCore pid=7) ValueError: available memory is too small
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "executor.py", line 4, in collective_rpc
(EngineCore pid=7) RuntimeError: Worker failed, see the stack trace above for the cause
(APIServer pid=5) Traceback (most recent call last):
(APIServer pid=5)   File "api_server.py", line 3, in <module>
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (ENGINE_LOG, "ValueError: available memory is too small"),
        (
            "Traceback (most recent call last):\n"
            '  File "a.py", line 1, in <module>\n'
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, model type `x` is not known [type=value_error]\n"
            "    For further information visit https://example.org\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, model type `x` is not known [type=value_error]",
        ),
        (
            "Traceback (most recent call last):\nKeyError: 'a'\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\nOSError: no config.json\nin ./here\n",
            "OSError: no config.json",
        ),
        (
            "usage: api_server.py [--port PORT]\n"
            "api_server.py: error: unrecognized arguments: --prot 1\n",
            "api_server.py: error: unrecognized arguments: --prot 1",
        ),
        (
            "env.py: UserWarning: an engine\natropos-env dataset:a.jsonl: error: no such reward\n",
            "atropos-env dataset:a.jsonl: error: no such reward",
        ),
        (
            "/usr/bin/python3: No module named vllm\n",
            "/usr/bin/python3: No module named vllm",
        ),
        ("ready\nValueError: quoted, without a traceback\n", ""),
        ("", ""),
    ],
    ids=["engine", "pydantic", "chain", "argparse", "words", "module", "no traceback", "empty"],
)
def test_cause_is_the_exception_that_says_what_happened(log: str, cause: str) -> None:
    assert find_cause(log) == cause


def test_failure_names_the_cause_from_the_log_of_this_start_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\nValueError: of an earlier start\n")
    script = "raise OSError('no such folder: ./model')"
    process = ManagedProcess("engine", [sys.executable, "-c", script], log_path=log)

    process.start()
    with pytest.raises(ProcessFailedError) as failure:
        wait_until_ready(process, lambda: False, timeout_s=60)
    process.stop()

    assert str(failure.value) == (
        "engine ended with exit code 1 before it was ready: OSError: no such folder: ./model "
        f"(log: {log})"
    )
    assert "earlier" not in process.log_tail()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a clock of Linux")
def test_process_is_the_same_after_the_clock_of_the_machine_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    psutil = pytest.importorskip("psutil")
    identity = process_identity(os.getpid())
    booted_at = psutil.boot_time()
    # The kernel moves the time of the boot with the clock.
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_at + 3600)

    assert is_same_process(identity)
    assert not is_same_process([os.getpid(), identity[1] + 60])
