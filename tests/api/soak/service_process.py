"""Services and a Redis in processes of their own, made to be killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from example_trainer.processes import find_free_port

__all__ = ["Process", "RedisServer", "Replica"]

_START_S = 120.0


class Process:
    """A command that can be killed and started again with the same arguments."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running incarnation."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the command and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self._command[:4]} did not start:\n{tail}")
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether the process serves."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)
            self._process.wait(timeout=30)


class Replica(Process):
    """A `run-api` that resumes its run whenever it is started."""

    def __init__(self, folder: Path, store: str, *, run: str = "soak", flags: tuple[str, ...] = ()):
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(self.port)]
        command += ["--store", store, "--data-dir", str(folder), "--run", run, *flags]
        super().__init__(command, folder / f"replica-{self.port}.log")

    def answers(self) -> bool:
        """Whether it is ready to take groups and give batches."""
        try:
            return httpx.get(self.url + "/health/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False


class RedisServer(Process):
    """A Redis that writes every command down before it answers."""

    binary = shutil.which("redis-server")

    def __init__(self, folder: Path) -> None:
        self.port = find_free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        options = {"bind": "127.0.0.1", "save": "", "appendonly": "yes", "appendfsync": "always"}
        command = [str(self.binary), "--port", str(self.port), "--dir", str(folder)]
        for name, value in options.items():
            command += [f"--{name}", value]
        super().__init__(command, folder / "redis.log")

    def answers(self) -> bool:
        """Whether it has loaded its data."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
