"""Holding back what an environment logs and prints, to read it and to keep the report clean."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

__all__ = ["CapturedOutput", "capture_output"]

LIBRARY = "atroposlib."


class CapturedOutput(logging.Handler):
    """What was logged and printed.

    Attributes:
        records: log records of level INFO and above.
        printed: what went to the standard streams.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self.printed = io.StringIO()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    def position(self) -> tuple[int, int]:
        """Return a mark for `tells_of`."""
        return len(self.records), self.printed.tell()

    def tells_of(self, error: BaseException, *, since: tuple[int, int]) -> bool:
        """Whether an error left a trace: its traceback, its text, or a warning of the author's."""
        num_records, offset = since
        text = str(error)
        for record in self.records[num_records:]:
            is_warning = record.levelno >= logging.WARNING and not record.name.startswith(LIBRARY)
            has_traceback = bool(record.exc_info and record.exc_info[1] is not None)
            if is_warning or has_traceback or text in record.getMessage():
                return True
        return text in self.printed.getvalue()[offset:]


@contextlib.contextmanager
def capture_output() -> Iterator[CapturedOutput]:
    """Send log records and standard streams to the yielded object."""
    captured = CapturedOutput()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [captured]
    root.setLevel(logging.INFO)
    try:
        with (
            contextlib.redirect_stdout(captured.printed),
            contextlib.redirect_stderr(captured.printed),
        ):
            yield captured
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
