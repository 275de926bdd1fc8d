"""The file of one run: its tables, its lock, and how it is opened and shrunk.

log       position, is_guarded, record      what happened, in order
payload   group_id, content                 the bytes of groups
garbage   group_id                          payloads that are discarded and not yet deleted
snapshot  position, num_guarded, content    stands for the log before `position`
ids       next_group_id                     no id from here on was ever given
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

__all__ = [
    "PAGE_BYTES",
    "FileLock",
    "damaged_file",
    "is_damage",
    "open_reader",
    "open_writer",
    "read_counters",
    "shrink",
]

PAGE_BYTES = 32_768
"""Measured: larger pages make small commits slow, smaller ones make large payloads slow."""

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
"""A file with at most this much in use is rewritten on closing, which frees the rest."""

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


class FileLock:
    """Keeps other processes from opening a run; the system drops it when this process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock at once; ConfigError when another process has it."""
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(descriptor)
                if self._is_current(descriptor):
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        if sys.platform == "win32":  # there the system itself refuses a second writer of the file
            return
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self._path.with_suffix('')} is in use by another process; stop it, or choose "
                "another run with --run or another directory with --data-dir"
            ) from error

    def _is_current(self, descriptor: int) -> bool:
        """Tell whether the locked file still has its name: its last owner may have removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the lock file and let go of it; nothing happens when it is not held."""
        if self._descriptor is None:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None


def open_writer(path: Path, *, fsync: bool) -> sqlite3.Connection:
    """Open the file of a run for writing; create it with its tables if it is new.

    Raises:
        ConfigError: the file is not one of a run, or a later version wrote it.
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
    """Return the error of a file that cannot be read as that of a run."""
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
    """Whether an error tells of a file that is damaged, rather than busy, full or out of reach."""
    return type(error) is sqlite3.DatabaseError  # the others have classes of their own


def read_counters(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the position of the next record, and the number of guarded records so far."""
    position, num_guarded = connection.execute(
        "SELECT max(snapshot.position, coalesce(max(log.position) + 1, 0)),"
        " snapshot.num_guarded + coalesce(sum(log.is_guarded), 0)"
        " FROM snapshot LEFT JOIN log ON log.position >= snapshot.position"
    ).fetchone()
    return int(position), int(num_guarded)


def shrink(connection: sqlite3.Connection) -> None:
    """Rewrite a file that is mostly free space, when little is left in it."""
    free_pages = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
    used_pages = int(connection.execute("PRAGMA page_count").fetchone()[0]) - free_pages
    if free_pages > used_pages and used_pages * PAGE_BYTES <= SHRINK_BELOW_BYTES:
        connection.execute("VACUUM")


def _prepare(connection: sqlite3.Connection, path: Path, *, fsync: bool) -> None:
    _limit_memory(connection)
    _check_owner(connection, path)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
    # The writer checkpoints between commits, so that no append waits for it unannounced.
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
