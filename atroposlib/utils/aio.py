"""Helpers for an event loop: calls in one side thread, groups of tasks, and decoding in pieces.

`SideThread` runs calls one at a time. Threads compete with the event loop for the interpreter lock:
with several active threads the loop waits for each of them in turn, with one thread for one step.

`all_results` and `end_task` leave no task running; `settle` awaits awaitable results.
`ends_within` limits time without counting that in which the process stands still.
`refuse_cancelled` makes an error of a cancellation that came from the code of a task.
`unless_disconnected` ends the work for an HTTP client that leaves.

`decode_long` decodes in pieces, so that other rollouts run in between. A tokenizer holds the
interpreter lock while it decodes, also in a thread: too long for tens of thousands of tokens.

`LoopSemaphore` outlives an event loop.

`LoopTurns` bounds the synchronous work of one pass of the event loop. Encoding a request or
decoding an answer blocks the loop for a fraction of a millisecond; with hundreds of rollouts ready
in one pass, this adds up to stalls of seconds (`benchmarks/inference.py`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

__all__ = [
    "NUM_WAITS",
    "SHARE_S",
    "LoopSemaphore",
    "LoopTurns",
    "SideThread",
    "all_results",
    "decode_long",
    "end_task",
    "ends_within",
    "refuse_cancelled",
    "settle",
    "unless_disconnected",
]

Result = TypeVar("Result")


class SideThread:
    """A thread that starts with the first call."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Return `function(*args, **kwargs)`, called after all earlier calls.

        Cancelling is safe; a call that has started still runs to its end.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="side-thread")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        """End the thread after the queued calls; a later `run` starts another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


_CANCEL_AGAIN_S = 0.25


async def all_results(steps: Iterable[Awaitable[Result]]) -> list[Result]:
    """Wait for all steps, then return their results in order.

    Unlike with `asyncio.gather`, no step is still running when the exception of a step is raised.

    Raises:
        BaseException: the exception of the first failed step, in order, after all have ended.
    """
    outcomes = await asyncio.gather(*steps, return_exceptions=True)
    results = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; its exception is dropped.

    A task that continues is cancelled again: some libraries (redis), and `asyncio.wait_for` before
    Python 3.12, lose a cancellation that coincides with a reply.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()  # so that it is not logged as never retrieved


NUM_WAITS = 10
"""Waits that make up a delay or a time limit: while a whole process stands still, one can pass."""


async def ends_within(task: asyncio.Future[Any], limit_s: float) -> bool:
    """Whether a task ends in time, of which the process may stand still for a part."""
    for _ in range(NUM_WAITS):
        await asyncio.wait({task}, timeout=limit_s / NUM_WAITS)
        if task.done():
            return True
    return False


def refuse_cancelled(task: asyncio.Task[Any]) -> None:
    """Check that a finished task was not cancelled, for one that its owner has not cancelled.

    Code that awaits a cancelled task raises its cancellation, which would look like an end without
    an error.

    Raises:
        RuntimeError: it was cancelled; the cause has the line of code.
    """
    if not task.cancelled():
        return
    try:
        task.result()
    except asyncio.CancelledError as cancelled:
        raise RuntimeError(
            "the run was cancelled by its own code, which let a CancelledError pass, such as that "
            "of a cancelled task"
        ) from cancelled


async def unless_disconnected(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Coroutine[Any, Any, Result]
) -> Result | None:
    """Wait for work; cancel it and return None if the HTTP client closes the connection.

    `receive` is that of an ASGI request whose body has been read.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class LoopSemaphore:
    """A semaphore for objects that are used in one event loop after the other.

    Those of asyncio belong to the loop in which a task first waited for them, so that the next
    `asyncio.run` of a program would fail.
    """

    def __init__(self, value: int) -> None:
        self._value = value
        self._semaphore = asyncio.Semaphore(value)
        self._loop: asyncio.AbstractEventLoop | None = None

    def of_loop(self) -> asyncio.Semaphore:
        """Return the semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._value)
        return self._semaphore


PIECE_TOKENS = 512
CONTEXT_TOKENS = 8
"""Tokens decoded again before a piece, so that spaces and characters join as in the whole."""

INCOMPLETE_CHARACTER = "\ufffd"
LONGEST_CHARACTER = 4
"""Maximum number of bytes, and so of tokens, of one character."""


async def decode_long(tokenizer: Any, ids: Sequence[int], **options: Any) -> str:
    """Return `tokenizer.decode(ids, **options)`, decoded in pieces that end between characters.

    A tokenizer whose pieces do not join to the same text decodes all ids at once.
    """
    ids = list(ids)
    pieces: list[str] = []
    start = 0
    while start < len(ids):
        end = min(start + PIECE_TOKENS, len(ids))
        for num_context in range(CONTEXT_TOKENS, CONTEXT_TOKENS + LONGEST_CHARACTER):
            context = ids[max(0, start - num_context) : start]
            before = str(tokenizer.decode(context, **options)) if context else ""
            if INCOMPLETE_CHARACTER not in before:
                break  # otherwise a cut character may make all bytes that follow it unreadable
        else:
            return str(tokenizer.decode(ids, **options))
        for end in range(end, min(end + CONTEXT_TOKENS, len(ids)) + 1):  # noqa: B020
            text = str(tokenizer.decode(context + ids[start:end], **options))
            if end == len(ids) or not text.endswith(INCOMPLETE_CHARACTER):
                break
        if not text.startswith(before):
            return str(tokenizer.decode(ids, **options))
        pieces.append(text[len(before) :])
        start = end
        if start < len(ids):
            await asyncio.sleep(0)
    return "".join(pieces)


SHARE_S = 0.004
"""Estimated work admitted to one pass of the loop, in seconds."""


class LoopTurns:
    """Admits estimated work to each pass of the running loop, first come first served.

    While the budget of the pass lasts, `turn` returns at once without yielding to the loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()
        self._spent_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def turn(self, cost_s: float) -> None:
        """Wait until work of `cost_s` seconds fits a pass of the loop; cancelling is safe."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the previous loop was closed, together with its waiters
            self._loop, self._spent_s = loop, 0.0
            self._waiting.clear()
        if not self._waiting and self._fits(cost_s):
            self._spend(cost_s)
            return
        mine = loop.create_future()
        self._waiting.append((mine, cost_s))
        await mine

    def _fits(self, cost_s: float) -> bool:
        # Work larger than the budget gets a pass to itself.
        return self._spent_s == 0.0 or self._spent_s + cost_s <= SHARE_S

    def _spend(self, cost_s: float) -> None:
        assert self._loop is not None
        if self._spent_s == 0.0:
            self._loop.call_soon(self._next_pass)
        self._spent_s += cost_s

    def _next_pass(self) -> None:
        self._spent_s = 0.0
        while self._waiting and self._fits(self._waiting[0][1]):
            mine, cost_s = self._waiting.popleft()
            if not mine.done():  # else cancelled
                self._spend(cost_s)
                mine.set_result(None)


async def settle(result: Any) -> Any:
    """Return `result`, awaited if it can be awaited: hooks may be plain functions."""
    if inspect.isawaitable(result):
        return await result
    return result
