"""The latest warnings and errors of the log, for the terminal view."""

from __future__ import annotations

import logging

from atroposlib.envs.run_snapshot import ErrorLine

__all__ = ["RecentErrors"]

MAX_CHARACTERS = 500


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
