"""The log of a run in Redis: what this process writes, and what it reads of others.

    append ─► waiting ─► one script call ─► Redis      many records and payloads in one round trip
    apply ◄── reply: every record from the position known here to the end

One task sends one call at a time, so replies come in order, and a lost reply is asked for again
under the same number. Every `poll_s` it looks for what others wrote. Several `append` calls made
while one is under way go together in the next. Who does not know the log far enough back, because
another has put a snapshot in its place, gets that: `restore` may be called at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from atroposlib.api.store import redis_scripts as scripts
from atroposlib.api.store.base import Apply, Payload, Restore, applied
from atroposlib.api.store.redis_link import Argument, RedisFullError, RedisLink, RunLostError
from atroposlib.errors import RunStoreError
from atroposlib.utils.awaiting import end_task

__all__ = ["RedisLog"]

logger = logging.getLogger(__name__)

_PAGE_RECORDS = 512
_CALL_ITEMS = 256
_CALL_BYTES = 4 * 2**20
_CLOSE_S = 5.0
_FULL_COUNTS_S = 30.0


class _Item:
    """An append that waits to be sent; without a record it only waits for news."""

    def __init__(
        self, record: bytes | None, payloads: Sequence[Payload] = (), fence: int | None = None
    ) -> None:
        self.record = record
        self.payloads = payloads
        self.fence = fence
        self.since = time.monotonic()
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def num_bytes(self) -> int:
        return sum(len(payload.content) for payload in self.payloads)

    def arguments(self) -> list[Argument]:
        fence = "" if self.fence is None else str(self.fence)
        flat: list[Argument] = [fence, self.record or b"", len(self.payloads)]
        for payload in self.payloads:
            flat += payload
        return flat

    def resolve(self, is_written: bool) -> None:
        if not self.done.done():
            self.done.set_result(is_written)

    def fail(self, error: RunStoreError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Page(NamedTuple):
    """What a reading script answers."""

    status: bytes
    answer: bytes
    base: int
    base_tag: bytes
    stop: int
    snapshot: bytes | None
    records: list[bytes]


class RedisLog:
    """Appends to the log of one run and follows it.

    Attributes:
        ids_end: End of the group ids this session has reserved; Redis must know as many.
    """

    def __init__(
        self, link: RedisLink, keys: scripts.RunKeys, *, outage_s: float, poll_s: float
    ) -> None:
        self.ids_end = 0
        self._link = link
        self._keys = keys
        self._outage_s = outage_s
        self._poll_s = poll_s
        self._apply: Apply
        self._restore: Restore
        self._position, self._tag = -1, b""
        self._sequence = self._answered = 0
        self._waiting: deque[_Item] = deque()
        self._is_wanted = asyncio.Event()
        self._is_closing = False
        self._failure: RunStoreError | None = None
        self._task: asyncio.Task[None] | None = None
        self._refused: tuple[float, str] | None = None
        """Time and text of the last rejection for lack of memory; None after a success."""

    async def open(self, apply: Apply, restore: Restore) -> None:
        """Read the log from its snapshot on, and follow it from then on."""
        self._apply, self._restore = apply, restore
        await self._read_on(await self._read(None), None)
        self._task = asyncio.create_task(self._work())

    @property
    def full_reason(self) -> str | None:
        """Why Redis rejected payloads in the last 30 s; None if it has accepted some since."""
        if self._refused is None or time.monotonic() - self._refused[0] > _FULL_COUNTS_S:
            return None
        return self._refused[1]

    async def append(self, record: bytes, payloads: Sequence[Payload], fence: int | None) -> bool:
        """Write a record with its payloads and apply the log up to it; False: the fence moved."""
        return await self._enqueue(_Item(record, payloads, fence))

    async def sync(self) -> None:
        """Apply what others appended before this call."""
        await self._enqueue(_Item(None))

    async def compact(self, snapshot: bytes, position: int) -> None:
        """Replace the records before a position by a snapshot, unless another's is newer."""
        arguments = (self._position, self._tag, snapshot, position)
        await self._link.call(scripts.COMPACT, self._keys[:3], arguments)

    async def close(self) -> None:
        """Send what waits, a few seconds at most, and stop following."""
        self._is_closing = True
        self._is_wanted.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_S)
            await end_task(self._task)
        for item in self._waiting:
            item.fail(RunStoreError("the store is closed"))

    async def _enqueue(self, item: _Item) -> bool:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._is_closing:
            raise RunStoreError("the store is closed")
        self._waiting.append(item)
        self._is_wanted.set()
        return await item.done

    async def _work(self) -> None:
        """Send what waits, or look for news every `poll_s`, until the log closes or is lost."""
        batch: list[_Item] = []
        try:
            while not (self._is_closing and not self._waiting):
                if not self._waiting:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._is_wanted.wait(), self._poll_s)
                self._is_wanted.clear()
                batch = self._take_batch()
                await self._exchange(batch)
        except RunLostError as error:
            self._stop(error, batch)
        except asyncio.CancelledError:
            self._stop(RunStoreError("the store is closed"), batch)
            raise
        except Exception as error:  # a task boundary: callers must not wait for ever
            logger.exception("following the run in Redis failed")
            self._stop(RunStoreError(f"following the run in Redis failed: {error!r}"), batch)

    def _stop(self, failure: RunStoreError, batch: Collection[_Item]) -> None:
        if not self._is_closing:
            logger.error("%s", failure)
        self._failure = failure
        for item in (*batch, *self._waiting):
            item.fail(failure)
        self._waiting.clear()

    def _take_batch(self) -> list[_Item]:
        """Take what waits, up to the size of one call; what its caller gave up on is skipped."""
        batch: list[_Item] = []
        num_bytes = 0
        while self._waiting and len(batch) < _CALL_ITEMS and num_bytes < _CALL_BYTES:
            item = self._waiting.popleft()
            if not item.done.done():
                batch.append(item)
                num_bytes += item.num_bytes
        return batch

    async def _exchange(self, batch: list[_Item]) -> None:
        """Send a batch, apply what comes back, and tell the callers."""
        writing = [item for item in batch if item.record is not None]
        # A look that nobody waits for is made once; the next is due soon anyway.
        deadline = min(item.since for item in batch) + self._outage_s if batch else 0.0
        try:
            page = await (self._write(writing, deadline) if writing else self._read(deadline))
            await self._read_on(page, deadline)
        except RunLostError:
            raise
        except RunStoreError as error:
            await self._refuse(batch, error)
            return
        if any(item.payloads for item in writing):
            self._refused = None
        for item, position in zip(writing, page.answer.split(), strict=True):
            item.resolve(position != b"-1")
        for item in batch:
            item.resolve(True)

    async def _refuse(self, batch: Collection[_Item], error: RunStoreError) -> None:
        """Fail a batch; when memory is short, only what brings payloads: the rest frees some."""
        light = [item for item in batch if not item.payloads]
        is_full = isinstance(error, RedisFullError) and len(light) < len(batch)
        if is_full:
            self._refused = time.monotonic(), str(error)
        for item in batch:
            if item.payloads or not is_full:
                item.fail(error)
        if is_full and light:
            await self._exchange(light)

    async def _write(self, items: Sequence[_Item], deadline: float) -> _Page:
        self._sequence += 1
        sequence = self._sequence
        script = scripts.APPEND[any(item.payloads for item in items)]
        keys = (*self._keys[:3], self._keys.session, self._keys.payloads)
        body = [argument for item in items for argument in item.arguments()]

        async def attempt() -> _Page:
            head: list[Argument] = [self._position, self._tag, _PAGE_RECORDS]
            head += [sequence, self._answered, self.ids_end, os.urandom(scripts.TAG_BYTES)]
            reply = await self._link.call_once(script, keys, [*head, len(items), *body])
            return _Page(*reply)

        page: _Page = await self._link.attempt(attempt, deadline)
        self._answered = sequence
        return page

    async def _read(self, deadline: float | None) -> _Page:
        arguments = (self._position, self._tag, _PAGE_RECORDS)
        reply = await self._link.call(scripts.READ, self._keys[:3], arguments, deadline=deadline)
        return _Page(*reply)

    async def _read_on(self, page: _Page, deadline: float | None) -> None:
        """Apply a page and those behind it, up to where the log ended at the first one."""
        self._take(page)
        stop = page.stop
        while self._position < stop:
            self._take(await self._read(deadline))

    def _take(self, page: _Page) -> None:
        """Apply a page; it begins where the last one ended, or with a snapshot."""
        if self._position < page.base:
            if page.snapshot is not None:
                self._restore(page.snapshot)
            self._position, self._tag = page.base, page.base_tag
        for entry in page.records:
            applied(self._apply, self._position, entry[scripts.TAG_BYTES :])
            self._position += 1
            self._tag = entry[: scripts.TAG_BYTES]
