"""The thread that writes the file of a run: what waits at the same moment shares one commit.

submit ──► queue ──► appends that wait together ──► one transaction ──► deliver, in log order
                └──► a command (discard, compact, ids) ──► a transaction of its own
                idle or between two commits: delete garbage for some milliseconds, checkpoint
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

from atroposlib.api.store.base import Payload, StoreFullError
from atroposlib.api.store.sqlite_file import (
    PAGE_BYTES,
    FileLock,
    SpaceReserve,
    free_bytes,
    is_damage,
    is_full,
    read_counters,
    shrink,
)
from atroposlib.api.store.sqlite_requests import Append, Command, Done
from atroposlib.errors import RunStoreError

__all__ = ["Writer"]

MAX_COMMIT_BYTES = 2 * 2**20
MAX_COMMIT_RECORDS = 256
CHECKPOINT_BYTES = 16 * 2**20
"""The log file is copied into the main file about every so many bytes written."""

MAX_WAL_BYTES = 128 * 2**20
"""Beyond this the checkpoint waits for readers, so that the log file starts anew."""

SLICE_S = 0.003
"""Longest time that deleting holds up what arrives meanwhile."""

_ROOM_ABOVE_BYTES = 8 * PAGE_BYTES
SLICE_PAYLOADS = 64
SLICE_RECORDS = 1000
LOOK_FOR_ROOM_S = 0.5
"""Interval between checks for free space while the disk is full."""

TELL_FULL_S = 60.0
FORGET_TOO_LARGE_S = 30.0
CLOSE_S = 2.0
"""What is left to delete is deleted on closing for so long; the rest when the run is resumed."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Writer:
    """Owns the writing connection; every method but `submit` and `close` runs in its thread.

    When the disk is full, records with payloads are rejected. All other records use the reserved
    space, one step at a time. Groups are accepted again once the reserve is complete, or once the
    file itself has as much free space.

    Attributes:
        full_reason: Why groups, or groups above a certain size, are rejected now; None while all
            are accepted.
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
        """Size of the largest commit that recently did not fit; 0 if there was none."""
        self._too_large_at = 0.0
        self._connection = connection
        self._lock = lock
        self._reserve = reserve
        self._checkpoint_bytes = min(CHECKPOINT_BYTES, reserve.whole_bytes // 2)
        self._room_checked_bytes = reserve.whole_bytes // 8
        self._told_at = float("-inf")
        self._deliver = deliver
        self._queue: SimpleQueue[Append | Command | None] = SimpleQueue()
        self._held: Append | Command | None = None
        self._is_closing = False
        self._unsaved_bytes = 0
        self._position, self._num_guarded = read_counters(connection)
        self._has_garbage = True
        if not reserve.is_whole:
            self._note_full("part of the reserved space is in use")
        self._thread = threading.Thread(target=self._serve, name="run-store-writer", daemon=True)
        self._thread.start()

    def submit(self, request: Append | Command) -> None:
        """Queue a request; its outcome is delivered."""
        self._queue.put(request)

    def close(self) -> None:
        """Write what is queued, tidy up and close the file; blocks until done."""
        self._queue.put(None)
        self._thread.join()

    def discard(self, group_ids: Collection[int]) -> None:
        """Note payloads as garbage; they can no longer be fetched."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR IGNORE INTO garbage SELECT value FROM json_each(?)",
                (json.dumps(list(group_ids)),),
            )
        self._has_garbage = True

    def make_room(self, write: Callable[[], T]) -> T:
        """Call `write` and return its result; on a full disk, use reserved space for it."""
        while True:
            try:
                return write()
            except sqlite3.Error as error:
                if not is_full(error, self._reserve):
                    raise
                self._note_full(str(error))
                if not self._reserve.give_up():
                    raise

    def compact(self, snapshot: bytes, position: int) -> None:
        """Let a snapshot stand for the log before a position; its records become garbage.

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
        """Note that ids below this one may have been given."""
        with self._transaction():
            self._connection.execute(
                "UPDATE ids SET next_group_id = max(next_group_id, ?)", (next_group_id,)
            )

    def release_ids(self, next_group_id: int) -> None:
        """Note that ids from here on were not given; for a store that closes."""
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
                self._seek_room()
            if not self._is_closing:
                self._tidy()
        self._finish()

    def _next_request(self, *, wait: bool) -> Append | Command | None:
        """Return the next request; None when there is none, or when the store closes."""
        request, self._held = self._held, None
        if request is not None:
            return request
        try:
            timeout_s = None if self.full_reason is None else LOOK_FOR_ROOM_S
            request = self._queue.get(block=wait, timeout=timeout_s)
        except Empty:
            return None
        self._is_closing = request is None
        return request

    def _gather(self, first: Append) -> list[Append]:
        """Take the appends that wait behind the first one, as far as one commit should go."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            if len(appends) > 1:  # so that only those fail that do not fit
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

    def _told_place(self) -> str:
        return f"the disk of {self._lock.path}"

    def _note_full(self, error: str) -> None:
        """Reject groups from now on."""
        if self.full_reason is None and time.monotonic() - self._told_at > TELL_FULL_S:
            self._told_at = time.monotonic()
            logger.error(
                "%s is full (%s): new groups are rejected until space is freed",
                self._told_place(),
                error,
            )
        self.refuses_payloads = True
        self.full_reason = (
            f"{self._told_place()} is full ({error}); new groups are rejected until space is "
            "freed: delete files, or let the trainer take batches"
        )

    def _note_too_large(self, num_bytes: int) -> None:
        """Reject commits of this size until there is space; smaller ones are still accepted."""
        self._too_large_at = time.monotonic()
        self._too_large_bytes = max(num_bytes, self._too_large_bytes)
        self.full_reason = (
            f"{self._told_place()} is full: there is no space for a group of {num_bytes} bytes; "
            "delete files, or let the trainer take batches"
        )

    def _seek_room(self) -> None:
        """Check whether groups can be accepted again."""
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
                logger.info("%s has free space again: new groups are accepted", self._told_place())
        except (sqlite3.Error, OSError) as error:  # the writing thread must not end
            logger.debug("no free space yet: %s", error)

    def _has_inner_room(self) -> bool:
        """Whether the file has enough free space inside, which no other program can take."""
        whole, left = self._reserve.whole_bytes, self._reserve.num_bytes
        return left >= whole // 2 and left + free_bytes(self._connection) >= 2 * whole

    def _return_space(self) -> None:
        """Return free space inside the file to the disk when little data is left in it."""
        self._connection.execute(
            "PRAGMA temp_store = MEMORY"
        )  # temporary files would need space on another disk
        below = self._reserve.whole_bytes // 2
        if self.make_room(lambda: shrink(self._connection, below_bytes=below)):
            self.make_room(self._truncate_log)

    def _truncate_log(self) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

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
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            self._deliver([Done(command, error=_as_error(error))])
        else:
            self._deliver([Done(command)])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write all that happens inside, or nothing."""
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
        """Delete a slice of the garbage and checkpoint when due; failures wait for next time."""
        try:
            if self._has_garbage:
                self._has_garbage = self.make_room(self._delete_slice)
            if self._unsaved_bytes >= self._checkpoint_bytes or not self._reserve.is_whole:
                self.make_room(self._checkpoint)
        except (sqlite3.Error, OSError, RunStoreError) as error:
            self._has_garbage = False  # tried again with the next discard, not in a circle
            logger.warning("the run's file could not be tidied up: %s", error)

    def _delete_slice(self) -> bool:
        """Delete some garbage for at most some milliseconds; tell whether there may be more."""
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
                try:
                    execute("DELETE FROM payload WHERE group_id = ?", (group_id,))
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    # Its space stays occupied; the remaining garbage can still be deleted.
                    logger.warning(
                        "the damaged payload of group %d cannot be deleted: %s", group_id, error
                    )
                if time.monotonic() > deadline or index == len(group_ids) - 1:
                    execute("DELETE FROM garbage WHERE group_id <= ?", (group_id,))
                    break
        return deleted > 0 or bool(group_ids)

    def _checkpoint(self) -> None:
        """Copy the log file into the main file, so that it can start anew."""
        self._unsaved_bytes = 0
        _, num_frames, num_saved = self._connection.execute(
            "PRAGMA wal_checkpoint(PASSIVE)"
        ).fetchone()
        if num_frames * PAGE_BYTES > MAX_WAL_BYTES:
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        else:
            self._unsaved_bytes += (num_frames - num_saved) * PAGE_BYTES

    def _finish(self) -> None:
        """Tidy up and close the file."""
        deadline = time.monotonic() + CLOSE_S
        try:
            while self._has_garbage and time.monotonic() < deadline:
                self._has_garbage = self._delete_slice()
            shrink(self._connection)
        except (sqlite3.Error, OSError) as error:
            logger.warning("the run's file could not be tidied up: %s", error)
        self._connection.close()
        if self.full_reason is not None:  # so that the next start finds it
            self._reserve.restore()
        self._reserve.close(keep=self.full_reason is not None)


def _as_error(error: Exception) -> RunStoreError:
    if isinstance(error, RunStoreError):
        return error
    if not isinstance(error, sqlite3.Error):
        logger.error("writing the run's file failed unexpectedly", exc_info=error)
    return RunStoreError(f"the run's file could not be written: {error}")
