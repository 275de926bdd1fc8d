"""The protocol every store of a run implements: a log, payloads by id, and a snapshot.

    append(record, payloads) ──► log ──► apply(position, record), in log order, in every replica
                             └─► payloads, until discarded

The state of a run is what applying the log's records in order gives. A store knows nothing of what
records mean: it writes them down, hands each to `apply` exactly once per process, and in the same
order everywhere.

Guarded records. A record that would be wrong had another replica acted meanwhile is appended with
a *fence*: the number of guarded records applied so far. The store refuses it when the log holds
more of them; the caller, who has then seen what the other replica wrote, decides anew.

A store that remembers whether it works, and how long it takes; wraps any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import NamedTuple, Protocol

from atroposlib.errors import RunStoreError

__all__ = [
    "Apply",
    "DamagedPayloadError",
    "Observe",
    "Payload",
    "PayloadCheck",
    "Restore",
    "RunStore",
    "StoreFullError",
    "WatchedStore",
    "applied",
    "check_payloads",
    "damaged_payload",
]

logger = logging.getLogger(__name__)

Apply = Callable[[int, bytes], None]
"""Takes a record and its position in the log (from 0); never awaited, never raises.

A store applies the records behind it all the same, should it raise: see `applied`."""

Restore = Callable[[bytes], None]
"""Takes a snapshot of the whole state: when a run is opened, and again, in place of what there is,
when a replica fell behind records that another has compacted."""

PayloadCheck = Callable[[bytes], bool]
"""Whether these bytes are the payload that was stored."""


def applied(apply: Apply, position: int, record: bytes) -> None:
    """Apply a record that the log holds; what goes wrong is logged, and ends nothing else.

    Whoever wrote the records behind it waits for word of them, some with a lock in hand.
    """
    try:
        apply(position, record)
    except Exception:
        logger.exception("record %d of the run could not be applied", position)


class Payload(NamedTuple):
    """The bytes of one group, as they are stored and sent."""

    group_id: int
    content: bytes


class DamagedPayloadError(RunStoreError):
    """The payload of a group is in the store but damaged, and can never be read."""


class StoreFullError(RunStoreError):
    """The store has no space for new groups; stored groups can still be delivered."""


def check_payloads(
    group_ids: Sequence[int], contents: Sequence[bytes], checks: Sequence[PayloadCheck]
) -> None:
    """Call the checks of payloads that were read.

    Raises:
        DamagedPayloadError: a check failed; names the group.
    """
    for group_id, content, is_intact in zip(group_ids, contents, checks, strict=False):
        if not is_intact(content):
            raise damaged_payload(group_id)


def damaged_payload(group_id: int) -> DamagedPayloadError:
    """Return the error for a payload whose check failed."""
    return DamagedPayloadError(f"the payload of group {group_id} is not what was stored")


class RunStore(Protocol):
    """Keeps one run. Methods wait for a disk or another machine and are safe to cancel.

    A cancelled `append` has written everything or nothing, and what it wrote is still applied.
    """

    @property
    def full_reason(self) -> str | None:
        """Why new groups are rejected until there is space; None while they are accepted."""

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Load the run: `restore` the snapshot if there is one, then `apply` the records behind it.

        Raises:
            ConfigError: the store cannot be used, e.g. another process holds the same file.
        """

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        """Write a record with its payloads, all or nothing, and apply the log up to it.

        Args:
            record: what happened.
            payloads: the groups it brings.
            fence: for a guarded record, the guarded records applied so far; None for others.

        Returns:
            True once the record survives what the store survives and has been applied; False when
            the fence has moved: nothing was written, and what others wrote has been applied.

        Raises:
            StoreFullError: there is no space for the payloads. Records without payloads are
                written to reserved space.
            RunStoreError: writing failed for another reason.
        """

    async def sync(self) -> None:
        """Apply what other replicas have appended; nothing to do where there are none."""

    async def new_group_ids(self, count: int) -> range:
        """Reserve ids that no replica has used or will use."""

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        """Return payloads in the order asked for.

        Args:
            group_ids: the groups.
            checks: one per group, or none. Each is called as soon as its payload is read, while
                the processor still has it in its cache; in another thread if the store reads there.

        Raises:
            KeyError: one of the groups is not in the store.
            DamagedPayloadError: one of them cannot be read, and never will be, or its check failed.
        """

    async def discard(self, group_ids: Collection[int]) -> None:
        """Forget payloads; ids that are not there are skipped."""

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        """Replace the records before `position` by a snapshot of what they led to.

        Records behind it stay: they may have been applied while the snapshot was written. A
        snapshot older than the one that is stored changes nothing.

        Args:
            snapshot: the state after the first `position` records of the log.
            position: position of the first record that the snapshot does not account for.
        """

    async def alive_replicas(self) -> frozenset[str] | None:
        """Return the names of replicas that serve this run; None: this process is the only one."""

    async def close(self) -> None:
        """Release what the store holds; called once, when the service stops."""


Observe = Callable[[str, float], None]
"""Takes what was done, `append` or `fetch`, and the seconds it took."""

_FAILURE_COUNTS_S = 30.0


class WatchedStore:
    """Passes every call on; see `problem` for what it adds.

    Args:
        store: the store that does the work.
        observe: told of every append and fetch that succeeded; may be replaced.
        clock: seconds that never go back.
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
        """(operation, has payloads) → when it last failed, and why."""

    async def problem(self, *, timeout_s: float = 2.0) -> str | None:
        """Return why the store cannot be relied on now, None when it can.

        Asks the store, and remembers what failed for half a minute unless it worked since: a disk
        that is full lets itself be asked, and read.
        """
        try:
            await asyncio.wait_for(self.sync(), timeout_s)
        except asyncio.TimeoutError:
            return f"the store did not answer within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            return _told(error)
        since = self._clock() - _FAILURE_COUNTS_S
        failures = (reason for at, reason in self._failures.values() if at > since)
        return self.store.full_reason or next(failures, None)

    @property
    def full_reason(self) -> str | None:
        """Why the store rejects new groups; None while it accepts them."""
        return self.store.full_reason

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Load the run."""
        await self.store.open(apply, restore)

    async def append(
        self, record: bytes, payloads: Sequence[Payload] = (), *, fence: int | None = None
    ) -> bool:
        """Write a record with its payloads."""
        # On a full disk only records without payloads can be written: count them apart.
        with self._watch("append", bool(payloads)):
            return await self.store.append(record, payloads, fence=fence)

    async def sync(self) -> None:
        """Apply what other replicas have appended."""
        await self.store.sync()

    async def new_group_ids(self, count: int) -> range:
        """Reserve ids."""
        with self._noting_failure("reserve ids"):
            return await self.store.new_group_ids(count)

    async def fetch(
        self, group_ids: Sequence[int], checks: Sequence[PayloadCheck] = ()
    ) -> list[bytes]:
        """Return payloads."""
        with self._watch("fetch"):
            return await self.store.fetch(group_ids, checks)

    async def discard(self, group_ids: Collection[int]) -> None:
        """Forget payloads."""
        await self.store.discard(group_ids)

    async def compact(self, snapshot: bytes, *, position: int) -> None:
        """Replace records by a snapshot."""
        await self.store.compact(snapshot, position=position)

    async def alive_replicas(self) -> frozenset[str] | None:
        """Return the names of replicas that serve this run."""
        return await self.store.alive_replicas()

    async def close(self) -> None:
        """Release what the store holds."""
        await self.store.close()

    @contextmanager
    def _watch(self, operation: str, has_payloads: bool = False) -> Iterator[None]:
        started = perf_counter()
        with self._noting_failure(operation, has_payloads):
            yield
        self.observe(operation, perf_counter() - started)

    @contextmanager
    def _noting_failure(self, operation: str, has_payloads: bool = False) -> Iterator[None]:
        """Remember a failure, and log it when it is the first in a row."""
        try:
            yield
        except (KeyError, DamagedPayloadError):
            raise  # about one group; the run sets it aside and counts it
        except Exception as error:
            if (operation, has_payloads) not in self._failures:
                logger.error("the store fails to %s: %s", operation, _told(error))
            told = f"{operation}: {_told(error)}"
            self._failures[operation, has_payloads] = self._clock(), told
            raise
        if self._failures.pop((operation, has_payloads), None) is not None:
            logger.info("the store can %s again", operation)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
