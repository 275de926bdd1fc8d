"""A check whether a path can be written to, made before work starts."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from pathlib import Path

from atroposlib.errors import ConfigError

__all__ = ["require_writable_file", "require_writable_folder", "unwritable"]


def require_writable_folder(folder: str | Path, setting: str, *, makes: bool = True) -> Path:
    """Return a folder that files can be written to; it is created when missing.

    Args:
        folder: where files are to go.
        setting: what names it, such as `--save-path`.
        makes: Whether to create the folder; False only finds out whether it could be created.

    Raises:
        ConfigError: it cannot be created or written; the message names the folder and the setting.
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
    """Return a file that can be written; its folder is created when missing, the file is not.

    Args:
        file: where something is to be written.
        setting: what names it, such as `--output`.

    Raises:
        ConfigError: it cannot be written; the message names the file and the setting.
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


def unwritable(path: str | Path, error: OSError, setting: str | None) -> ConfigError:
    """Return the error that says why a place cannot be written, and which flag chooses another.

    Args:
        path: file or folder that was to be written.
        error: what writing it, or making its folder, failed with.
        setting: what names the place, such as `--data-dir`; None for an argument without a flag.
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
