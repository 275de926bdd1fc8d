"""What every sandbox promises: the limits, the result, the errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from atroposlib.errors import AtroposError

__all__ = [
    "Ending",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailableError",
]

Ending = Literal["exit", "wall_time", "cpu_time", "memory", "output", "signal"]
MEBIBYTE = 2**20


class SandboxError(AtroposError, RuntimeError):
    """The sandbox itself failed; the program may not have run."""


class SandboxUnavailableError(SandboxError):
    """No sandbox can be used on this machine; the message says what to install."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use.

    Raises:
        ValueError: a limit is not above zero.
    """

    wall_s: float = 10.0
    """Seconds until the program is killed, waiting included."""
    cpu_s: int = 5
    """Processor seconds of each of its processes."""
    memory_bytes: int = 512 * MEBIBYTE
    """Of each process; of all together too where control groups can be written."""
    max_processes: int = 16
    """Processes and threads alive at a time."""
    disk_bytes: int = 64 * MEBIBYTE
    """Of each folder it may write to; they live in memory and end with it."""
    output_bytes: int = MEBIBYTE
    """Of its standard output and of its standard error; more ends it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be a finite number above 0, not {value!r}")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended, and what it wrote."""

    exit_code: int | None
    """Of the program, 128 + the signal when one ended it; None when the sandbox ended it."""
    stdout: str
    """Up to `output_bytes`; bytes that are no UTF-8 are replaced."""
    stderr: str
    ended_by: Ending
    """`exit`: by itself, with whatever code; `signal`: by one; otherwise the limit it ran into."""
    duration_s: float

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ended_by == "exit" and self.exit_code == 0


class Sandbox(Protocol):
    """A place where a program has no network, no files of the machine and bounded means."""

    name: str

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a command in an empty folder and wait for its end; cancelling kills it.

        Args:
            command: the program and its arguments; the first is looked up on the sandbox's PATH.
            files: relative path -> content, put into the folder first.
            stdin: its standard input.
            limits: None for the sandbox's own.

        Raises:
            SandboxError: the sandbox could not be set up.
            ValueError: a path of `files` leaves the folder.
        """
