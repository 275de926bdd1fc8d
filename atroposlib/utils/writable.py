"""Writing of files: checks before work starts, locks, durable writes, the folder of caches."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from atroposlib.errors import ConfigError

__all__ = [
    "FULL_DISK",
    "cache_folder",
    "flush_to_disk",
    "lock_file",
    "naming_writes",
    "require_writable_file",
    "require_writable_folder",
    "unwritable",
    "write_file",
]

logger = logging.getLogger(__name__)

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of writing to a full disk, or beyond a quota or a limit."""


def cache_folder(name: str) -> Path:
    """Return the folder of a cache: `name` in `atropos` in `XDG_CACHE_HOME`, or in `~/.cache`.

    Raises:
        ConfigError: the user has no home folder, as in a container with a user of any number.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(named) if named else Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "this user has no home folder for caches; set HOME or XDG_CACHE_HOME to a folder"
        ) from None
    return caches / "atropos" / name


def require_writable_folder(folder: str | Path, setting: str | None, *, makes: bool = True) -> Path:
    """Return a folder after checking that files can be written to it.

    Args:
        folder: the folder.
        setting: setting of the folder for the message, such as `--save-path`; None for an argument
            without a flag.
        makes: Whether a missing folder is created; if not, it is checked that it could be.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    path = Path(folder)
    try:
        if makes:
            path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path if makes else _nearest_existing(path)):
            return path
    except OSError as error:
        raise unwritable(path, error, setting) from error


def require_writable_file(file: str | Path, setting: str) -> Path:
    """Return a file after checking that it can be written; a missing folder is created.

    Raises:
        ConfigError: the file cannot be written; `setting` is named in the message.
    """
    path = Path(file)
    try:
        if path.exists():
            with path.open("ab"):
                return path
    except OSError as error:
        raise unwritable(path, error, setting) from error
    require_writable_folder(path.parent, setting)
    return path


def lock_file(descriptor: int, path: str | Path, *, refusal: str) -> bool:
    """Lock an open file or folder against other processes until it is closed.

    Returns whether it is locked; some network file systems, and Windows, have no such locks.

    Raises:
        ConfigError: another process has locked it; `refusal` is the message.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(refusal) from None
    except OSError as error:
        logger.warning("%s cannot be locked against a second process: %s", path, error)
        return False
    return True


@contextlib.contextmanager
def naming_writes(path: Path) -> Iterator[None]:
    """Add a path to errors of writing to it, such as that of a full disk, which name no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically and durably: write a temporary file, sync, rename.

    Raises:
        OSError: It cannot be written, or another kind of file, such as a device, has its name.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    fresh = path.with_name(f"{path.name}.new")
    with naming_writes(path), fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk, and so survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: str | Path, error: OSError, setting: str | None) -> ConfigError:
    """Return the error for a path that cannot be written, with the reason and the remedy.

    Args:
        path: file or folder.
        error: error of writing it, or of creating its folder.
        setting: setting of the path, such as `--data-dir`; None for an argument without a flag.
    """
    remedy = "choose another place" + (f" with {setting}" if setting else "")
    return ConfigError(f"{path} cannot be written: {_reason(Path(path), error)}; {remedy}")


def _reason(path: Path, error: OSError) -> str:
    found = _nearest_existing(path)
    shown = "it" if found == path else str(Path.cwd() if found == Path() else found)
    if error.errno == errno.EISDIR:
        return "it is a folder; expected a file"
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not found.is_dir():
        return f"{shown} is a file; expected a folder"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission to write to {shown}"
    if error.errno == errno.EROFS:
        return f"{shown} is on a read-only file system"
    if error.errno == errno.ENOENT and found != path:
        missing = found / path.relative_to(found).parts[0]
        return f"there is no folder {missing}, and none can be made in {shown}"
    return error.strerror or str(error)


def _nearest_existing(path: Path) -> Path:
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):  # a folder that may not be searched
            if each.exists():
                return each
    return Path("/")
