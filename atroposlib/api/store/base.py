"""The protocol that every store of a run implements: a log, payloads by id, and a snapshot.

    append(record, payloads) ──► log ──► apply(position, record), in log order, in every replica
                             └─► payloads, until discarded

The state of a run results from applying the records of the log in order. A store does not interpret
records: it writes them, and passes each to `apply` exactly once per process, in the same order in
every process.

Guarded records: a record that would be wrong if another replica had written meanwhile is appended
with a *fence*, the number of guarded records applied so far. The store rejects it if the log holds
more of them. The caller has then applied the records of the other replica, and decides again.

`MemoryRunStore` holds a run in the memory of this process. `WatchedStore` wraps any store to
observe its failures and durations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import monotonic, perf_counter
from typing import NamedTuple, Protocol

from atroposlib.errors import RunStoreError

logger = logging.getLogger(__name__)

Apply = Callable[[int, bytes], None]
"""Applies a record at its position in the log (from 0); synchronous, must not raise.

If it raises, the store still applies the records after it: see `applied`."""

Restore = Callable[[bytes], None]
"""Loads a snapshot in place of the state: when a run is opened, and when another replica compacted
records that this one has not applied."""

PayloadCheck = Callable[[bytes], bool]
"""Returns whether these bytes are the payload that was stored."""


def applied(apply: Apply, position: int, record: bytes) -> None:
    """Apply a record of the log; exceptions are logged, since later records must be applied too."""
    try:
        apply(position, record)
    except Exception:
        logger.exception("record %d of the run could not be applied", position)


class Payload(NamedTuple):
    """The bytes of one group, as stored and sent."""

    group_id: int
    content: bytes


class DamagedPayloadError(RunStoreError):
    """The payload of a group is in the store but damaged, and can never be read."""


class StoreFullError(RunStoreError):
    """The store has no space for new groups; stored groups can still be delivered."""


def check_payloads(
    group_ids: Sequence[int], contents: Sequence[bytes], checks: Sequence[PayloadCheck]
) -> None:
    """Run the checks of payloads that were read; raise `DamagedPayloadError` if one fails."""
    for group_id, content, is_intact in zip(group_ids, contents, checks, strict=False):
        if not is_intact(content):
            raise damaged_payload(group_id)


def damaged_payload(group_id: int) -> DamagedPayloadError:
    """Return the error for a payload whose check failed."""
    return DamagedPayloadError(f"the payload of group {group_id} is not what was stored")


class RunStore(Protocol):
    """Stores one run. Methods wait for a disk or another machine and are safe to cancel.

    A cancelled `append` has written everything or nothing; a written record is still applied.
    """

    @property
    def full_reason(self) -> str | None:
        """Reason for which new groups are rejected; None while they are accepted."""

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Load the run: `restore` the snapshot if there is one, then `apply` the records after it.

        Raises:
            ConfigError: the store cannot be used, e.g. another process holds the same file.
        """

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        """Write a record with its payloads, all or nothing, and apply the log up to it.

        Args:
            record: the encoded record.
            payloads: the groups of the record.
            fence: number of guarded records applied so far, for a guarded record; None for others.

        Returns:
            True once the record is as durable as the store allows, and applied. False if the fence
            has moved: nothing was written, and the records of other replicas have been applied.

        Raises:
            StoreFullError: there is no space for the payloads. Records without payloads are
                written to reserved space.
            RunStoreError: writing failed for another reason.
        """

    async def sync(self) -> None:
        """Apply the records that other replicas have appended."""

    async def new_group_ids(self, count: int) -> range:
        """Reserve ids that no replica has used or will use."""

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        """Return payloads in the order of the ids.

        Args:
            group_ids: the groups.
            checks: one per group, or empty. Each is called right after its payload is read, while
                it is in the CPU cache; in another thread if the store reads there.

        Raises:
            KeyError: one of the groups is not in the store.
            DamagedPayloadError: one of them is unreadable for good, or its check failed.
        """

    async def discard(self, group_ids: Collection[int]) -> None:
        """Delete payloads; unknown ids are skipped."""

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        """Replace the records before `position` with a snapshot of the state after them.

        Later records stay, since they may have been applied while the snapshot was written. A
        snapshot older than the stored one changes nothing.
        """

    async def alive_replicas(self) -> frozenset[str] | None:
        """Return the names of the replicas that serve this run; None if only this process can."""

    async def close(self) -> None:
        """Release all resources; called once, when the service stops."""


Observe = Callable[[str, float], None]
"""Called with the operation, `append` or `fetch`, and its duration in seconds."""

_FAILURE_COUNTS_S = 30.0


class WatchedStore:
    """Wraps a store; records failures (see `problem`) and durations.

    `observe` is called after every successful append and fetch; it may be replaced.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        observe: Observe = lambda operation, seconds: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.store = store
        self.observe = observe
        self._clock = clock
        self._failures: dict[tuple[str, bool], tuple[float, str]] = {}
        """(operation, has payloads) → time of its last failure (-inf: no space), and reason."""

    async def problem(self, *, timeout_s: float = 2.0) -> str | None:
        """Query the store; return the reason for which it is not usable, None if it is.

        An operation that failed in the last 30 s and has not succeeded since also counts, because a
        broken disk can still be queried and read. A full store does not: it delivers batches, which
        frees space, so that a supervisor or load balancer must not take it out of service.
        """
        try:
            await asyncio.wait_for(self.sync(), timeout_s)
        except asyncio.TimeoutError:
            return f"the store did not answer within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - any error is the answer
            return _describe(error)
        since = self._clock() - _FAILURE_COUNTS_S
        failures = (reason for at, reason in self._failures.values() if at > since)
        return next(failures, None)

    @property
    def full_reason(self) -> str | None:
        return self.store.full_reason

    async def open(self, apply: Apply, restore: Restore) -> None:
        await self.store.open(apply, restore)

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        # On a full disk only records without payloads can be written: track them separately.
        with self._watch("append", bool(payloads)):
            return await self.store.append(record, payloads, fence=fence)

    async def sync(self) -> None:
        await self.store.sync()

    async def new_group_ids(self, count: int) -> range:
        with self._noting_failure("reserve ids"):
            return await self.store.new_group_ids(count)

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        with self._watch("fetch"):
            return await self.store.fetch(group_ids, checks)

    async def discard(self, group_ids: Collection[int]) -> None:
        await self.store.discard(group_ids)

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        await self.store.compact(snapshot, position=position)

    async def alive_replicas(self) -> frozenset[str] | None:
        return await self.store.alive_replicas()

    async def close(self) -> None:
        await self.store.close()

    @contextmanager
    def _watch(self, operation: str, has_payloads: bool = False) -> Iterator[None]:
        started = perf_counter()
        with self._noting_failure(operation, has_payloads):
            yield
        self.observe(operation, perf_counter() - started)

    @contextmanager
    def _noting_failure(self, operation: str, has_payloads: bool = False) -> Iterator[None]:
        """Record a failure; log it if the previous call succeeded."""
        try:
            yield
        except (KeyError, DamagedPayloadError):
            raise  # concerns one group, which the run sets aside and counts
        except Exception as error:
            if (operation, has_payloads) not in self._failures:
                logger.error("the store fails to %s: %s", operation, _describe(error))
            reason = f"{operation}: {_describe(error)}"
            at = -inf if isinstance(error, StoreFullError) else self._clock()
            self._failures[operation, has_payloads] = at, reason
            raise
        if self._failures.pop((operation, has_payloads), None) is not None:
            logger.info("the store can %s again", operation)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class MemoryRunStore:
    """A `RunStore` for temporary runs and tests; its methods never wait.

    The run lasts as long as this object: opened again, it replays its log like a store on disk.
    """

    def __init__(self) -> None:
        self._apply: Apply
        self._snapshot: bytes | None = None
        self._first_position = 0
        self._records: list[bytes] = []
        self._num_guarded = 0
        self._payloads: dict[int, bytes] = {}
        self._next_group_id = 0

    @property
    def full_reason(self) -> str | None:
        return None

    async def open(self, apply: Apply, restore: Restore) -> None:
        self._apply = apply
        if self._snapshot is not None:
            restore(self._snapshot)
        for position, record in enumerate(self._records, start=self._first_position):
            applied(apply, position, record)

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        if fence is not None:
            if fence < self._num_guarded:
                return False
            self._num_guarded += 1
        self._payloads.update(payloads)
        position = self._first_position + len(self._records)
        self._records.append(record)
        applied(self._apply, position, record)
        return True

    async def sync(self) -> None:
        """Do nothing, since there are no other replicas."""

    async def new_group_ids(self, count: int) -> range:
        first = self._next_group_id
        self._next_group_id += count
        return range(first, self._next_group_id)

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        contents = [self._payloads[group_id] for group_id in group_ids]
        check_payloads(group_ids, contents, checks)
        return contents

    async def discard(self, group_ids: Collection[int]) -> None:
        for group_id in group_ids:
            self._payloads.pop(group_id, None)

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        num_records = position - self._first_position
        if num_records >= 0:
            self._snapshot = snapshot
            self._first_position = position
            del self._records[:num_records]

    async def alive_replicas(self) -> frozenset[str] | None:
        return None

    async def close(self) -> None:
        """Do nothing, since the run may be opened again."""
