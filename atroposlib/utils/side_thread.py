"""Work beside the event loop, one call after the other.

Threads take the interpreter from the event loop, and from each other: with several at work the
loop waits for all of them in turn. With one it waits for one short step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

__all__ = ["SideThread"]

Result = TypeVar("Result")


class SideThread:
    """A thread that is started when it is first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Return `function(*args, **kwargs)`, called once the calls before it are done.

        Cancelling is safe; a call that has begun runs to its end all the same.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside-the-loop")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        """End the thread after the calls that wait; a later `run` starts another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)
