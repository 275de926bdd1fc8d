"""Child processes with one owner: started, watched, logged, and never left behind.

Every command runs behind a guardian (`process_guardian`) in a session of its own, its output goes
to a log file. The command and everything it started end when `stop` is called, when the owner
dies in any way, and when the command itself ends; nothing is ever found by name or port.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atroposlib.errors import AtroposError

_GUARDIAN = Path(__file__).with_name("process_guardian.py")
_START_TIMEOUT_S = 10.0
_TAIL_BYTES = 64 * 1024
_CAUSE_BYTES = 4 * 2**20
_CAUSE_LINES = 6
_CAUSE_CHARS = 800
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# As vLLM's loggers write: (EngineCore pid=7) ERROR 01-31 23:59:59 [core.py:1100] ValueError: ...
_LOG_PREFIX = re.compile(
    r"(\([\w ]+ pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b(:.*)?")
_COMPLAINT = re.compile(r"\S+: error: .+|\S*python[\d.]*: (No module named|Error while) .+")
_POINTS_ELSEWHERE = re.compile(
    r"root cause above|stack trace above|^(SystemExit|KeyboardInterrupt)\b"
)


class ProcessFailedError(AtroposError, RuntimeError):
    """A child process ended, or was not ready in time; the message names the cause it logged.

    Where the log holds no cause the message shows the end of it.

    Attributes:
        process: The process that failed.
    """

    def __init__(self, process: ManagedProcess, reason: str) -> None:
        # An exception that was logged says nothing about a process that runs, or was killed.
        cause = process.log_cause() if (process.poll() or 0) > 0 else ""
        tail = process.log_tail() or "(the log is empty)"
        super().__init__(
            f"{process.name} {reason}: {cause} (log: {process.log_path})"
            if cause
            else f"{process.name} {reason}; the end of its log ({process.log_path}):\n{tail}"
        )
        self.process = process
        self.reason = reason


class ManagedProcess:
    """One command, from its start to the end of its last descendant.

    Used as a context manager it starts on entry and stops on exit.

    Example:
        ```python
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "8080"]
        with ManagedProcess("files", command, log_path=Path("logs/files.log")) as server:
            wait_until_ready(server, lambda: is_answering(8080), timeout_s=10)
        ```

    Args:
        name: What messages call it.
        command: Program and arguments.
        log_path: Where stdout and stderr go; its folder is made, an existing log is appended to.
        env: The whole environment of the command, by default that of this process.
        cwd: Working directory, by default that of this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self._env = dict(env) if env is not None else None
        self._cwd = cwd
        self._guardian: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._command_pid: int | None = None
        self._swept = False
        self._log_start = 0

    def start(self) -> None:
        """Start the command; returns once it runs.

        Raises:
            ProcessFailedError: The command cannot be executed.
            RuntimeError: It was started before.
        """
        if self._guardian is not None:
            raise RuntimeError(f"{self.name} was started before; make a new ManagedProcess")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Held before anything runs: once it closes, for whatever reason, the guardian ends all.
        self._control, theirs = socket.socketpair()
        with theirs, self.log_path.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARDIAN), *self.command],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        self._command_pid = self._receive_command_pid(self._control)
        if self._command_pid is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guardian.wait(timeout=_START_TIMEOUT_S)
            raise ProcessFailedError(self, "could not be started")

    @property
    def pid(self) -> int:
        """Process id of the command itself (not of its guardian); raises before `start`."""
        if self._command_pid is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._command_pid

    @property
    def guardian_pid(self) -> int:
        """Process id of the guardian; raises before `start`."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Exit code as `subprocess` has it (-n after signal n), None while running or unstarted."""
        return self.poll()

    def poll(self) -> int | None:
        """Check whether it has ended, never waiting; see `returncode`."""
        if self._guardian is None or self._guardian.poll() is None:
            return None
        code = self._guardian.returncode
        if code < 0 and not self._swept:
            # The guardian was killed; the kernel took the command with it, not its children.
            self._kill_group()
        self._swept = True
        return 128 - code if 128 < code < 128 + signal.NSIG else code

    def is_alive(self) -> bool:
        """Say whether it was started and has not ended."""
        return self._guardian is not None and self.poll() is None

    def wait(self, *, timeout_s: float) -> int | None:
        """Wait for it to end; None when `timeout_s` seconds were not enough."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._started().wait(timeout=timeout_s)
        return self.poll()

    def request_stop(self, *, grace_s: float = 10.0) -> None:
        """Ask it to end with SIGTERM, and kill it after `grace_s` seconds, without waiting."""
        if self._control is not None and self.is_alive():
            with contextlib.suppress(OSError):  # it ended in between
                self._control.sendall(f"{grace_s}\n".encode())

    def stop(self, *, grace_s: float = 10.0) -> int | None:
        """End it with all its descendants and wait until they are gone; harmless when it ended.

        SIGKILL follows SIGTERM after `grace_s` seconds. Returns the exit code, None if unstarted.
        """
        if self._guardian is not None:
            self.request_stop(grace_s=grace_s)
            # Longer than the guardian's own limits: past them the guardian itself is at fault.
            if self.wait(timeout_s=grace_s + 15.0) is None:
                self._kill_group()
                self._guardian.kill()
                self._guardian.wait()
        if self._control is not None:
            self._control.close()
            self._control = None
        return self.poll()

    def describe_exit(self) -> str:
        """Say in words how it ended, as in "ended with exit code 1"."""
        code = self.poll()
        if code is None:
            return "is running" if self._guardian is not None else "was not started"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def log_tail(self, *, lines: int = 20) -> str:
        """Return the last lines that were logged since the start, empty if nothing was."""
        return "\n".join(self._logged(_TAIL_BYTES).rstrip().splitlines()[-lines:])

    def log_cause(self) -> str:
        """Return the exception that ended the process as its log has it, empty where it has none.

        A Python program that starts others logs several: theirs, and its own that they failed.
        The last that says what happened counts, with the lines that belong to its message.
        """
        return find_cause(self._logged(_CAUSE_BYTES))

    def _logged(self, limit_bytes: int) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - limit_bytes))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def __enter__(self) -> ManagedProcess:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._guardian is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._guardian

    def _receive_command_pid(self, control: socket.socket) -> int | None:
        """Read the line the guardian sends once the command runs; None when it ended before."""
        line = b""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not line.endswith(b"\n"):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([control], [], [], remaining_s)[0]:
                return None
            chunk = control.recv(64)
            if not chunk:
                return None
            line += chunk
        return int(line)

    def _kill_group(self) -> None:
        """Kill what is left in the session of the command; only needed without a guardian."""
        if self._command_pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._command_pid, signal.SIGKILL)


def find_cause(log: str) -> str:
    """Return the exception a log of a Python program ends with; see `ManagedProcess.log_cause`."""
    lines = [_LOG_PREFIX.sub("", _COLOR.sub("", line), count=1) for line in log.splitlines()]
    cause = ""
    is_in_traceback = False
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            is_in_traceback = True
        elif is_in_traceback and line[:1].strip() and _EXCEPTION.match(line):
            is_in_traceback = False
            if not _POINTS_ELSEWHERE.search(line):
                cause = _message_at(lines, number)
        elif not is_in_traceback and _COMPLAINT.fullmatch(line):
            cause = line
    return cause if len(cause) <= _CAUSE_CHARS else f"{cause[:_CAUSE_CHARS]} ..."


def _message_at(lines: Sequence[str], number: int) -> str:
    """Join the lines of an exception's message: up to an empty one or one of another kind."""
    message = [lines[number].strip()]
    for line in lines[number + 1 : number + _CAUSE_LINES]:
        # pydantic indents what it found wrong; other messages have a line break now and then.
        if not line.startswith("  ") or line.lstrip().startswith("For further information"):
            break
        message.append(line.strip())
    return " ".join(message)


def wait_until_ready(
    process: ManagedProcess,
    is_ready: Callable[[], bool],
    *,
    timeout_s: float,
    poll_s: float = 0.25,
    on_wait: Callable[[float], None] | None = None,
) -> float:
    """Wait until a started process answers as it should; returns the seconds that took.

    Args:
        process: What is waited for.
        is_ready: Asked again and again; should answer within seconds and not raise.
        timeout_s: Seconds after which waiting ends.
        poll_s: Seconds between two questions.
        on_wait: Called with the seconds waited so far, before each pause. What it raises ends
            the wait.

    Raises:
        ProcessFailedError: The process ended, or was not ready in time.
    """
    started = time.monotonic()
    while True:
        waited_s = time.monotonic() - started
        if not process.is_alive():
            raise ProcessFailedError(process, f"{process.describe_exit()} before it was ready")
        if is_ready():
            return waited_s
        if waited_s >= timeout_s:
            raise ProcessFailedError(process, f"was not ready after {timeout_s:g} s")
        if on_wait is not None:
            on_wait(waited_s)
        time.sleep(poll_s)


def find_free_port(host: str = "127.0.0.1") -> int:
    """Find a TCP port on `host` that nothing listens on now, by binding it and letting it go."""
    return find_free_ports(1, host)[0]


def find_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Find `count` different free ports; see `find_free_port`."""
    with contextlib.ExitStack() as probes:
        ports = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
    return ports
