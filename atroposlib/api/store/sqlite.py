"""A run in one SQLite file: acknowledged records survive the end of the process.

    append ──► Writer thread: waiting appends ──► one commit ──► apply, in log order ──► True
                              other commands ───► their own transaction
                              idle or between commits: delete garbage, checkpoint
    fetch  ──► reader thread, with its own connection

Killing the process loses nothing that was acknowledged. A power failure may lose the latest
acknowledged records, unless the store was opened with `fsync`, which waits for the disk at every
commit. The file stays consistent in both cases. Memory holds pending requests and two small page
caches, not the queued payloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import sqlite3
import struct
import sys
import threading
import time
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from atroposlib.api.store.base import (
    Apply,
    DamagedPayloadError,
    Payload,
    PayloadCheck,
    Restore,
    StoreFullError,
    applied,
    damaged_payload,
)
from atroposlib.api.store.sqlite_file import (
    OWNER_ONLY,
    PAGE_BYTES,
    SpaceReserve,
    damaged_file,
    free_bytes,
    is_damage,
    is_full,
    open_reader,
    open_writer,
    read_counters,
    shrink,
)
from atroposlib.errors import ConfigError, RunStoreError
from atroposlib.utils.writable import unwritable

logger = logging.getLogger(__name__)

_LOCKED_BYTE = 2**62
_NO_SUCH_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class FileLock:
    """Prevents a run from being opened twice; released by the system when this process ends.

    There are two locks. The lock on `NAME.lock` remains valid if the run's file is deleted and
    created again. The lock on the run's file also applies to links to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name_path = path.with_name(path.name + ".lock")
        self._name: int | None = None
        self._file: int | None = None
        self._text = str(path)
        self._identity: tuple[int, int] | None = None
        """Device and inode of the locked file; None while unlocked."""

    def acquire(self) -> None:
        """Take the locks without waiting; a missing file is created with access for its owner only.

        Raises:
            ConfigError: the run is open in another process, or in this one.
        """
        while self._name is None:
            descriptor = os.open(self._name_path, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
            try:
                self._lock(descriptor, _lock_file)
                with contextlib.suppress(FileNotFoundError):  # its previous owner removed it
                    is_same = os.path.samestat(os.fstat(descriptor), self._name_path.stat())
                    self._name = descriptor if is_same else None
            finally:
                if self._name is None:
                    os.close(descriptor)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
            # Closing it would drop the locks of SQLite in this process, so only `release` does.
            self._file = descriptor
            self._lock(descriptor, _lock_range)
            opened = os.fstat(descriptor)
            self._identity = opened.st_dev, opened.st_ino
        except BaseException:
            self.release()
            raise

    def require_in_place(self) -> None:
        """Raise `RunStoreError` if the locked file was deleted or replaced."""
        # Called before every commit, so it is a single system call.
        try:
            found = os.stat(self._text)  # noqa: PTH116 - a path object takes four times as long
            is_ours = (found.st_dev, found.st_ino) == self._identity
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            raise RunStoreError(
                f"{self.path} was deleted or replaced while the run was served; put it back, or "
                "start the service again"
            )

    def _lock(self, descriptor: int, lock: Callable[[int], None]) -> None:
        try:
            lock(descriptor)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.path} is in use by another process; stop it, or choose another run with "
                "--run or another directory with --data-dir"
            ) from error

    def release(self) -> None:
        """Release both locks; every connection to the file must be closed."""
        if self._file is not None:
            os.close(self._file)
            self._file = self._identity = None
        if self._name is not None:
            self._name_path.unlink(missing_ok=True)
            os.close(self._name)
            self._name = None


def _lock_file(descriptor: int) -> None:
    if sys.platform == "win32":  # there the system itself rejects a second writer of the file
        return
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_range(descriptor: int) -> None:
    """Lock one byte, far after those that SQLite locks, for this descriptor only.

    It is an open file description lock: an ordinary one belongs to the process, and closing any
    descriptor of the file would release SQLite's locks too. Without support for such locks (other
    systems than Linux, some file systems) only the lock on `NAME.lock` is held, since a lock on
    the whole file would exclude SQLite itself.
    """
    if sys.platform != "linux":
        return
    import fcntl

    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _LOCKED_BYTE, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        if error.errno not in _NO_SUCH_LOCKS:
            raise


@dataclass(eq=False)
class Append:
    """A record that waits to be written; the future is resolved on the event loop."""

    record: bytes
    payloads: Sequence[Payload]
    fence: int | None
    future: Future[bool]

    @property
    def num_bytes(self) -> int:
        return len(self.record) + sum(len(payload.content) for payload in self.payloads)


@dataclass(eq=False)
class Command:
    """Any other write, in its own transaction."""

    run: Callable[[], None]
    future: Future[None]


class Done(NamedTuple):
    """Outcome of a request."""

    request: Append | Command
    position: int | None = None
    """Position of an append in the log; None if the fence has moved, and for a command."""
    error: RunStoreError | None = None


MAX_COMMIT_BYTES = 2 * 2**20
MAX_COMMIT_RECORDS = 256
CHECKPOINT_BYTES = 16 * 2**20
"""Bytes written to the log file between two checkpoints, approximately."""

MAX_WAL_BYTES = 128 * 2**20
"""Size of the log file above which a checkpoint waits for readers, so that the log restarts."""

SLICE_S = 0.003
"""Maximum time for which deleting delays new requests."""

_ROOM_ABOVE_BYTES = 8 * PAGE_BYTES
SLICE_PAYLOADS = 64
SLICE_RECORDS = 1000
SPACE_CHECK_S = 0.5
"""Interval between checks for free space while the disk is full."""

LOG_FULL_S = 60.0
FORGET_TOO_LARGE_S = 30.0
CLOSE_S = 2.0
"""Time to delete garbage on closing; the rest is deleted when the run is resumed."""


class Writer:
    """Owns the writing connection; all methods except `submit` and `close` run in its thread.

    When the disk is full, records with payloads are rejected. All other records use the reserved
    space, one step at a time. Groups are accepted again once the reserve is complete, or once the
    file itself has the same amount of free space.

    Attributes:
        full_reason: Reason for which groups, or groups above a certain size, are rejected now; None
            while all are accepted.
        refuses_payloads: Whether all groups are rejected.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        lock: FileLock,
        reserve: SpaceReserve,
        deliver: Callable[[list[Done]], None],
    ) -> None:
        self.full_reason: str | None = None
        self.refuses_payloads = False
        self._too_large_bytes = 0
        """Size of the largest commit that recently did not fit; 0 without one."""
        self._too_large_at = 0.0
        self._connection = connection
        self._lock = lock
        self._disk = f"the disk of {lock.path}"
        self._reserve = reserve
        self._checkpoint_bytes = min(CHECKPOINT_BYTES, reserve.whole_bytes // 2)
        self._room_checked_bytes = reserve.whole_bytes // 8
        self._logged_full_at = float("-inf")
        self._deliver = deliver
        self._queue: SimpleQueue[Append | Command | None] = SimpleQueue()
        self._held: Append | Command | None = None
        self._is_closing = False
        self._unsaved_bytes = 0
        self._position, self._num_guarded = read_counters(connection)
        self._has_garbage = True
        if reserve.num_bytes < reserve.whole_bytes:
            self._note_full("part of the reserved space is in use")
        self._thread = threading.Thread(target=self._serve, name="run-store-writer", daemon=True)
        self._thread.start()

    def submit(self, request: Append | Command) -> None:
        self._queue.put(request)

    def close(self) -> None:
        """Write queued requests, delete garbage and close the file; blocks until done."""
        self._queue.put(None)
        self._thread.join()

    def discard(self, group_ids: Collection[int]) -> None:
        """Mark payloads as garbage; they can no longer be fetched."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR IGNORE INTO garbage SELECT value FROM json_each(?)",
                (json.dumps(list(group_ids)),),
            )
        self._has_garbage = True

    def make_room(self, write: Callable[[], T]) -> T:
        """Call `write` and return its result; use reserved space on a full disk."""
        while True:
            try:
                return write()
            except sqlite3.Error as error:
                if not is_full(error, self._reserve):
                    raise
                self._note_full(str(error))
                if not self._reserve.release():
                    raise

    def compact(self, snapshot: bytes, position: int) -> None:
        """Replace the log before a position with a snapshot; its records become garbage.

        Raises:
            StoreFullError: the disk is full and the snapshot does not fit the reserved space.
        """
        if self.full_reason is not None and 4 * len(snapshot) > self._reserve.num_bytes:
            raise StoreFullError(self.full_reason)
        with self._transaction():
            self._connection.execute(
                "UPDATE snapshot SET position = :position, content = :content,"
                " num_guarded = num_guarded + (SELECT coalesce(sum(is_guarded), 0) FROM log"
                " WHERE log.position >= snapshot.position AND log.position < :position)"
                " WHERE position <= :position",
                {"position": position, "content": snapshot},
            )
        self._unsaved_bytes += len(snapshot)
        self._has_garbage = True

    def reserve_ids(self, next_group_id: int) -> None:
        """Record that ids below this one may be in use."""
        with self._transaction():
            self._connection.execute(
                "UPDATE ids SET next_group_id = max(next_group_id, ?)", (next_group_id,)
            )

    def release_ids(self, next_group_id: int) -> None:
        """Record on closing that ids from this one on are unused."""
        with self._transaction():
            self._connection.execute("UPDATE ids SET next_group_id = ?", (next_group_id,))

    def _serve(self) -> None:
        while not self._is_closing:
            request = self._next_request(wait=not self._has_garbage)
            if isinstance(request, Append):
                self._write_appends(self._gather(request))
            elif request is not None:
                self._run_command(request)
            if self.full_reason is not None and not self._is_closing:
                self._check_space()
            if not self._is_closing:
                self._tidy()
        self._finish()

    def _next_request(self, *, wait: bool) -> Append | Command | None:
        """Return the next request; None if there is none, or when the store closes."""
        request, self._held = self._held, None
        if request is not None:
            return request
        try:
            timeout_s = None if self.full_reason is None else SPACE_CHECK_S
            request = self._queue.get(block=wait, timeout=timeout_s)
        except Empty:
            return None
        self._is_closing = request is None
        return request

    def _gather(self, first: Append) -> list[Append]:
        """Collect the appends that wait after the first one, up to the limits of one commit."""
        appends = [first]
        num_bytes = first.num_bytes
        while num_bytes < MAX_COMMIT_BYTES and len(appends) < MAX_COMMIT_RECORDS:
            request = self._next_request(wait=False)
            if not isinstance(request, Append):
                self._held = request
                break
            appends.append(request)
            num_bytes += request.num_bytes
        self._unsaved_bytes += num_bytes
        return appends

    def _write_appends(self, appends: list[Append]) -> None:
        try:
            done = self._commit_in_room(appends)
        except Exception as error:  # noqa: BLE001 - callers receive any error
            if len(appends) > 1:  # so that only those that do not fit fail
                for append in appends:
                    self._write_appends([append])
                return
            done = [Done(appends[0], error=_as_error(error))]
        self._deliver(done)

    def _commit_in_room(self, appends: list[Append]) -> list[Done]:
        """Commit appends. Those without payloads are committed even when the disk is full.

        Raises:
            StoreFullError: there is no space for the payloads.
        """
        self._lock.require_in_place()
        if not any(append.payloads for append in appends):
            return self.make_room(lambda: self._commit(appends))
        if self.refuses_payloads:
            raise StoreFullError(self.full_reason)
        num_bytes = sum(append.num_bytes for append in appends)
        if num_bytes > self._room_checked_bytes and not self._has_room(num_bytes):
            if len(appends) == 1:
                self._note_too_large(num_bytes)
            raise StoreFullError(self.full_reason)
        try:
            return self._commit(appends)
        except sqlite3.Error as error:
            if not is_full(error, self._reserve):
                raise
            self._note_full(str(error))
            raise StoreFullError(self.full_reason) from error

    def _has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` fit on the disk twice: in the log file and in the main file."""
        if not num_bytes:
            return True
        num_bytes += _ROOM_ABOVE_BYTES
        if self._reserve.has_room(2 * num_bytes):
            return True
        self._checkpoint()
        self._return_space()
        # Free space inside both files is used before they grow.
        log_bytes = 0 if self._unsaved_bytes else self._log_bytes()
        missing = max(0, num_bytes - free_bytes(self._connection)) + max(0, num_bytes - log_bytes)
        return not missing or self._reserve.has_room(missing)

    def _log_bytes(self) -> int:
        path = self._lock.path
        try:
            return path.with_name(path.name + "-wal").stat().st_size
        except FileNotFoundError:  # deleted to free space
            return 0

    def _note_full(self, error: str) -> None:
        if self.full_reason is None and time.monotonic() - self._logged_full_at > LOG_FULL_S:
            self._logged_full_at = time.monotonic()
            logger.error(
                "%s is full (%s): new groups are rejected until space is freed", self._disk, error
            )
        self.refuses_payloads = True
        self.full_reason = (
            f"{self._disk} is full ({error}); new groups are rejected until space is "
            "freed: delete files, or let the trainer take batches"
        )

    def _note_too_large(self, num_bytes: int) -> None:
        """Start to reject commits of this size; smaller ones are still accepted."""
        self._too_large_at = time.monotonic()
        self._too_large_bytes = max(num_bytes, self._too_large_bytes)
        self.full_reason = (
            f"{self._disk} is full: there is no space for a group of {num_bytes} bytes; "
            "delete files, or let the trainer take batches"
        )

    def _check_space(self) -> None:
        """Accept groups again if there is enough space."""
        try:
            self.make_room(self._checkpoint)
            self._return_space()
            if self._reserve.restore() or self._has_inner_room():
                self.refuses_payloads = False
            if time.monotonic() - self._too_large_at > FORGET_TOO_LARGE_S:
                self._too_large_bytes = 0
            if not self.refuses_payloads and self._has_room(self._too_large_bytes):
                self._too_large_bytes = 0
                self.full_reason = None
                logger.info("%s has free space again: new groups are accepted", self._disk)
        except (sqlite3.Error, OSError) as error:  # the writer thread must not end
            logger.debug("no free space yet: %s", error)

    def _has_inner_room(self) -> bool:
        """Whether the file has enough free space inside."""
        whole, left = self._reserve.whole_bytes, self._reserve.num_bytes
        return left >= whole // 2 and left + free_bytes(self._connection) >= 2 * whole

    def _return_space(self) -> None:
        """Return free space inside the file to the disk when little data is left in it."""
        # Temporary files would need space on another disk.
        self._connection.execute("PRAGMA temp_store = MEMORY")
        below = self._reserve.whole_bytes // 2
        if self.make_room(lambda: shrink(self._connection, below_bytes=below)):
            truncate = "PRAGMA wal_checkpoint(TRUNCATE)"
            self.make_room(lambda: self._connection.execute(truncate).fetchone())

    def _commit(self, appends: list[Append]) -> list[Done]:
        """Write appends in one transaction, except those whose fence has moved."""
        position, num_guarded = self._position, self._num_guarded
        done: list[Done] = []
        records: list[tuple[int, bool, bytes]] = []
        payloads: list[Payload] = []
        for append in appends:
            is_guarded = append.fence is not None
            if append.fence is not None and append.fence < num_guarded:
                done.append(Done(append))
                continue
            records.append((position, is_guarded, append.record))
            payloads.extend(append.payloads)
            done.append(Done(append, position))
            position += 1
            num_guarded += is_guarded
        if records:
            with self._transaction():
                self._connection.executemany("INSERT INTO payload VALUES (?, ?)", payloads)
                self._connection.executemany("INSERT INTO log VALUES (?, ?, ?)", records)
        self._position, self._num_guarded = position, num_guarded
        return done

    def _run_command(self, command: Command) -> None:
        try:
            self._lock.require_in_place()
            command.run()
        except Exception as error:  # noqa: BLE001 - callers receive any error
            self._deliver([Done(command, error=_as_error(error))])
        else:
            self._deliver([Done(command)])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._unsaved_bytes += 2 * PAGE_BYTES

    def _tidy(self) -> None:
        """Delete a slice of the garbage and checkpoint if due; failures are retried later."""
        try:
            if self._has_garbage:
                self._has_garbage = self.make_room(self._delete_slice)
            if (
                self._unsaved_bytes >= self._checkpoint_bytes
                or self._reserve.num_bytes < self._reserve.whole_bytes
            ):
                self.make_room(self._checkpoint)
        except (sqlite3.Error, OSError, RunStoreError) as error:
            self._has_garbage = False  # retried with the next discard, not in a loop
            logger.warning("the garbage in the run's file could not be deleted: %s", error)

    def _delete_slice(self) -> bool:
        """Delete garbage for at most a few milliseconds; return whether there may be more."""
        execute = self._connection.execute
        deadline = time.monotonic() + SLICE_S
        with self._transaction():
            deleted = execute(
                "DELETE FROM log WHERE position < (SELECT position FROM snapshot)"
                f" AND position < (SELECT min(position) FROM log) + {SLICE_RECORDS}"
            ).rowcount
            rows = execute(f"SELECT group_id FROM garbage ORDER BY group_id LIMIT {SLICE_PAYLOADS}")
            group_ids = [group_id for (group_id,) in rows.fetchall()]
            for index, group_id in enumerate(group_ids):
                self._delete_payload(group_id)
                if time.monotonic() > deadline or index == len(group_ids) - 1:
                    execute("DELETE FROM garbage WHERE group_id <= ?", (group_id,))
                    break
        return deleted > 0 or bool(group_ids)

    def _delete_payload(self, group_id: int) -> None:
        try:
            self._connection.execute("DELETE FROM payload WHERE group_id = ?", (group_id,))
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            # Its space stays occupied; the remaining garbage can still be deleted.
            logger.warning("the damaged payload of group %d cannot be deleted: %s", group_id, error)

    def _checkpoint(self) -> None:
        self._unsaved_bytes = 0
        _, num_frames, num_saved = self._connection.execute(
            "PRAGMA wal_checkpoint(PASSIVE)"
        ).fetchone()
        if num_frames * PAGE_BYTES > MAX_WAL_BYTES:
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        else:
            self._unsaved_bytes += (num_frames - num_saved) * PAGE_BYTES

    def _finish(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        try:
            while self._has_garbage and time.monotonic() < deadline:
                self._has_garbage = self._delete_slice()
            shrink(self._connection)
        except (sqlite3.Error, OSError) as error:
            logger.warning("the garbage in the run's file could not be deleted: %s", error)
        self._connection.close()
        if self.full_reason is not None:  # for the next start
            self._reserve.restore()
        self._reserve.close(keep=self.full_reason is not None)


def _as_error(error: Exception) -> RunStoreError:
    if isinstance(error, RunStoreError):
        return error
    if not isinstance(error, sqlite3.Error):
        logger.error("writing the run's file failed unexpectedly", exc_info=error)
    return RunStoreError(f"the run's file could not be written: {error}")


RECORDS_PER_READ = 2000
IDS_PER_RESERVATION = 4096
"""Ids are reserved on disk in advance; unused ones are skipped after a crash."""

READ_AT_ONCE = 16
"""Payloads per read transaction; a long one would prevent the log file from restarting."""

MAX_GROUP_ID = 2**63 - 1

T = TypeVar("T")


class SqliteRunStore:
    """A `RunStore` in the file `path`, created with its directory; used by one process at a time.

    Invariant: each record is applied once, after its commit, in log order, on the event loop that
    opened the store.
    """

    def __init__(
        self, path: Path, *, fsync: bool = False, reserve_bytes: int | None = None
    ) -> None:
        self._path = path
        self._reserve_bytes = reserve_bytes
        self._fsync = fsync
        self._lock = FileLock(path)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="run-store-reader")
        self._reader: sqlite3.Connection | None = None
        self._writer: Writer | None = None
        self._next_group_id = 0
        self._reserved_until = 0

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Lock and load the file; ConfigError if it cannot be used."""
        self._apply = apply
        self._loop: AbstractEventLoop = asyncio.get_running_loop()
        connection, reader, reserve = await self._in_reader(self._open_file)
        try:
            await self._replay(reader, restore)
            self._writer = await self._in_reader(
                lambda: Writer(connection, self._lock, reserve, self._deliver)
            )
        except BaseException as error:
            reader.close()
            connection.close()
            reserve.close(keep=reserve.num_bytes < reserve.whole_bytes)
            self._lock.release()
            if isinstance(error, sqlite3.DatabaseError):
                raise damaged_file(self._path, error) from error
            raise
        self._reader = reader

    @property
    def full_reason(self) -> str | None:
        return None if self._writer is None else self._writer.full_reason

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        future: Future[bool] = self._loop.create_future()
        self._open_writer().submit(Append(record, payloads, fence, future))
        return await future

    async def sync(self) -> None:
        """Do nothing, since there are no other replicas."""

    async def new_group_ids(self, count: int) -> range:
        if self._open_writer().refuses_payloads:
            raise StoreFullError(self.full_reason)
        first = self._next_group_id
        end = self._next_group_id = first + count
        if end > self._reserved_until:
            reserved_until = end + IDS_PER_RESERVATION
            await self._command(lambda writer: writer.reserve_ids(reserved_until))
            self._reserved_until = max(self._reserved_until, reserved_until)
        return range(first, end)

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        self._open_writer()
        wanted = list(group_ids)
        return await self._in_reader(lambda: self._read_payloads(wanted, checks))

    async def discard(self, group_ids: Collection[int]) -> None:
        """Mark payloads as garbage, to be deleted between other writes."""
        unwanted = list(group_ids)
        if unwanted:
            await self._command(lambda writer: writer.make_room(lambda: writer.discard(unwanted)))

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        await self._command(
            lambda writer: writer.make_room(lambda: writer.compact(snapshot, position))
        )

    async def alive_replicas(self) -> frozenset[str] | None:
        return None

    async def close(self) -> None:
        """Write waiting records, shrink the file if most of it is free, and unlock it."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        used_until = self._next_group_id
        future: Future[None] = self._loop.create_future()
        release = partial(writer.release_ids, used_until)
        writer.submit(Command(lambda: writer.make_room(release), future))
        await self._in_reader(lambda: self._close_file(writer))
        with contextlib.suppress(RunStoreError):  # reserved ids are then skipped
            await future
        self._reading.shutdown(wait=False)

    def _open_file(self) -> tuple[sqlite3.Connection, sqlite3.Connection, SpaceReserve]:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire()
        except OSError as error:
            raise unwritable(self._path, error, "--data-dir") from error
        try:
            reserve = SpaceReserve(
                self._path.with_name(self._path.name + ".reserve"), whole_bytes=self._reserve_bytes
            )
        except BaseException:
            self._lock.release()
            raise
        try:
            return *self._connect(reserve), reserve
        except BaseException:
            reserve.close(keep=reserve.num_bytes < reserve.whole_bytes)
            self._lock.release()
            raise

    def _connect(self, reserve: SpaceReserve) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        """Open the file for writing and reading; on a full disk, use space of the reserve."""
        while True:
            try:
                connection = open_writer(self._path, fsync=self._fsync)
                try:
                    return connection, open_reader(self._path)
                except sqlite3.DatabaseError as error:
                    connection.close()
                    raise damaged_file(self._path, error) from error
            except ConfigError as error:
                if not is_full(error.__cause__, reserve) or not reserve.release():
                    raise

    def _close_file(self, writer: Writer) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        writer.close()
        self._lock.release()

    async def _replay(self, reader: sqlite3.Connection, restore: Restore) -> None:
        (row,) = await self._select(
            reader, "SELECT position, content, next_group_id FROM snapshot, ids"
        )
        position, snapshot, self._next_group_id = row
        self._reserved_until = self._next_group_id
        if snapshot is not None:
            restore(snapshot)
        while rows := await self._select(
            reader,
            "SELECT position, record FROM log WHERE position >= ?"
            f" ORDER BY position LIMIT {RECORDS_PER_READ}",
            position,
        ):
            for place, record in rows:
                applied(self._apply, place, record)
            position = rows[-1][0] + 1

    async def _select(self, reader: sqlite3.Connection, query: str, *values: int) -> list[Any]:
        return await self._in_reader(lambda: reader.execute(query, values).fetchall())

    def _deliver(self, done: list[Done]) -> None:
        """Pass outcomes from the writer thread to the event loop, if it is still running."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, done)

    def _settle(self, done: list[Done]) -> None:
        for request, position, error in done:
            if isinstance(request, Append) and position is not None:
                applied(self._apply, position, request.record)
            if request.future.done():  # cancelled meanwhile
                continue
            if error is not None:
                request.future.set_exception(error)
            elif isinstance(request, Append):
                request.future.set_result(position is not None)
            else:
                request.future.set_result(None)

    async def _command(self, write: Callable[[Writer], None]) -> None:
        writer = self._open_writer()
        future: Future[None] = self._loop.create_future()
        writer.submit(Command(lambda: write(writer), future))
        await future

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise RunStoreError(f"{self._path} is not open")
        return self._writer

    def _read_payloads(self, group_ids: list[int], checks: Sequence[PayloadCheck]) -> list[bytes]:
        reader = self._reader
        if reader is None:
            raise RunStoreError(f"{self._path} is not open")
        try:
            contents: list[bytes] = []
            left = iter(zip_longest(group_ids, checks))
            while len(contents) < len(group_ids):
                with _transaction(reader):
                    contents += [_read_payload(reader, *one) for one in islice(left, READ_AT_ONCE)]
            return contents
        except sqlite3.Error as error:
            kind = DamagedPayloadError if is_damage(error) else RunStoreError
            raise kind(f"{self._path} could not be read: {error}") from error

    async def _in_reader(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, read)


@contextlib.contextmanager
def _transaction(reader: sqlite3.Connection) -> Iterator[None]:
    """Read several rows in one transaction, which takes the locks of the file once."""
    reader.execute("BEGIN")
    try:
        yield
    finally:
        with contextlib.suppress(sqlite3.Error):  # read-only
            reader.execute("ROLLBACK")


def _read_payload(
    reader: sqlite3.Connection, group_id: int, is_intact: PayloadCheck | None
) -> bytes:
    if group_id > MAX_GROUP_ID:
        raise KeyError(group_id)
    rows = reader.execute(
        "SELECT content FROM payload WHERE group_id = :id"
        " AND NOT EXISTS (SELECT 1 FROM garbage WHERE group_id = :id)",
        {"id": group_id},
    ).fetchall()
    if not rows:
        raise KeyError(group_id)
    content = rows[0][0]
    if not isinstance(content, bytes):
        raise DamagedPayloadError(f"the payload of group {group_id} is no longer bytes")
    if is_intact is not None and not is_intact(content):
        raise damaged_payload(group_id)
    return content
