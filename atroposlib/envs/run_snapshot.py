"""The state of a running environment for the live view, and its latest warnings and errors.

`RepeatedErrors` logs an error with its traceback once and then counts it; `RecentErrors` keeps the
latest lines of the log for the view. This module does not import rich.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from atroposlib.utils.text import is_milestone

__all__ = ["ErrorLine", "RecentErrors", "RepeatedErrors", "RunSnapshot"]

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class ErrorLine:
    """A warning or an error of the log."""

    time_s: float
    """Time of its latest occurrence, seconds since the epoch."""
    text: str
    """One line, untrusted: it may contain text of a model."""
    count: int = 1
    """Number of occurrences."""
    is_error: bool = True
    """False for a warning."""


@dataclass(frozen=True)
class RunSnapshot:
    """A running environment at one moment.

    Example:
        RunSnapshot(name="gsm8k_0", activity="rolling out", elapsed_s=61.0, step=3, total_steps=10)
    """

    name: str
    activity: str
    """Current activity, in a few words."""
    elapsed_s: float
    """Seconds since the first rollout."""
    step: int
    """Trainer steps done; groups made under `process`."""
    total_steps: int
    """Last step of the run; negative without one."""
    step_word: str = "step"
    """`step`, or `group` under `process`."""
    group_size: int = 1
    groups_running: int = 0
    """Groups in the making."""
    most_groups_running: int | None = None
    """Maximum of `groups_running`; None if unknown."""
    groups_sending: int = 0
    """Finished groups that are being sent."""
    oldest_rollout_s: float | None = None
    """Seconds since the start of the oldest group in the making; None if nothing runs."""
    groups_done: int = 0
    """Groups made, including dropped ones."""
    groups_per_s: float = 0.0
    """Rate over the last minute."""
    tokens_done: int = 0
    """Trained tokens of these groups."""
    tokens_per_s: float = 0.0
    """Rate over the last minute."""
    queue_groups: int | None = None
    """Groups in the service's queue; None without a service."""
    queue_batches: float | None = None
    """The same in batches; None if the batch size is unknown."""
    staleness_mean: float | None = None
    """Mean number of trainer steps during recent rollouts; None if unknown."""
    staleness_max: int | None = None
    """Maximum of the same."""
    scores: tuple[float, ...] = ()
    """Latest scores, including those of dropped groups."""
    drops: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Dropped groups, by reason."""
    failures: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Failed rollouts and hooks, by name."""
    stragglers: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Rollouts that took too long, by outcome."""
    errors: tuple[ErrorLine, ...] = ()
    """Latest warnings and errors, oldest first."""


MAX_CHARACTERS = 500
MAX_TEXTS = 10
"""Maximum number of different messages of one error that are logged."""
MAX_KINDS = 200
"""Maximum number of distinguished errors; all others count as one."""


class RepeatedErrors:
    """Logs each error with its traceback once, and counts its repetitions.

    Errors are equal if they have the same type and line of code. The first few new messages of such
    an error are logged in one line each; the count is logged at 10, 100 and so on.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._counts: dict[tuple[str, ...], int] = {}
        self._texts: dict[tuple[str, ...], set[str]] = {}

    def log(self, what: str, error: BaseException) -> None:
        """Log one error; `what` describes the failure, such as "a rollout failed"."""
        kind = (what, type(error).__name__, *_place_of(error))
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = (what, "others")
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        text = str(error)[:MAX_CHARACTERS]
        if count == 1:
            self._texts[kind] = {_without_numbers(text)}
            self._logger.error("%s: %s", what, text, exc_info=error)
            return
        texts = self._texts[kind]
        is_new = _without_numbers(text) not in texts and len(texts) < MAX_TEXTS
        if is_new:
            texts.add(_without_numbers(text))
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
    """A log handler that keeps the latest warnings and errors; equal ones count as one.

    Args:
        capacity: maximum number of lines.
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
        try:
            text = _summary(record)
        except Exception:  # noqa: BLE001 - a record with a wrong format; other handlers report it
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
    message = record.getMessage()[:MAX_CHARACTERS]
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return message
    raised = f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
    return f"{raised} ({message})" if message else raised
