"""What the person who started a run sees while it runs.

On a terminal: one live line with a bar and the time left. Elsewhere (a log, CI): plain lines, one
per phase and one every few seconds. Both say what is happening before it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["RunProgress"]

_SECONDS_BETWEEN_LINES = 15.0


class RunProgress:
    """Shows the phases of a run, one at a time.

    Args:
        console: Where it writes; a live bar is drawn only when it is a terminal.
        clock: Monotonic seconds.

    Attributes:
        seconds_by_phase: How long each phase took, by its key, in their order.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self.seconds_by_phase: dict[str, float] = {}
        self._started = clock()
        self._phase: str | None = None
        self._phase_started = self._started
        self._last_line = self._started
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            transient=True,
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._started

    def announce(self, introduction: str, titles: Sequence[str]) -> None:
        """Show what is going to happen before the first phase begins.

        Args:
            introduction: One sentence.
            titles: The phases in their order.
        """
        self.console.print(escape(introduction))
        for title in titles:
            self.console.print(f"   - {escape(title)}")
        self.console.print()

    def begin(self, phase: str, title: str, *, expected: str) -> None:
        """Announce the next phase.

        Args:
            phase: Its key in `seconds_by_phase`.
            title: What happens in it.
            expected: How long that should take, in words.
        """
        self.end()
        self._phase = phase
        self._phase_started = self._last_line = self._clock()
        number = len(self.seconds_by_phase) + 1
        self.console.print(f"[bold]{number}. {escape(title)}[/bold] ({escape(expected)})")
        if self.console.is_terminal:
            self._task = self._bar.add_task("  ", total=None, state="")

    def update(self, done: float, total: float | None, state: str) -> None:
        """Show how far the phase has come.

        Args:
            done: Units done.
            total: Units in all, None when that is unknown.
            state: A few words about where it stands.
        """
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, state=escape(state))
        elif self._clock() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = self._clock()
            self.console.print(f"   {escape(state)}{self._time_left(done, total)}")

    def note(self, text: str) -> None:
        """Say one thing that stays on the screen."""
        self.console.print(f"   {escape(text)}")

    def end(self) -> None:
        """Close the phase that is open, if any."""
        if self._phase is not None:
            self.seconds_by_phase[self._phase] = round(self._clock() - self._phase_started, 1)
            self._phase = None
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def _time_left(self, done: float, total: float | None) -> str:
        if not total or not done:
            return ""
        left_s = (self._clock() - self._phase_started) * max(0.0, total - done) / done
        return f", about {left_s:.0f} s left"

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.end()
        if self.console.is_terminal:
            self._bar.stop()
