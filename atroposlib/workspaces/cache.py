"""Prepared bases on disk: built once, by content, and removed when they have not been used lately.

    <folder>/<key>/root           files of the base
    <folder>/<key>/base.json      its settings; its time of change is that of the last use
    <folder>/<key>/files.json     state of each file, by which changes are noticed
    <folder>/<key>.lock           locked: shared while in use, exclusive while built or removed
    <folder>/<key>.building       a build; what a killed process left is removed by the next one

A base appears under its key by renaming, when it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atroposlib.utils.writable import FULL_DISK
from atroposlib.workspaces.interface import WorkspaceError

__all__ = ["BaseCache", "CachedBase", "remove_tree"]

logger = logging.getLogger(__name__)

LOCK_PAUSE_S = 0.05

Build = Callable[[Path], Awaitable[dict[str, Any]]]
"""Writes the files of a base into a new folder, and returns the contents of `base.json`."""


@dataclass
class CachedBase:
    """A base in use; it is not removed until `release`."""

    folder: Path
    settings: dict[str, Any]
    lock: int | None = field(repr=False)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def size(self) -> tuple[int, int]:
        """Bytes and number of files."""
        num_bytes, num_files = self.settings["size"]
        return num_bytes, num_files

    def changed_file(self) -> str | None:
        """Return a file of the base that is not as it was built; None if all are."""
        try:
            states = _states(self.root)
            digest = json.loads((self.folder / "base.json").read_text())["digest"]
            if _digest(states) == digest:
                return None
            built = json.loads((self.folder / "files.json").read_text())
        except (FileNotFoundError, ValueError, KeyError):  # removed in part, or cut off by a crash
            return str(self.folder)
        paths = sorted(built.keys() | states.keys())
        changed = (path for path in paths if built.get(path) != states.get(path))
        return next(changed, "files.json")

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


class BaseCache:
    """A folder of bases, shared by the processes of a user.

    Args:
        folder: created if missing, readable by this user only.
        max_bytes: size above which bases that are not in use are removed, the least recently used
            one first.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    async def get(self, key: str, build: Build) -> CachedBase:
        """Return the base of a key, built if there is none; concurrent calls build it once.

        Raises:
            WorkspaceError: the cache cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise WorkspaceError(
                f"the folder of prepared workspaces cannot be created: {error}; "
                "set ATROPOS_WORKSPACES_DIR to a folder on a local disk"
            ) from error
        try:
            return await self._get(key, build)
        except OSError as error:
            if not self._is_of_cache(error):
                raise
            raise WorkspaceError(
                f"prepared workspaces cannot be written to {self._folder}: {_reason(error)}; "
                "free space there, or set ATROPOS_WORKSPACES_DIR to another folder on a local disk"
            ) from error

    async def _get(self, key: str, build: Build) -> CachedBase:
        while True:
            base = await self._open(key)
            if base is not None:
                return base
            lock = await self._lock(key, fcntl.LOCK_EX)
            try:
                if not (self._folder / key).exists():
                    await self._build(key, build)
                    await asyncio.to_thread(self._trim)
            finally:
                os.close(lock)

    def _is_of_cache(self, error: OSError) -> bool:
        """Whether an error is one of writing to the cache, and not of reading a build context."""
        if isinstance(error, shutil.Error) or error.errno in FULL_DISK:
            return True
        return error.filename is not None and str(error.filename).startswith(str(self._folder))

    async def discard(self, base: CachedBase) -> None:
        """Remove a base whose files were changed, also if other processes use it."""
        base.release()
        removed = self._folder / f"{base.folder.name}-{time.time_ns()}.building"
        with contextlib.suppress(FileNotFoundError):
            base.folder.rename(removed)
            await asyncio.to_thread(remove_tree, removed)

    async def _open(self, key: str) -> CachedBase | None:
        lock = await self._lock(key, fcntl.LOCK_SH)
        folder = self._folder / key
        if not folder.exists():
            os.close(lock)
            return None
        base = CachedBase(folder, {}, lock)
        try:
            changed = await asyncio.to_thread(base.changed_file)
            if changed is None:
                base.settings = json.loads((folder / "base.json").read_text())
        except BaseException:
            os.close(lock)
            raise
        if changed is not None:
            logger.warning("%s of the base %s was changed; it is built again", changed, folder)
            await self.discard(base)
            return None
        os.utime(folder / "base.json")
        return base

    async def _build(self, key: str, build: Build) -> None:
        building = self._folder / f"{key}.building"
        await asyncio.to_thread(remove_tree, building)
        try:
            (building / "root").mkdir(parents=True)
            settings = await build(building / "root")
            states = await asyncio.to_thread(_states, building / "root")
            (building / "files.json").write_text(json.dumps(states))
            settings |= {"digest": _digest(states), "size": _size(building / "root")}
            (building / "base.json").write_text(json.dumps(settings))
            building.rename(self._folder / key)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(remove_tree, building))
            raise

    async def _lock(self, key: str, kind: int) -> int:
        """Lock a key; the file may be removed while this waits for it."""
        path = self._folder / f"{key}.lock"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
            except FileNotFoundError:
                pass
            except BlockingIOError:
                os.close(fd)
                await asyncio.sleep(LOCK_PAUSE_S)
                continue
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _trim(self) -> None:
        """Remove bases over the limit, and what builds of ended processes left."""
        for path in self._folder.glob("*.building"):
            self._remove_unused(path.name.removesuffix(".building"), path)
        sizes = {}
        for path in self._folder.glob("*/base.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                size = json.loads(path.read_text())["size"][0]
                sizes[path.parent] = (path.stat().st_mtime, size)
        total = sum(size for _, size in sizes.values())
        for folder, (_, size) in sorted(sizes.items(), key=lambda item: item[1]):
            if total <= self._max_bytes:
                return
            if self._remove_unused(folder.name, folder):
                total -= size

    def _remove_unused(self, key: str, folder: Path) -> bool:
        path = self._folder / f"{key}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)
            path.unlink()
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


def _reason(error: OSError) -> str:
    """Return the message of an error; of those of several copied files, the first one."""
    return str(error.args[0][0][2] if isinstance(error, shutil.Error) else error)


def remove_tree(folder: Path) -> None:
    """Remove a folder, of which parts may not be writable by their owner."""

    def make_writable(_: Any, path: str, error: Any) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            if not Path(path).is_symlink() and Path(path).is_dir():
                Path(path).chmod(0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                Path(path).unlink()

    shutil.rmtree(folder, onerror=make_writable)


def _states(root: Path) -> dict[str, list[int]]:
    """Return mode, owner, size, times of content and of state, and number of every file."""
    found = {}
    for path, state in _walk(str(root)):
        found[path[len(str(root)) :] or "/"] = [
            state.st_mode,
            state.st_uid,
            state.st_size if not stat.S_ISDIR(state.st_mode) else 0,
            state.st_mtime_ns,
            state.st_ctime_ns,
            state.st_ino,
        ]
    return found


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    yield folder, os.lstat(folder)
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    yield entry.path, entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except PermissionError:
            continue  # a folder that its owner cannot read; only if this is not root


def _digest(states: dict[str, list[int]]) -> str:
    text = json.dumps(states, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _size(root: Path) -> tuple[int, int]:
    """Return bytes on disk and number of files."""
    blocks = [state.st_blocks for _, state in _walk(str(root))]
    return 512 * sum(blocks), len(blocks)
