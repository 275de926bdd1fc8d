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

from atroposlib.api.store.base import Payload
from atroposlib.api.store.sqlite_file import PAGE_BYTES, is_damage, read_counters, shrink
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

SLICE_PAYLOADS = 64
SLICE_RECORDS = 1000
CLOSE_S = 2.0
"""What is left to delete is deleted on closing for so long; the rest when the run is resumed."""

logger = logging.getLogger(__name__)


class Writer:
    """Owns the writing connection; every method but `submit` and `close` runs in its thread."""

    def __init__(
        self, connection: sqlite3.Connection, deliver: Callable[[list[Done]], None]
    ) -> None:
        self._connection = connection
        self._deliver = deliver
        self._queue: SimpleQueue[Append | Command | None] = SimpleQueue()
        self._held: Append | Command | None = None
        self._is_closing = False
        self._unsaved_bytes = 0
        self._position, self._num_guarded = read_counters(connection)
        self._has_garbage = True
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

    def compact(self, snapshot: bytes, position: int) -> None:
        """Let a snapshot stand for the log before a position; its records become garbage."""
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
            if not self._is_closing:
                self._tidy()
        self._finish()

    def _next_request(self, *, wait: bool) -> Append | Command | None:
        """Return the next request; None when there is none, or when the store closes."""
        request, self._held = self._held, None
        if request is not None:
            return request
        try:
            request = self._queue.get(block=wait)
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
            done = self._commit(appends)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            if len(appends) > 1:  # so that only those fail that do not fit
                for append in appends:
                    self._write_appends([append])
                return
            done = [Done(appends[0], error=_as_error(error))]
        self._deliver(done)

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
                self._has_garbage = self._delete_slice()
            if self._unsaved_bytes >= CHECKPOINT_BYTES:
                self._unsaved_bytes = 0
                self._checkpoint()
        except sqlite3.Error as error:
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
                    # What it takes up stays lost; the garbage behind it can go.
                    logger.warning("the damaged payload of group %d stays: %s", group_id, error)
                if time.monotonic() > deadline or index == len(group_ids) - 1:
                    execute("DELETE FROM garbage WHERE group_id <= ?", (group_id,))
                    break
        return deleted > 0 or bool(group_ids)

    def _checkpoint(self) -> None:
        """Copy the log file into the main file, so that it can start anew."""
        _, num_frames, _ = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if num_frames * PAGE_BYTES > MAX_WAL_BYTES:
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()

    def _finish(self) -> None:
        """Tidy up and close the file."""
        deadline = time.monotonic() + CLOSE_S
        try:
            while self._has_garbage and time.monotonic() < deadline:
                self._has_garbage = self._delete_slice()
            shrink(self._connection)
        except sqlite3.Error as error:
            logger.warning("the run's file could not be tidied up: %s", error)
        self._connection.close()


def _as_error(error: Exception) -> RunStoreError:
    if not isinstance(error, sqlite3.Error):
        logger.error("writing the run's file failed unexpectedly", exc_info=error)
    return RunStoreError(f"the run's file could not be written: {error}")
