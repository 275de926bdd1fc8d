"""A run of several processes under way, and the processes it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

MARK = "ATROPOS_TEST_MARK"
LINUX_ONLY = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
PATIENCE_S = 600.0


def without_coverage(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a Python process that coverage.py does not measure.

    Its tracer locks around its own Python code. If a signal handler raises an exception there, the
    lock stays held, and the process waits for it forever.
    """
    return {name: value for name, value in variables.items() if not name.startswith("COVERAGE_")}


class RunningCommand:
    """A command under way; every process it starts inherits a mark to be found by."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.mark = uuid.uuid4().hex
        self.output = folder / "run"
        self.log = folder / "said.log"
        self.descendants: set[int] = set()
        self.births: set[tuple[int, str]] = set()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *map(str, words)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={
                    **without_coverage(os.environ),
                    **{MARK: self.mark, "PYTHONUNBUFFERED": "1"},
                },
            )

    def wait_for(self, text: str) -> None:
        """Wait until the command has said `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        try:
            return self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE_S:g} s:\n{self.said()}") from None

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def relatives(self) -> dict[int, str]:
        """Return the names of living processes that the command or one of its children started.

        Found by the mark in their environment, or by their descent from it at an earlier
        call: vLLM writes its process titles over the environment shown in /proc.
        """
        living = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                pid = int(folder.name)
                name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
                state, parent, *fields = rest.split()
                birth = (pid, fields[17])
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                if marked or int(parent) in self.descendants or birth in self.births:
                    self.descendants.add(pid)
                    self.births.add(birth)
                    command = (folder / "cmdline").read_bytes().decode(errors="replace")
                    if state != "Z" and pid != self.process.pid:
                        living[pid] = command.replace("\0", " ") or name
        return living

    def kill_part(self, piece_of_command: str) -> None:
        """Kill -9 the process itself, not its guardian."""
        pids = [
            pid
            for pid, command in self.relatives().items()
            if piece_of_command in command and "process_guardian" not in command
        ]
        os.kill(min(pids), signal.SIGKILL)

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 60.0
        while left := self.relatives():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@contextlib.contextmanager
def running(folder: Path, *words: object) -> Iterator[RunningCommand]:
    """Run `python -m` with these words in this folder, and end all its processes."""
    command = RunningCommand(folder, *words)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()
        for pid in command.relatives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
