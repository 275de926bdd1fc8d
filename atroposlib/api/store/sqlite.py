"""A run in one SQLite file: what was acknowledged survives the end of the process.

    append ──► writer thread, which commits what waits together ──► apply, in log order ──► True
    fetch  ──► reader thread, with a connection of its own

Killing the process loses nothing that was acknowledged. A power cut may lose what was acknowledged
in the moments before it, unless the store was opened with `fsync`, which waits for the disk at
every commit; the file stays consistent either way. Memory holds requests in flight and two small
page caches, never the queued payloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

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
    FileLock,
    SpaceReserve,
    damaged_file,
    is_damage,
    is_full,
    open_reader,
    open_writer,
)
from atroposlib.api.store.sqlite_requests import Append, Command, Done
from atroposlib.api.store.sqlite_writer import Writer
from atroposlib.errors import ConfigError, RunStoreError
from atroposlib.utils.writable import unwritable

__all__ = ["SqliteRunStore"]

RECORDS_PER_READ = 2000
IDS_PER_RESERVATION = 4096
"""Ids are reserved on disk in advance; those not given by then are skipped after a crash."""

READ_AT_ONCE = 16
"""Payloads read in one transaction; a long one would keep the log file from starting again."""

MAX_GROUP_ID = 2**63 - 1

T = TypeVar("T")


class SqliteRunStore:
    """A `RunStore` in the file `path`, created with its directory; one process at a time.

    Invariant: records are applied on the event loop that opened the store, in log order, once each
    and after their commit.
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
        """Lock and load the file; ConfigError when it cannot be used."""
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
            reserve.close(keep=not reserve.is_whole)
            self._lock.release()
            if isinstance(error, sqlite3.DatabaseError):
                raise damaged_file(self._path, error) from error
            raise
        self._reader = reader

    @property
    def full_reason(self) -> str | None:
        """Why the disk has no space for new groups; None while it has."""
        return None if self._writer is None else self._writer.full_reason

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        """Write a record with its payloads and apply it; False when the fence has moved."""
        future: Future[bool] = self._loop.create_future()
        self._open_writer().submit(Append(record, payloads, fence, future))
        return await future

    async def sync(self) -> None:
        """Do nothing: only this process writes."""

    async def new_group_ids(self, count: int) -> range:
        """Reserve ids that were not given before, in this process or an earlier one."""
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
        """Return payloads in the order asked for; KeyError when one is not there."""
        self._open_writer()
        wanted = list(group_ids)
        return await self._in_reader(lambda: self._read_payloads(wanted, checks))

    async def discard(self, group_ids: Collection[int]) -> None:
        """Note payloads as garbage, to be deleted between other writes."""
        unwanted = list(group_ids)
        if unwanted:
            await self._command(lambda writer: writer.make_room(lambda: writer.discard(unwanted)))

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        """Let a snapshot stand for the records before a position."""
        await self._command(
            lambda writer: writer.make_room(lambda: writer.compact(snapshot, position))
        )

    async def alive_replicas(self) -> frozenset[str] | None:
        """Return None: only this process serves the run."""
        return None

    async def close(self) -> None:
        """Write what is waiting, shrink the file if little is left in it, and unlock it."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        used_until = self._next_group_id
        future: Future[None] = self._loop.create_future()
        release = partial(writer.release_ids, used_until)
        writer.submit(Command(lambda: writer.make_room(release), future))
        await self._in_reader(lambda: self._close_file(writer))
        with contextlib.suppress(RunStoreError):  # the ids reserved are then skipped
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
            reserve.close(keep=not reserve.is_whole)
            self._lock.release()
            raise

    def _connect(self, reserve: SpaceReserve) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        """Open the file for writing and for reading; on a full disk, with room of the reserve."""
        while True:
            try:
                connection = open_writer(self._path, fsync=self._fsync)
                try:
                    return connection, open_reader(self._path)
                except sqlite3.DatabaseError as error:
                    connection.close()
                    raise damaged_file(self._path, error) from error
            except ConfigError as error:
                if not is_full(error.__cause__, reserve) or not reserve.give_up():
                    raise

    def _close_file(self, writer: Writer) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        writer.close()
        self._lock.release()

    async def _replay(self, reader: sqlite3.Connection, restore: Restore) -> None:
        """Restore the snapshot and apply the records behind it, a slice at a time."""
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
        """Pass outcomes from the writer thread to the event loop, if it still runs."""
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
                    for group_id, is_intact in islice(left, READ_AT_ONCE):
                        content = _read_payload(reader, group_id)
                        if is_intact is not None and not is_intact(content):
                            raise damaged_payload(group_id)
                        contents.append(content)
            return contents
        except sqlite3.Error as error:
            kind = DamagedPayloadError if is_damage(error) else RunStoreError
            raise kind(f"{self._path} could not be read: {error}") from error

    async def _in_reader(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, read)


@contextlib.contextmanager
def _transaction(reader: sqlite3.Connection) -> Iterator[None]:
    """Read several rows of one state of the file, which takes its locks once."""
    reader.execute("BEGIN")
    try:
        yield
    finally:
        with contextlib.suppress(sqlite3.Error):  # nothing was written
            reader.execute("ROLLBACK")


def _read_payload(reader: sqlite3.Connection, group_id: int) -> bytes:
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
    return content
