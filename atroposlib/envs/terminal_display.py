"""The live view of a running environment: the lowest lines of the terminal, log lines above them.

    take_snapshot ──every 0.4 s──► RunView ──┐
    log lines, print ──► LineStream ─────────┴──► terminal, in a thread

The view goes to the terminal itself, lines through the streams they were meant for: W&B records
what is written to those, and a view drawn twice a second is nothing to keep.

Invariants:
    - While the view is up, nothing else writes to the terminal: `sys.stdout`, `sys.stderr` and
      the log handlers that write there are diverted, and put back when it ends.
    - The event loop only takes snapshots; a terminal that is slow or stopped holds up a thread.
    - A view that fails ends itself, and the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.live_render import LiveRender

from atroposlib.envs.run_snapshot import RunSnapshot
from atroposlib.envs.terminal_view import RunView
from atroposlib.utils.inert_text import inert_block
from atroposlib.utils.line_stream import LineStream, can_show, diverted

__all__ = ["LineStream", "TerminalDisplay", "can_show"]

logger = logging.getLogger(__name__)

NOTHING_YET = RunSnapshot(name="", activity="", elapsed_s=0.0, step=0, total_steps=-1)
LINES_LEFT_FOR_THE_LOG = 4
LONGEST_LAST_DRAW_S = 2.0


class TerminalDisplay:
    """The live view, from `async with` to its end.

    Args:
        take_snapshot: called on the event loop; None while there is nothing to show yet, which
            leaves the terminal alone.
        stream: the terminal.
        interval_s: seconds between two snapshots.
    """

    def __init__(
        self,
        take_snapshot: Callable[[], RunSnapshot | None],
        *,
        stream: TextIO,
        interval_s: float = 0.4,
    ) -> None:
        self._take_snapshot = take_snapshot
        self._interval_s = interval_s
        self._stream = stream
        self._console = Console(file=stream)
        self._frame: LiveRender | None = None  # what stands on the terminal
        self._drawing = threading.RLock()
        self._view = RunView(NOTHING_YET)
        self._terminal = contextlib.ExitStack()
        self._give_back = contextlib.ExitStack()
        self._lines: list[tuple[TextIO, str]] = []  # and where they were to go
        self._lines_lock = threading.Lock()
        self._printed_at = 0.0
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TerminalDisplay:
        self._task = asyncio.create_task(self._keep_drawing())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Draw a last time and leave the picture standing; never waits long for the terminal."""
        self._over.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LONGEST_LAST_DRAW_S)

    async def _keep_drawing(self) -> None:
        try:
            while not self._over.is_set():
                await self._draw_next()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), self._interval_s)
            await self._draw_next()
        except Exception:
            logger.exception("the live view failed; the run goes on without it")
        finally:
            await asyncio.to_thread(self._leave)

    async def _draw_next(self) -> None:
        snapshot = self._take_snapshot()
        if snapshot is not None:
            await asyncio.to_thread(self._draw, snapshot)

    def _draw(self, snapshot: RunSnapshot) -> None:
        if self._frame is None:
            self._console = self._terminal.enter_context(_console_beside(self._stream))
            self._divert()
            self._console.show_cursor(False)
        with self._drawing:
            view = RunView(snapshot, max_lines=self._console.height - LINES_LEFT_FOR_THE_LOG)
            self._show(view)

    def _show(self, view: RunView) -> None:
        """Print the lines there are, and the view below them, in the place of the last one."""
        with self._lines_lock:
            lines, self._lines = self._lines, []
        self._printed_at = time.monotonic()
        erasing = Control() if self._frame is None else self._frame.position_cursor()
        self._frame = LiveRender(view)
        if lines:
            self._console.control(erasing)
            for stream, line in lines:
                stream.write(inert_block(line) + "\n")
                stream.flush()
            self._console.print(self._frame)
        else:
            with self._console:  # one write, so that nothing flickers
                self._console.control(erasing)
                self._console.print(self._frame)
        self._view = view

    def _leave(self) -> None:
        """Give the terminal back."""
        # Without the lock: whoever logs meanwhile has locked a handler, and waits for this one.
        self._give_back.close()
        with self._drawing:
            if self._frame is not None:
                self._show(self._view)
                self._console.line()
                self._console.show_cursor(True)
            self._terminal.close()

    def _divert(self) -> None:
        """Send what others write to the terminal through this view."""
        for name in ("stdout", "stderr"):
            original = getattr(sys, name)
            if not original.isatty():
                continue
            above = diverted(original, partial(self._add_line, original), name=name)
            self._give_back.enter_context(above)

    def _add_line(self, stream: TextIO, line: str) -> None:
        """Take a line for above the view; several of a moment are printed together."""
        with self._lines_lock:
            self._lines.append((stream, line))
        # Else a loop that hangs would hide what was logged before it did.
        if time.monotonic() - self._printed_at > 2 * self._interval_s:
            with self._drawing:
                if self._frame is not None:
                    self._show(self._view)


@contextlib.contextmanager
def _console_beside(stream: TextIO) -> Iterator[Console]:
    """A console on the terminal of a stream that goes past the stream itself."""
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):  # no real terminal
        yield Console(file=stream)
        return
    with os.fdopen(descriptor, "w", encoding=stream.encoding, errors="replace") as terminal:
        yield Console(file=terminal)
