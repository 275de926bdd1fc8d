"""Finding calls that hold the event loop, with the line that made them.

    loop:    callback │ callback ──────────────────── │ callback
    thread:                      stack · stack · stack            -> one Stall

Each callback is timed on its own: many short ones in a row are what a loop is for.
"""

from __future__ import annotations

import asyncio
import gc
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
MIN_LOOKS_SHARE = 0.4
"""Share of the looks that must have been possible. Under a call that waits, as `time.sleep`, all
are; on a busy machine the loop and the watch are held up together."""


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
        self._collected_s = 0.0
        self._collecting_since = 0.0
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
        self._seen, self._collected_s = [], 0.0
        self._started_at = started_at = time.monotonic()
        try:
            run(handle)
        finally:
            self._started_at = None
            duration_s = time.monotonic() - started_at - self._collected_s
            if duration_s > LIMIT_S:
                computed_s = time.thread_time() - cpu_before - self._collected_s
                self._judge(duration_s, self._seen, computed_s=computed_s)

    def note_collection(self, phase: str, _: Any) -> None:
        """Take the time of Python's garbage collector out of what a callback took."""
        if threading.get_ident() == self._loop_thread:
            if phase == "start":
                self._collecting_since = time.monotonic()
            else:
                self._collected_s += time.monotonic() - self._collecting_since

    def _judge(self, duration_s: float, seen: list[str | None], *, computed_s: float) -> None:
        own = [site for site in seen if site is not None]
        was_waiting = len(seen) >= MIN_LOOKS_SHARE * duration_s / LOOK_INTERVAL_S
        if computed_s <= LIMIT_S and not was_waiting:
            return
        if not seen:
            self.stalls.append(Stall(duration_s, None))
        elif own and len(own) >= MIN_OWN_SHARE * len(seen):
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
    gc.callbacks.append(watch.note_collection)
    asyncio.Handle._run = timed_run  # type: ignore[method-assign, assignment]
    try:
        yield watch.stalls
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.callbacks.remove(watch.note_collection)
        watch.end()
