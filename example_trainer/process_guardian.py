"""Run one command, then end every process that it started.

A guardian is the parent of each command that a program starts (see `processes.ManagedProcess`):

    program --control socket--> guardian --own session--> command --> its children, in any session

The command gets SIGTERM, then SIGKILL, when the program requests it, when the program dies in any
way (the control socket is closed, or the guardian's parent changes), and when the guardian gets
SIGTERM. When the command ends for any reason, including SIGKILL, its remaining children are ended
too: on Linux the guardian is a "child subreaper", so that orphans become its own children. If the
guardian is killed, the kernel kills the command.

Only the standard library is imported, so that a guardian starts in about 30 ms. The file is run as
a script. Exit codes: that of the command; 128 + n after signal n; 127 if the command could not be
started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CONTROL_FD = 0
COULD_NOT_START = 127
ORPHAN_GRACE_S = 2.0
PARENT_GONE_GRACE_S = 3.0
POLL_S = 0.25
SWEEP_LIMIT_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """Run the command `argv` and return the exit code for this process.

    The process id of the command is written to the control socket as one line. A line with a
    number, read from it, requests to stop the command, with that grace period in seconds.
    """
    prctl = _load_prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup_fd, stop_signals = _listen_for_signals()
    try:
        command = _start(argv, prctl)
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]!r}: {error}\n")
        return COULD_NOT_START
    with contextlib.suppress(OSError):  # the loop detects a dead parent
        os.write(CONTROL_FD, f"{command.pid}\n".encode())
    status = _watch(command.pid, wakeup_fd, stop_signals)
    _end_orphans(command.pid)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _load_prctl() -> Callable[[int, int], object] | None:
    """Return Linux's `prctl`, None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return lambda option, value: library.prctl(option, value, 0, 0, 0)


def _listen_for_signals() -> tuple[int, list[int]]:
    """Return a file descriptor that becomes readable on a signal, and the list of stop signals."""
    received: list[int] = []
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda signum, _frame: received.append(signum))
    return read_fd, received


def _start(argv: list[str], prctl: Callable[[int, int], object] | None) -> subprocess.Popen[bytes]:
    """Start the command in its own session; the kernel kills it if this process is killed."""

    def die_with_guardian() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # preexec_fn is safe here: this process has one thread.
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_guardian
    )


def _watch(command_pid: int, wakeup_fd: int, stop_signals: list[int]) -> int:
    """Wait for the command to end, or end it on request; return its wait status."""
    parent_pid = os.getppid()
    readable = [CONTROL_FD, wakeup_fd]
    kill_at: float | None = None
    while True:
        status = _reap(command_pid)
        if status is not None:
            return status
        ready, _, _ = select.select(readable, [], [], POLL_S)
        if wakeup_fd in ready:
            os.read(wakeup_fd, 512)
        grace_s = _read_request() if CONTROL_FD in ready else None
        if grace_s is None and (stop_signals or os.getppid() != parent_pid):
            grace_s = PARENT_GONE_GRACE_S
        if grace_s is not None and kill_at is None:
            kill_at = time.monotonic() + grace_s
            readable = [wakeup_fd]  # a closed socket is always readable
            _signal(command_pid, signal.SIGTERM)
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal(command_pid, signal.SIGKILL)


def _read_request() -> float:
    """Read the requested grace period in seconds; the parent's death counts as a request."""
    try:
        line = os.read(CONTROL_FD, 64)
    except OSError:
        line = b""
    try:
        return float(line.partition(b"\n")[0])  # a second request may follow
    except ValueError:
        return PARENT_GONE_GRACE_S


def _reap(command_pid: int) -> int | None:
    """Reap every ended child; return the wait status of the command if it is one of them."""
    result = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return result
        if pid == 0:
            return result
        if pid == command_pid:
            result = status


def _end_orphans(command_pid: int) -> None:
    """End the remaining children: SIGTERM, a grace period, then SIGKILL until none is left."""
    started = time.monotonic()
    signum = signal.SIGTERM
    while time.monotonic() - started < SWEEP_LIMIT_S:
        _reap(command_pid)
        targets = _descendants(os.getpid())
        group_is_empty = not _signal_group(command_pid, signum)
        if not targets and group_is_empty:
            return
        for pid in targets:
            _signal(pid, signum)
        time.sleep(0.05)
        if time.monotonic() - started >= ORPHAN_GRACE_S:
            signum = signal.SIGKILL


def _descendants(root_pid: int) -> list[int]:
    """List the running descendants of `root_pid` from /proc; empty on other systems."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may contain any character; the fields follow the last ")".
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: list[int] = []
    frontier = [root_pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.extend(below)
        frontier.extend(below)
    return found


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _signal_group(pgid: int, signum: int) -> bool:
    """Signal a process group; return False if it is empty."""
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
