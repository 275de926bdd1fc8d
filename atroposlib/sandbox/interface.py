"""The interface of a sandbox: limits, result, errors, and the files of a program."""

from __future__ import annotations

import contextlib
import errno
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
    "as_bytes",
    "checked_path",
    "content_fd",
    "run_python",
]

Ending = Literal["exit", "wall_time", "cpu_time", "memory", "output", "signal"]
MEBIBYTE = 2**20


class SandboxError(AtroposError, RuntimeError):
    """The sandbox itself failed; the program may not have run."""


class SandboxUnavailableError(SandboxError):
    """A sandbox cannot be used on this machine; the message has the reason and the remedy."""


@dataclass(frozen=True)
class SandboxLimits:
    """The resources of one program.

    Raises:
        ValueError: a limit is not above zero.
    """

    wall_s: float = 10.0
    """Wall-clock seconds until the program is killed."""
    cpu_s: int = 5
    """CPU seconds of each process."""
    memory_bytes: int = 512 * MEBIBYTE
    """Memory of each process, and of all processes together if control groups are writable."""
    max_processes: int = 16
    """Number of concurrent processes and threads."""
    disk_bytes: int = 64 * MEBIBYTE
    """Size of each writable folder; they are in memory and removed at the end."""
    output_bytes: int = MEBIBYTE
    """Size of standard output and of standard error; a program that writes more is ended."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be a finite number above 0, not {value!r}")


@dataclass(frozen=True)
class SandboxResult:
    """The ending of a program, and its output."""

    exit_code: int | None
    """Exit code, 128 + n after signal n; None if the sandbox ended the program."""
    stdout: str
    """Up to `output_bytes`; invalid UTF-8 is replaced."""
    stderr: str
    ended_by: Ending
    """`exit` with any code, `signal`, or the limit that the program exceeded."""
    duration_s: float

    @property
    def is_success(self) -> bool:
        return self.ended_by == "exit" and self.exit_code == 0


class Sandbox(Protocol):
    """Runs programs without network, without files of the machine, and with bounded resources."""

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
            command: program and arguments; the program is looked up on the PATH of the sandbox.
            files: contents of files in the folder, by relative path.
            stdin: standard input.
            limits: limits; None takes the defaults of the sandbox.

        Raises:
            SandboxError: the sandbox could not be set up.
            ValueError: a path of `files` is outside the folder.
        """


PYTHON = ("/usr/bin/python3", "-I", "-B")
"""Interpreter in a sandbox: that of the system, without packages and settings of the user."""


async def run_python(
    sandbox: Sandbox,
    source: str,
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """Run a Python program, which becomes the file `main.py`; see `Sandbox.run`."""
    return await sandbox.run(
        [*PYTHON, "main.py"],
        files={**(files or {}), "main.py": source},
        stdin=stdin,
        limits=limits,
    )


SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def checked_path(path: str) -> str:
    """Return a normalized relative path.

    Raises:
        ValueError: the path is empty, absolute, has a NUL or leads outside the folder.
    """
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(
            f"files: expected a relative path within the sandbox's folder, got {path!r}"
        )
    return str(pure)


def as_bytes(content: str | bytes) -> bytes:
    """Return content as bytes; text as UTF-8, lone surrogates included."""
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content


@contextlib.contextmanager
def content_fd(content: str | bytes) -> Iterator[int]:
    """Provide content in memory as a file descriptor that another process can only read."""
    fd = _sealed_fd(as_bytes(content))
    try:
        yield fd
    finally:
        os.close(fd)


_SEAL_ATTEMPTS = 5


def _sealed_fd(content: bytes, *, attempts: int = _SEAL_ATTEMPTS) -> int:
    """Return a descriptor of sealed memory, at its start.

    The kernel refuses to seal memory while it moves one of its pages, which takes a fresh copy.
    """
    fd = os.memfd_create("sandbox-file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException as error:
        os.close(fd)
        is_busy = isinstance(error, OSError) and error.errno == errno.EBUSY
        if not is_busy or attempts <= 1:
            raise
        return _sealed_fd(content, attempts=attempts - 1)
    return fd
