"""The file of one run: tables, reserve of disk space, opening and shrinking.

log       position, is_guarded, record      the records, in order
payload   group_id, content                 the bytes of groups
garbage   group_id                          discarded payloads that are not yet deleted
snapshot  position, num_guarded, content    replaces the log before `position`
ids       next_group_id                     ids from here on are unused
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

PAGE_BYTES = 32_768
"""Chosen by measurement: larger pages slow down small commits, smaller ones large payloads."""

OWNER_ONLY = 0o600
"""Mode of the files of a run."""

MAX_RESERVE_BYTES = 32 * 2**20
MIN_RESERVE_BYTES = 2**20
_RESERVE_STEPS = 16
_HEADER_BYTES = 8
_HEADER_BLOCK = 4096

APPLICATION_ID = 0x41_54_52_50
SCHEMA_VERSION = 1
CACHE_KIB = 4096
"""Page cache of one connection."""

# A connection is used by one thread at a time, but not by the thread that opened it.
CONNECTION_OPTIONS: dict[str, Any] = {
    "isolation_level": None,
    "check_same_thread": False,
    "timeout": 10.0,
}

WAL_KEPT_BYTES = 64 * 2**20
SHRINK_BELOW_BYTES = 32 * 2**20
"""A file with at most this much data is rewritten on closing, which frees the rest."""

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE log (position INTEGER PRIMARY KEY, is_guarded INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE payload (group_id INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE garbage (group_id INTEGER PRIMARY KEY);
CREATE TABLE snapshot (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 0),
    position INTEGER NOT NULL, num_guarded INTEGER NOT NULL, content BLOB
);
CREATE TABLE ids (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 0), next_group_id INTEGER NOT NULL
);
INSERT INTO snapshot VALUES (0, 0, 0, NULL);
INSERT INTO ids VALUES (0, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


class SpaceReserve:
    """Disk space reserved for records, so that batches can be delivered when the disk is full.

    A file of zeros next to the run's file. It is shortened step by step when records need space,
    and extended again when the disk has space. A file is used because the free space that a file
    system reports may be inexact, and other programs can take it. The first bytes hold its full
    size: by default a sixteenth of the disk, from 1 MiB to 32 MiB.
    """

    def __init__(self, path: Path, *, whole_bytes: int | None = None) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        self._last_errno: int | None = None
        self.num_bytes = os.fstat(self._descriptor).st_size
        """Current size."""
        self.whole_bytes = self._recorded_size() or self._create(whole_bytes)
        """Full size, which it has while the disk is not full."""

    def _recorded_size(self) -> int | None:
        """Return the full size that an earlier process recorded; None without one."""
        header = os.pread(self._descriptor, _HEADER_BYTES, 0)
        size = int.from_bytes(header, "little") if len(header) == _HEADER_BYTES else 0
        return size if MIN_RESERVE_BYTES <= size <= MAX_RESERVE_BYTES else None

    def _create(self, whole_bytes: int | None) -> int:
        """Allocate the reserve, smaller on a disk with little space; return its full size."""
        wanted = size = whole_bytes or _usual_reserve(self._path.parent)
        while not self._grow(size) and size > MIN_RESERVE_BYTES:
            size = max(size // 2, MIN_RESERVE_BYTES)
        if self.num_bytes < size:
            return wanted
        os.pwrite(self._descriptor, size.to_bytes(_HEADER_BYTES, "little"), 0)
        return size

    def release(self) -> bool:
        """Free one step of the reserve; False if it is used up."""
        if self.num_bytes <= _HEADER_BLOCK:
            return False
        self._cut(max(_HEADER_BLOCK, self.num_bytes - self._step_bytes))
        return True

    def restore(self) -> bool:
        """Extend the reserve as far as there is space; return whether it has its full size."""
        while self.num_bytes < self.whole_bytes:
            if not self._grow(min(self.whole_bytes, self.num_bytes + self._step_bytes)):
                return False
        return True

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit on the disk, tested by allocating them briefly."""
        size = self.num_bytes
        if self._grow(size + num_bytes):
            self._cut(size)
            return True
        # For another cause, the write itself fails.
        return self._last_errno not in (errno.ENOSPC, errno.EDQUOT)

    def close(self, *, keep: bool) -> None:
        """Close the reserve, and remove it unless it is kept for the next start."""
        os.close(self._descriptor)
        if not keep:
            self._path.unlink(missing_ok=True)

    @property
    def _step_bytes(self) -> int:
        return self.whole_bytes // _RESERVE_STEPS

    def _grow(self, size: int) -> bool:
        try:
            if sys.platform == "linux":
                os.posix_fallocate(self._descriptor, 0, size)
            else:
                os.lseek(self._descriptor, self.num_bytes, os.SEEK_SET)
                for start in range(self.num_bytes, size, 2**20):
                    os.write(self._descriptor, os.urandom(min(2**20, size - start)))
        except OSError as error:
            self._last_errno = error.errno
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.num_bytes)
            return False
        self.num_bytes = size
        return True

    def _cut(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self.num_bytes = size


def _usual_reserve(folder: Path) -> int:
    """Return a sixteenth of the disk, within limits; the maximum if its size is unknown."""
    if sys.platform == "win32":
        return MAX_RESERVE_BYTES
    disk = os.statvfs(folder)
    share = disk.f_blocks * disk.f_frsize // 16
    return min(MAX_RESERVE_BYTES, max(MIN_RESERVE_BYTES, share or MAX_RESERVE_BYTES))


def open_writer(path: Path, *, fsync: bool) -> sqlite3.Connection:
    """Open the file of a run for writing; create it with its tables if it is new.

    Raises:
        ConfigError: the file does not contain a run, or a later version wrote it.
    """
    try:
        connection: sqlite3.Connection = sqlite3.connect(path, **CONNECTION_OPTIONS)
        try:
            _prepare(connection, path, fsync=fsync)
        except BaseException:
            connection.close()
            raise
    except sqlite3.DatabaseError as error:
        raise damaged_file(path, error) from error
    return connection


def damaged_file(path: Path, error: sqlite3.DatabaseError) -> ConfigError:
    """Return the error for a run file that is damaged, or cannot be opened on a full disk."""
    if "disk is full" in str(error):
        return ConfigError(
            f"{path} cannot be opened ({error}); free some space, or choose another disk with "
            "--data-dir"
        )
    return ConfigError(
        f"{path} cannot be used as the file of a run ({error}); choose another run with --run"
    )


def open_reader(path: Path) -> sqlite3.Connection:
    """Open an existing file of a run for reading."""
    connection: sqlite3.Connection = sqlite3.connect(path, **CONNECTION_OPTIONS)
    _limit_memory(connection)
    connection.execute("PRAGMA query_only = ON")
    return connection


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error means that the file is damaged, rather than busy, full or missing."""
    return type(error) is sqlite3.DatabaseError  # the others have their own classes


def is_full(error: BaseException | None, reserve: SpaceReserve) -> bool:
    """Whether an error was caused by a full disk; some only say "disk I/O error"."""
    if not isinstance(error, sqlite3.OperationalError):
        return False
    text = str(error)
    return "disk is full" in text or ("disk I/O" in text and not reserve.has_room(2 * PAGE_BYTES))


def read_counters(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the position of the next record, and the number of guarded records so far."""
    position, num_guarded = connection.execute(
        "SELECT max(snapshot.position, coalesce(max(log.position) + 1, 0)),"
        " snapshot.num_guarded + coalesce(sum(log.is_guarded), 0)"
        " FROM snapshot LEFT JOIN log ON log.position >= snapshot.position"
    ).fetchone()
    return int(position), int(num_guarded)


def shrink(connection: sqlite3.Connection, *, below_bytes: int = SHRINK_BELOW_BYTES) -> bool:
    """Rewrite a file that is mostly free space; return whether it was rewritten."""
    free = free_bytes(connection)
    pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
    used = pages * PAGE_BYTES - free
    is_due = free > used and used <= below_bytes
    if is_due:
        connection.execute("VACUUM")
    return is_due


def free_bytes(connection: sqlite3.Connection) -> int:
    """Return the free space inside the file, which is used before the file grows."""
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0]) * PAGE_BYTES


def _prepare(connection: sqlite3.Connection, path: Path, *, fsync: bool) -> None:
    _limit_memory(connection)
    _check_owner(connection, path)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
    # The writer checkpoints between commits, so that no append waits for a checkpoint.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
    # Some builds overwrite deleted bytes with zeros, which doubles what is written.
    connection.execute("PRAGMA secure_delete = OFF")
    if _schema_version(connection) == 0:
        connection.executescript(SCHEMA)


def _limit_memory(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    connection.execute("PRAGMA mmap_size = 0")


def _schema_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check_owner(connection: sqlite3.Connection, path: Path) -> None:
    application_id = int(connection.execute("PRAGMA application_id").fetchone()[0])
    has_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
    if application_id != APPLICATION_ID and has_tables:
        raise ConfigError(f"{path} is a database of another program; choose another run with --run")
    version = _schema_version(connection)
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema {version}, this version reads up to {SCHEMA_VERSION}; "
            "upgrade atroposlib, or choose another run with --run"
        )
