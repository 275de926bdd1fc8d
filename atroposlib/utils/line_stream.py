"""Replacements for the streams of a terminal while a live view is drawn on it."""

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
    """Whether a stream is a terminal on which lines can be redrawn."""
    return bool(stream.isatty()) and not Console(file=stream).is_dumb_terminal


class LineStream:
    """Replaces a stream while a view is shown, and passes complete lines to `write_line`.

    Args:
        replaced: the replaced stream; other attributes are delegated to it.
        write_line: receives a line without its end; called from any thread.
    """

    def __init__(self, replaced: TextIO, write_line: Callable[[str], None]) -> None:
        self.replaced = replaced
        self._write_line = write_line
        self._started = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._started = (self._started + text).split("\n")
        for line in lines:
            # Of a line that is overwritten, such as a progress bar, only the last state is kept.
            self._write_line(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: an incomplete line cannot be shown above the view."""

    def finish(self) -> None:
        """Pass on an incomplete line."""
        if self._started:
            self.write("\n")

    def isatty(self) -> bool:
        """Return False, so that writers do not move the cursor."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # W&B restores `write` when its recording ends: the method belongs to the replaced stream.
        is_its_own = name == "write" and getattr(value, "__self__", None) is self.replaced
        object.__setattr__(self.replaced if is_its_own else self, name, value)


@contextlib.contextmanager
def diverted(
    stream: TextIO,
    write_line: Callable[[str], None],
    *,
    name: str | None = None,
) -> Iterator[None]:
    """Pass the lines written to a stream to `write_line`, within the context.

    Diverts log handlers that write to the stream, and the stream in `sys`.

    Args:
        stream: stream of the terminal.
        write_line: receives a line without its end; called from any thread.
        name: name of the stream in `sys`, `stdout` or `stderr`; None if it is not in `sys`.
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
    """Yield the log handlers of all loggers that write to a stream."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for known in loggers:
        for handler in known.handlers if isinstance(known, logging.Logger) else ():
            is_stream_handler = isinstance(handler, logging.StreamHandler)
            # Handlers that look up `sys.stderr` on each call have no `stream` of their own.
            if is_stream_handler and vars(handler).get("stream") is stream:
                yield handler
