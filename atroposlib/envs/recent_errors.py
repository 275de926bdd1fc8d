"""Errors that repeat: told once in the log, and kept as one line for the terminal view."""

from __future__ import annotations

import logging
import re
import traceback

from atroposlib.envs.run_snapshot import ErrorLine
from atroposlib.utils.milestones import is_milestone

__all__ = ["RecentErrors", "RepeatedErrors"]

MAX_CHARACTERS = 500
MAX_TEXTS = 10
"""Different messages of one error that are told each."""
MAX_KINDS = 200
"""Different errors told apart; beyond that all count as one."""


class RepeatedErrors:
    """Logs an error with its traceback once; the same error again is only counted.

    Errors are the same when they have one type and were raised at one place. Another message of
    such an error is told in one line, a few times; the count is told at 10, 100 and so on.

    Args:
        logger: where the lines go.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._counts: dict[tuple[str, ...], int] = {}
        self._texts: dict[tuple[str, ...], set[str]] = {}

    def log(self, what: str, error: BaseException) -> None:
        """Log one error.

        Args:
            what: what failed, in a few words: "a rollout failed".
            error: what it raised.
        """
        kind = (what, type(error).__name__, *_place_of(error))
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = (what, "others")
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        text = str(error)[:MAX_CHARACTERS]
        if count == 1:
            self._texts[kind] = {_without_numbers(text)}
            self._logger.error("%s: %s", what, text, exc_info=error)
            return
        told = self._texts[kind]
        is_new = _without_numbers(text) not in told and len(told) < MAX_TEXTS
        if is_new:
            told.add(_without_numbers(text))
        if is_new or is_milestone(count):
            name = type(error).__name__
            self._logger.error("%s, %d times so far with %s: %s", what, count, name, text)
        else:
            self._logger.debug("%s: %s", what, text)


def _place_of(error: BaseException) -> tuple[str, ...]:
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return (frames[-1].filename, str(frames[-1].lineno)) if frames else ()


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


class RecentErrors(logging.Handler):
    """A log handler that keeps the latest warnings and errors, equal ones as one.

    Args:
        capacity: lines kept.
    """

    def __init__(self, *, capacity: int = 8) -> None:
        super().__init__(level=logging.WARNING)
        self._capacity = capacity
        self._lines: dict[str, ErrorLine] = {}  # by text, the latest last

    @property
    def lines(self) -> tuple[ErrorLine, ...]:
        """The lines kept, oldest first."""
        self.acquire()
        try:
            return tuple(self._lines.values())
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record; a record that cannot be formatted is left to the other handlers."""
        try:
            text = _summary(record)
        except Exception:  # noqa: BLE001 - whoever prints the record reports it
            return
        known = self._lines.pop(text, None)
        self._lines[text] = ErrorLine(
            record.created,
            text,
            count=1 if known is None else known.count + 1,
            is_error=record.levelno >= logging.ERROR,
        )
        if len(self._lines) > self._capacity:
            del self._lines[next(iter(self._lines))]


def _summary(record: logging.LogRecord) -> str:
    """What was raised, which says most, and the message."""
    message = record.getMessage()[:MAX_CHARACTERS]
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return message
    raised = f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
    return f"{raised} ({message})" if message else raised
