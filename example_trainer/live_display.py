"""The live view of the trainer: the lowest lines of the terminal, log lines above them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from atroposlib.utils.line_stream import can_show, diverted
from atroposlib.utils.text import inert_block
from example_trainer.live_view import RunState, RunView

__all__ = ["LiveDisplay", "can_show"]

_REFRESHES_PER_SECOND = 2


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
        write_line = partial(_write_line, console)
        for name in ("stdout", "stderr"):
            original = getattr(sys, name)
            if original.isatty():
                self._ending.enter_context(diverted(original, write_line, name=name))
        if self._stream not in (sys.__stdout__, sys.__stderr__):
            self._ending.enter_context(diverted(self._stream, write_line))
        return self

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


def _write_line(console: Console, line: str) -> None:
    """Print a line, made harmless, above the view."""
    console.print(Text(inert_block(line)), soft_wrap=True)
