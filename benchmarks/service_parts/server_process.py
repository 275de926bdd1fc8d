"""Servers in other processes, optionally on one core, and their processor time and memory.

Run as a script, it is the baseline of all HTTP figures: the HTTP server of the service with an
application that reads each body and returns `{}`.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ServerProcess", "bare_server", "run_api", "run_server", "use_load_core"]

SERVER_CORE, LOAD_CORE = 0, 1
_START_S = 60

Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class ServerProcess:
    """A running server on 127.0.0.1."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def cpu_s(self) -> float:
        """Processor seconds used so far by all threads, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        ticks = sum(int(value) for value in fields.split()[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        """Resident memory of this process alone, without shared file pages."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024


def use_load_core() -> None:
    """Pin this process to the core the server does not use."""
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {LOAD_CORE})


@contextmanager
def run_api(*flags: str, core: int | None = SERVER_CORE) -> Iterator[ServerProcess]:
    """Run `run-api` on a free port, pinned to a core unless that is None."""
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", "0", *flags]
    with run_server(command, core=core) as server:
        yield server


@contextmanager
def bare_server() -> Iterator[ServerProcess]:
    """Run the baseline server, pinned like the service."""
    with run_server([sys.executable, __file__], core=SERVER_CORE) as server:
        yield server


@contextmanager
def run_server(command: Sequence[str], *, core: int | None = None) -> Iterator[ServerProcess]:
    """Run a server that prints its URL.

    Raises:
        SystemExit: The server did not print a URL; the message has its output.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    try:
        port = _announced_port(process)
        # A full pipe would block the server at its next log line.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield ServerProcess(port, process.pid)
    finally:
        end_process(process)


def end_process(process: subprocess.Popen[Any]) -> None:
    """Terminate a process, and kill it after 30 s."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _announced_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    deadline = time.monotonic() + _START_S
    output = ""
    while time.monotonic() < deadline and process.poll() is None:
        if not select.select([process.stdout], [], [], 0.2)[0]:
            continue
        line = process.stdout.readline()
        output += line
        if "http://" in line:
            address = line.partition("http://")[2].split()[0]
            return int(address.rpartition(":")[2].rstrip("/,."))
    raise SystemExit(f"the server did not start:\n{output}")


async def _bare_app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


if __name__ == "__main__":
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"bare server: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(_bare_app, log_level="error", lifespan="off")).run([listener])
