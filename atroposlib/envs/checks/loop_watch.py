"""Finding calls that hold the event loop, with the line that made them.

    loop:    callback │ callback ──────────────────── │ callback
    thread:                      stack · stack · stack            -> one Stall

Each callback is timed on its own: many short ones in a row are what a loop is for.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from atroposlib.envs.checks.call_site import stack_site

__all__ = ["Stall", "watch_loop"]

LIMIT_S = 0.1
LOOK_INTERVAL_S = 0.01
MIN_OWN_SHARE = 0.5
"""Share of the looks at the stack that must show the author's code; imports do not count, since
they happen once."""


class Stall(NamedTuple):
    """One time in which the loop did nothing else."""

    duration_s: float
    where: str | None
    """The author's line that held it; None when nobody could look, as under a busy interpreter."""


class _Watch(threading.Thread):
    """Looks at the stack of the loop's thread while a callback takes long."""

    def __init__(self, loop_thread: int) -> None:
        super().__init__(name="check-loop-watch", daemon=True)
        self.stalls: list[Stall] = []
        self._loop_thread = loop_thread
        self._started_at: float | None = None
        self._seen: list[str | None] = []
        self._ended = threading.Event()

    def run(self) -> None:
        """Look every few milliseconds until `end`."""
        while not self._ended.wait(LOOK_INTERVAL_S):
            started_at = self._started_at
            if started_at is not None and time.monotonic() - started_at > 2 * LOOK_INTERVAL_S:
                self._seen.append(_site_of(sys._current_frames().get(self._loop_thread)))

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()

    def time_callback(self, run: Any, handle: Any) -> None:
        """Run one callback of the loop and judge how long it took."""
        cpu_before = time.thread_time()
        self._seen = []
        self._started_at = started_at = time.monotonic()
        try:
            run(handle)
        finally:
            self._started_at = None
            duration_s = time.monotonic() - started_at
            if duration_s > LIMIT_S:
                self._judge(duration_s, self._seen, computed_s=time.thread_time() - cpu_before)

    def _judge(self, duration_s: float, seen: list[str | None], *, computed_s: float) -> None:
        if not seen:
            # Computing without letting anybody look; or waiting for a busy machine, its own fault.
            if computed_s > LIMIT_S:
                self.stalls.append(Stall(duration_s, None))
            return
        own = [site for site in seen if site is not None]
        if len(own) >= MIN_OWN_SHARE * len(seen):
            self.stalls.append(Stall(duration_s, Counter(own).most_common(1)[0][0]))


def _site_of(frame: Any) -> str | None:
    inner = frame
    while inner is not None:
        if "importlib._bootstrap" in inner.f_code.co_filename:
            return None
        inner = inner.f_back
    return stack_site(frame)


@contextmanager
def watch_loop() -> Iterator[list[Stall]]:
    """Watch the event loop of this thread; yields the list that stalls are added to."""
    loop_thread = threading.get_ident()
    watch = _Watch(loop_thread)
    run = asyncio.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        if threading.get_ident() == loop_thread:
            watch.time_callback(run, handle)
        else:
            run(handle)

    watch.start()
    asyncio.Handle._run = timed_run  # type: ignore[method-assign, assignment]
    try:
        yield watch.stalls
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        watch.end()
