"""A service in a process of its own, pinned to one core, and what the system says of it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SERVER_CORE", "ServerProcess", "bare_server", "run_api", "use_load_core"]

SERVER_CORE, LOAD_CORE = 0, 1
_START_S = 30
_BARE = Path(__file__).with_name("bare_app.py")


@dataclass(frozen=True)
class ServerProcess:
    """A running server: where it listens, and its process id."""

    port: int
    pid: int

    @property
    def cpu_s(self) -> float:
        """Processor seconds used so far, all threads, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        ticks = sum(int(value) for value in fields.split()[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        """Resident memory that belongs to this process alone (no shared file pages)."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024


def use_load_core() -> None:
    """Pin this process to the core the server does not use."""
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {LOAD_CORE})


@contextmanager
def run_api(*flags: str) -> Iterator[ServerProcess]:
    """Run `run-api` on a free port."""
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", "0", *flags]
    with _pinned(command) as server:
        yield server


@contextmanager
def bare_server() -> Iterator[ServerProcess]:
    """Run the same HTTP server with an application that reads bodies and does nothing else."""
    with _pinned([sys.executable, str(_BARE)]) as server:
        yield server


@contextmanager
def _pinned(command: Sequence[str]) -> Iterator[ServerProcess]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    os.sched_setaffinity(process.pid, {SERVER_CORE})
    try:
        port = _announced_port(process)
        # A full pipe would stop the server at its next log line.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield ServerProcess(port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _announced_port(process: subprocess.Popen[str]) -> int:
    """Read `http://HOST:PORT` from the first lines of the server's output.

    Raises:
        SystemExit: the server did not say where it listens; its output is shown.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + _START_S
    said = ""
    while time.monotonic() < deadline and process.poll() is None:
        if not select.select([process.stdout], [], [], 0.2)[0]:
            continue
        line = process.stdout.readline()
        said += line
        if "http://" in line:
            address = line.partition("http://")[2].split()[0]
            return int(address.rpartition(":")[2].rstrip("/"))
    raise SystemExit(f"the server did not start:\n{said}")
