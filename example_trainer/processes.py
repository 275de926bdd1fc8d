"""Child processes: start, monitor and log them, and end all their descendants.

Every command runs under a guardian (`process_guardian`) in its own session, and its output goes to
a log file. The command and its descendants end when `stop` is called, when this process dies in
any way, and when the command itself ends. Processes are never looked up by name or port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import AtroposError, MissingExtraError

_GUARDIAN = Path(__file__).with_name("process_guardian.py")
_START_TIMEOUT_S = 10.0
_TAIL_BYTES = 64 * 1024
_CAUSE_BYTES = 4 * 2**20
_CAUSE_LINES = 6
_CAUSE_CHARS = 800
_SERVER_PORTS = range(10_240, 32_768)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# As vLLM's loggers write: (EngineCore pid=7) ERROR 01-31 23:59:59 [core.py:1100] ValueError: ...
_LOG_PREFIX = re.compile(
    r"(\([\w ]+ pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b(:.*)?")
_COMPLAINT = re.compile(r"\S.{0,200}?: error: .+|\S*python[\d.]*: (No module named|Error while) .+")
_POINTS_ELSEWHERE = re.compile(
    r"root cause above|stack trace above|^(SystemExit|KeyboardInterrupt)\b"
)


class ProcessFailedError(AtroposError, RuntimeError):
    """A child process ended, or was not ready in time.

    The message contains the exception from its log, else the end of the log.
    """

    def __init__(self, process: ManagedProcess, reason: str) -> None:
        # A logged exception is not the cause if the process is running or was killed.
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
    """One command and its descendants.

    As a context manager it starts on entry and stops on exit.

    Example:
        ```python
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "8080"]
        with ManagedProcess("files", command, log_path=Path("logs/files.log")) as server:
            wait_until_ready(server, lambda: is_answering(8080), timeout_s=10)
        ```

    Args:
        name: Name for messages.
        command: Program and arguments.
        log_path: File to which stdout and stderr are appended; its folder is created.
        env: The complete environment of the command, by default that of this process.
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
        """Start the command; return once it runs.

        Raises:
            ProcessFailedError: The command cannot be executed.
            RuntimeError: It was started before.
        """
        if self._guardian is not None:
            raise RuntimeError(f"{self.name} was started before; create a new ManagedProcess")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Created first: when it is closed, for any reason, the guardian ends all processes.
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
            self.stop()  # it may only have been too slow
            raise ProcessFailedError(self, "could not be started")

    @property
    def pid(self) -> int:
        """Process id of the command, not of its guardian; raises before `start`."""
        if self._command_pid is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._command_pid

    @property
    def guardian_pid(self) -> int:
        """Process id of the guardian; raises before `start`."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Result of `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code (-n after signal n), None while it is running or not started."""
        if self._guardian is None or self._guardian.poll() is None:
            return None
        code = self._guardian.returncode
        if code < 0 and not self._swept:
            # The guardian was killed; the kernel has killed the command, but not its children.
            self._kill_group()
        self._swept = True
        return 128 - code if 128 < code < 128 + signal.NSIG else code

    def is_alive(self) -> bool:
        return self._guardian is not None and self.poll() is None

    def wait(self, *, timeout_s: float) -> int | None:
        """Wait for it to end; return the exit code, None after `timeout_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._started().wait(timeout=timeout_s)
        return self.poll()

    def request_stop(self, *, grace_s: float = 10.0) -> None:
        """Request SIGTERM, and SIGKILL after `grace_s` seconds, without waiting."""
        if self._control is not None and self.is_alive():
            with contextlib.suppress(OSError):  # it ended in between
                self._control.sendall(f"{grace_s}\n".encode())

    def stop(self, *, grace_s: float = 10.0) -> int | None:
        """End it with all its descendants, wait for that, and return the exit code; idempotent.

        SIGKILL follows SIGTERM after `grace_s` seconds.
        """
        if self._guardian is not None:
            self.request_stop(grace_s=grace_s)
            # Longer than the guardian's own limits: by then the guardian has failed.
            if self.wait(timeout_s=grace_s + 15.0) is None:
                self._kill_group()
                self._guardian.kill()
                self._guardian.wait()
        if self._control is not None:
            self._control.close()
            self._control = None
        return self.poll()

    def describe_exit(self) -> str:
        """Return a phrase such as "ended with exit code 1"."""
        code = self.poll()
        if code is None:
            return "is running" if self._guardian is not None else "was not started"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def log_tail(self, *, lines: int = 20) -> str:
        """Return the last lines logged since the start."""
        return "\n".join(self._logged(_TAIL_BYTES).rstrip().splitlines()[-lines:])

    def log_cause(self) -> str:
        """Return the exception that ended the process from its log, empty if there is none."""
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
        """Read the line that the guardian sends once the command runs; None if it ended before."""
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
        """Kill the remaining processes of the command's session, without the guardian."""
        if self._command_pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._command_pid, signal.SIGKILL)


def find_cause(log: str) -> str:
    """Return the exception with which a Python program's log ends, with its whole message.

    A program that starts others logs their exceptions and its own about them; the last one that
    does not refer to another is returned.
    """
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
    """Join the lines of an exception's message, of which pydantic's have several."""
    message = [lines[number].strip()]
    for line in lines[number + 1 : number + _CAUSE_LINES]:
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
    """Poll `is_ready` every `poll_s` seconds until it is true; return the seconds waited.

    `on_wait` is called with the seconds waited before each pause, and may raise to end the wait.

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
    """Find a free TCP port on `host` for a server that is started later."""
    return find_free_ports(1, host)[0]


def find_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Find `count` different free ports on `host`, which no other call finds for a minute.

    They lie below the ports that the system gives to outgoing connections. Otherwise any
    connection could take the port of a server before it starts, or while it is started again.

    Raises:
        OSError: `host` is not an address of this machine, or too few ports are free.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        if len(ports) == count:
            break
        if _reserve_port(host, port):
            ports.append(port)
    if len(ports) < count:
        raise OSError(errno.EADDRINUSE, f"{len(ports)} of {count} ports are free on {host}")
    return ports


def _reserve_port(host: str, port: int) -> bool:
    """Keep a port from other calls, of any process, until its server starts; False if it is taken.

    A closed connection stays in TIME_WAIT for about a minute. Meanwhile the port can be bound with
    SO_REUSEADDR only, which servers set and which is not set here.
    """
    with socket.socket() as listener:
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with (
            contextlib.suppress(OSError),  # where nothing connects, the port is free all the same
            socket.create_connection((host, port), timeout=1.0) as client,
        ):
            listener.accept()[0].close()
            client.recv(1)
    return True


def process_identity(pid: int) -> list[float]:
    """Return process id and start time, since ids are reused; time 0 if it has ended."""
    psutil = _psutil()
    try:
        return [pid, _start_of(psutil.Process(pid))]
    except psutil.NoSuchProcess:
        return [pid, 0.0]


def is_same_process(identity: Sequence[float]) -> bool:
    """Whether the process of a `process_identity` on this machine has not ended."""
    psutil = _psutil()
    pid, started = identity
    try:
        process = psutil.Process(int(pid))
        is_same = bool(abs(_start_of(process) - started) < 1)
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _start_of(process: Any) -> float:
    """Return the start time of a `psutil.Process`; on Linux the clock ticks since the boot.

    There, `create_time` changes for every process when the clock of the machine is set.
    """
    if not sys.platform.startswith("linux"):
        return float(process.create_time())
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # The name in parentheses may contain any character; the fields follow the last ")".
    return float(stat.rpartition(")")[2].split()[19])


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise MissingExtraError("psutil", extra="trainer") from error
    return psutil
