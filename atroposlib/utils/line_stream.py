"""Stand-ins for the streams of a terminal while a live view is drawn on it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console

__all__ = ["LineStream", "can_show", "diverted"]


def can_show(stream: Any) -> bool:
    """Tell whether a stream is a terminal on which lines can be drawn again."""
    return bool(stream.isatty()) and not Console(file=stream).is_dumb_terminal


class LineStream:
    """Stands in for a stream while a view is up; whole lines go to `write_line`.

    Args:
        replaced: what it stands in for; answers for its encoding and file number.
        write_line: takes one line, without its end; called from any thread.
    """

    def __init__(self, replaced: TextIO, write_line: Callable[[str], None]) -> None:
        self.replaced = replaced
        self._write_line = write_line
        self._started = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Pass on the lines that are complete; keep the rest until it is."""
        with self._lock:
            *lines, self._started = (self._started + text).split("\n")
        for line in lines:
            # Of a line written over again and again, as progress bars are, the last state counts.
            self._write_line(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: an unfinished line cannot stand above the view."""

    def finish(self) -> None:
        """Pass on a line that was not ended."""
        if self._started:
            self.write("\n")

    def isatty(self) -> bool:
        """Return False, so that writers do not move the cursor."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Give back to the stream a method of its own, as W&B does when its recording ends."""
        is_its_own = name == "write" and getattr(value, "__self__", None) is self.replaced
        object.__setattr__(self.replaced if is_its_own else self, name, value)


@contextlib.contextmanager
def diverted(
    stream: TextIO,
    write_line: Callable[[str], None],
    *,
    name: str | None = None,
) -> Iterator[None]:
    """Give `write_line` the lines that are written to a stream, for the time of the context.

    Log handlers that write to the stream are diverted, and what `sys` has under `name`.

    Args:
        stream: the terminal's.
        write_line: takes one line, without its end; called from any thread.
        name: what the stream is called in `sys`, `stdout` or `stderr`; None: it is not there.
    """
    with contextlib.ExitStack() as ending:
        stand_in: Any = LineStream(stream, write_line)
        ending.callback(stand_in.finish)
        if name is not None:
            setattr(sys, name, stand_in)
            ending.callback(setattr, sys, name, stream)
        for handler in _handlers_of(stream):
            handler.setStream(stand_in)
            ending.callback(handler.setStream, stream)
        yield


def _handlers_of(stream: TextIO) -> Iterator[Any]:
    """The log handlers that write to a stream, of every logger there is."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for known in loggers:
        for handler in known.handlers if isinstance(known, logging.Logger) else ():
            is_stream_handler = isinstance(handler, logging.StreamHandler)
            # Its own: handlers that look `sys.stderr` up each time find the right one anyway.
            if is_stream_handler and vars(handler).get("stream") is stream:
                yield handler
