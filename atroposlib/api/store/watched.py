"""A store that remembers whether it works, and how long it takes; wraps any other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, perf_counter

from atroposlib.api.store.base import (
    Apply,
    DamagedPayloadError,
    Payload,
    PayloadCheck,
    Restore,
    RunStore,
)

__all__ = ["Observe", "WatchedStore"]

logger = logging.getLogger(__name__)

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
