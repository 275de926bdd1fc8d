"""The state of a running environment at one moment, and its latest warnings and errors.

`RunSnapshot` is what the live view draws. `RepeatedErrors` logs an error with its traceback once
and then counts it; `RecentErrors` keeps the latest lines of the log for the view. Importing this
module does not import rich: plain runs do not need it.
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
    """When it came last, seconds since the epoch."""
    text: str
    """One line; may hold anything, what a model wrote included."""
    count: int = 1
    """How often it came."""
    is_error: bool = True
    """False for a warning."""


@dataclass(frozen=True)
class RunSnapshot:
    """A running environment at one moment.

    Example:
        RunSnapshot(name="gsm8k_0", activity="rolling out", elapsed_s=61.0, step=3, total_steps=10)
    """

    name: str
    """As registered."""
    activity: str
    """What it does, in a few words."""
    elapsed_s: float
    """Seconds since rollouts began."""
    step: int
    """Trainer steps done; groups made under `process`."""
    total_steps: int
    """Where the run ends; negative when it does not."""
    step_word: str = "step"
    """What a step is: `step` or `group`."""
    group_size: int = 1
    """Rollouts of a group."""
    groups_running: int = 0
    """Groups in the making."""
    most_groups_running: int | None = None
    """Groups that may be in the making; None where that is one."""
    groups_sending: int = 0
    """Finished groups that are on their way to the service."""
    oldest_rollout_s: float | None = None
    """Seconds the longest group in the making has taken; None when nothing runs."""
    groups_done: int = 0
    """Groups made, dropped ones included."""
    groups_per_s: float = 0.0
    """Of the last minute."""
    tokens_done: int = 0
    """Trained tokens of these groups."""
    tokens_per_s: float = 0.0
    """Of the last minute."""
    queue_groups: int | None = None
    """Groups waiting at the service; None without one."""
    queue_batches: float | None = None
    """The same in batches; None when the batch size is unknown."""
    staleness_mean: float | None = None
    """Trainer steps that went by while a group was made; None when nothing is known."""
    staleness_max: int | None = None
    """The most of the latest groups."""
    scores: tuple[float, ...] = ()
    """The latest scores, of dropped groups too."""
    drops: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Groups dropped, by reason."""
    failures: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Failed rollouts and hooks, by name."""
    stragglers: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Rollouts that took too long, by what became of them."""
    errors: tuple[ErrorLine, ...] = ()
    """The latest warnings and errors, oldest first."""


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
        except Exception:  # noqa: BLE001 - the handler that prints the record reports it
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
