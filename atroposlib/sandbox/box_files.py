"""The files put into a sandbox's folder: their names, and their content without a host file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import PurePosixPath

__all__ = ["checked_path", "content_fd"]

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def checked_path(path: str) -> str:
    """Return a relative path within the folder.

    Raises:
        ValueError: it is empty, absolute, has a NUL or leads out of the folder.
    """
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"files: {path!r} is no relative path within the sandbox's folder")
    return str(pure)


@contextlib.contextmanager
def content_fd(content: str | bytes) -> Iterator[int]:
    """Hold some content in memory behind a file descriptor, for another process to read only."""
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
