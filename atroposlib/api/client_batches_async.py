"""Batches for trainers that run in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import TracebackType

from atroposlib.api.client_batches import BatchIterator
from atroposlib.api.client_rules import LeasedBatch
from atroposlib.utils.side_thread import SideThread

__all__ = ["AsyncBatches"]


class AsyncBatches:
    """The same iterator for `async for`: every request is made beside the event loop.

    Cancelling is safe: a batch that arrives afterwards is the next one, or goes back on leaving.

    Args:
        batches: what `batches` returned; belongs to this from here on.

    Example:
        >>> async with AsyncBatches(batches(url, batch_size=32, num_steps=100)) as stream:
        ...     async for batch in stream:
        ...         await train(batch.groups)
    """

    def __init__(self, batches: BatchIterator) -> None:
        self._batches = batches
        self._side_thread = SideThread()
        self._fetching: asyncio.Task[LeasedBatch | None] | None = None

    def __aiter__(self) -> AsyncBatches:
        return self

    async def __anext__(self) -> LeasedBatch:
        """Acknowledge the last batch and wait for the next; ends and raises as `for` does."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._side_thread.run(self._batches.next_batch))
        fetching = self._fetching
        try:
            batch = await asyncio.shield(fetching)
        finally:
            if fetching.done():
                self._fetching = None
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def ack(self, batch: LeasedBatch, *, is_trained: bool = True) -> None:
        """Tell the service that a batch is trained, or not; see `BatchIterator.ack`."""
        await self._side_thread.run(self._batches.ack, batch, is_trained=is_trained)

    async def nack(self, batch: LeasedBatch) -> None:
        """Give a batch back; see `BatchIterator.nack`."""
        await self._side_thread.run(self._batches.nack, batch)

    async def set_policy_version(self, version: int) -> None:
        """Tell the service which weights the inference engine serves now."""
        await self._side_thread.run(self._batches.set_policy_version, version)

    async def __aenter__(self) -> AsyncBatches:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End as `BatchIterator.leave`; waits for a request that is under way."""
        self._batches.stop_waiting()
        fetching, self._fetching = self._fetching, None
        is_failed = exc_type is not None
        if fetching is not None:
            with contextlib.suppress(Exception):  # whoever left does not ask for it any more
                is_failed = await fetching is not None or is_failed  # nobody has seen that batch
        await self._side_thread.run(partial(self._batches.leave, is_failed=is_failed))
        self._side_thread.close()
