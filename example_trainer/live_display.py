"""The live view of the trainer: the lowest lines of the terminal, log lines above them."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from atroposlib.utils.inert_text import inert_block
from example_trainer.live_view import RunState, RunView

__all__ = ["LiveDisplay", "can_show"]

_REFRESHES_PER_SECOND = 2


def can_show(stream: Any) -> bool:
    """Tell whether a stream is a terminal on which lines can be drawn again."""
    return bool(stream.isatty()) and not Console(file=stream).is_dumb_terminal


class LiveDisplay:
    """The view of one run, from `with` to its end; a thread of rich's draws it.

    Log handlers that write to the terminal are diverted to lines above the view, and put back.

    Args:
        name: of what is trained.
        total_steps: of the whole run.
        stream: the terminal.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        total_steps: int,
        *,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = RunState(name, total_steps)
        self._stream = stream
        self._clock = clock
        self._started = clock()
        self._ending = contextlib.ExitStack()

    def show_activity(self, text: str) -> None:
        """Say what the trainer does now."""
        self._state.activity = text

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        self._state.step = step
        self._state.history.append(dict(metrics))

    def __enter__(self) -> LiveDisplay:
        console = Console(file=self._stream)
        live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._ending.enter_context(live)
        for name in ("stdout", "stderr"):
            original = getattr(sys, name)
            if original.isatty():
                self._divert(original, console, name)
        if self._stream not in (sys.__stdout__, sys.__stderr__):
            self._divert(self._stream, console, None)
        return self

    def _divert(self, original: TextIO, console: Console, name: str | None) -> None:
        """Let what is written to a stream appear above the view, until the end."""
        above: Any = _LinesAbove(original, console)
        self._ending.callback(above.finish)
        if name is not None:
            setattr(sys, name, above)
            self._ending.callback(setattr, sys, name, original)
        for handler in _handlers_of(original):
            handler.setStream(above)
            self._ending.callback(handler.setStream, original)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Draw a last time, leave the picture standing and give the terminal back."""
        self.show_activity("ended" if exc is None else "failed")
        self._ending.close()

    def _render(self) -> RunView:
        self._state.elapsed_s = self._clock() - self._started
        return RunView(self._state)


class _LinesAbove:
    """Stands in for a stream: whole lines, made harmless, above the view."""

    def __init__(self, original: TextIO, console: Console) -> None:
        self._original = original
        self._console = console
        self._started = ""

    def write(self, text: str) -> int:
        *lines, self._started = (self._started + text).split("\n")
        for line in lines:
            # Of a line written over again and again, as progress bars are, the last state counts.
            last = line.rstrip("\r").rpartition("\r")[2]
            self._console.print(Text(inert_block(last)), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """Do nothing: an unfinished line cannot stand above the view."""

    def finish(self) -> None:
        """Show a line that was not ended."""
        if self._started:
            self.write("\n")

    def isatty(self) -> bool:
        """Answer no, so that nobody moves the cursor."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _handlers_of(stream: TextIO) -> Iterator[Any]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for known in loggers:
        for handler in known.handlers if isinstance(known, logging.Logger) else ():
            is_stream_handler = isinstance(handler, logging.StreamHandler)
            # Its own: handlers that look `sys.stderr` up each time find the right one anyway.
            if is_stream_handler and vars(handler).get("stream") is stream:
                yield handler
