"""The interface of every sandbox: limits, result, errors, and the files of a program."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Literal, Protocol

from atroposlib.errors import AtroposError

__all__ = [
    "PYTHON",
    "Ending",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailableError",
    "checked_path",
    "content_fd",
    "run_python",
]

Ending = Literal["exit", "wall_time", "cpu_time", "memory", "output", "signal"]
MEBIBYTE = 2**20


class SandboxError(AtroposError, RuntimeError):
    """The sandbox itself failed; the program may not have run."""


class SandboxUnavailableError(SandboxError):
    """No sandbox can be used on this machine; the message says what to install."""


@dataclass(frozen=True)
class SandboxLimits:
    """The resources of one program.

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
    """The ending of a program, and its output."""

    exit_code: int | None
    """Of the program, 128 + the signal when one ended it; None when the sandbox ended it."""
    stdout: str
    """Up to `output_bytes`; bytes that are no UTF-8 are replaced."""
    stderr: str
    ended_by: Ending
    """`exit`: by itself, with any code; `signal`: by one; otherwise the limit it exceeded."""
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


PYTHON = ("/usr/bin/python3", "-I", "-B")
"""The interpreter a sandbox sees: the system's, without the user's packages and settings."""


async def run_python(
    sandbox: Sandbox,
    source: str,
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """Run a Python program, given as its text.

    Args:
        sandbox: where.
        source: the program; it becomes `main.py` in the sandbox's folder.
        stdin: its standard input.
        files: further files in its folder, relative path -> content.
        limits: None for the sandbox's own.

    Raises:
        SandboxError: the sandbox could not be set up.
    """
    return await sandbox.run(
        [*PYTHON, "main.py"],
        files={**(files or {}), "main.py": source},
        stdin=stdin,
        limits=limits,
    )


SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def checked_path(path: str) -> str:
    """Return a relative path within the folder.

    Raises:
        ValueError: it is empty, absolute, has a NUL or leads out of the folder.
    """
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(
            f"files: expected a relative path within the sandbox's folder, got {path!r}"
        )
    return str(pure)


@contextlib.contextmanager
def content_fd(content: str | bytes) -> Iterator[int]:
    """Provide content in memory as a file descriptor that another process can only read."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    fd = os.memfd_create("sandbox-file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
