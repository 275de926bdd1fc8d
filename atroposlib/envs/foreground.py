"""Run a coroutine to its end as the work of this process, and answer its signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["favour_event_loop", "outside_event_loop", "run_foreground"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from another that wants it; 5 ms by default."""

COLLECTIONS_BEFORE_FULL = 1_000
"""Collections of younger garbage before one that walks through everything; 10 by default."""


def favour_event_loop() -> None:
    """Keep short what holds up the event loop of this process.

    Threads that check and encode groups give the interpreter back sooner. Collections of garbage
    leave out what exists by now: walking through all modules takes a tenth of a second. Those of
    everything else are rare: a thousand rollouts and their tokens take tens of milliseconds, and
    they hardly ever leave garbage behind that is not freed at once.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    youngest, younger, _ = gc.get_threshold()
    gc.set_threshold(youngest, younger, COLLECTIONS_BEFORE_FULL)


def outside_event_loop(function: Callable[[], Result]) -> Result:
    """Call `function` where it may start an event loop of its own.

    In a notebook a loop runs already; there the call happens in a thread, and this one waits.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_inside = False
    else:
        is_inside = True
    if not is_inside:  # not called in `except`: errors of the run would all name the one above
        return function()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="environment") as pool:
        return pool.submit(function).result()


def run_foreground(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main()` in a new event loop until it ends or the process is asked to stop.

    The first SIGINT or SIGTERM cancels the coroutine once, so that it can close what it holds. A
    second SIGINT, an impatient Ctrl-C, interrupts the closing; a repeated SIGTERM does not.

    Raises:
        SystemExit: after a signal, with the customary code 128 + signal number.
    """
    received: list[int] = []
    favour_event_loop()
    try:
        asyncio.run(_until_signalled(main, received))
    except asyncio.CancelledError:
        if not received:
            raise
    except Exception:
        if not received:
            raise
        logger.exception("closing after signal %d failed", received[0])
    if received:
        raise SystemExit(128 + received[0])


async def _until_signalled(
    main: Callable[[], Coroutine[Any, Any, None]], received: list[int]
) -> None:
    task = asyncio.current_task()

    def stop(signum: int) -> None:
        if task is not None and (not received or signum == signal.SIGINT):
            task.cancel()
        received.append(signum)

    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            # Not offered on Windows, where Ctrl-C still interrupts the loop.
            with suppress(NotImplementedError):
                loop.add_signal_handler(signum, stop, signum)
    await main()
