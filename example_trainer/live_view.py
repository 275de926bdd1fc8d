"""How a training run is shown in a terminal: a function of what was logged; pure.

Only bold and dim are used, which read on light and dark ground alike.

The live view of the trainer: the lowest lines of the terminal, log lines above them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.box import ROUNDED
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from atroposlib.utils.line_stream import can_show, diverted
from atroposlib.utils.text import inert_block, inert_line
from example_trainer.reporting.series import short_number

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

__all__ = [
    "LiveDisplay",
    "RunState",
    "RunView",
    "can_show",
    "time_shares",
]

_WIDEST = 110
_KEPT_STEPS = 60
_BARS = "▁▂▃▄▅▆▇█"
_ROWS = (
    ("reward", "train/reward_mean"),
    ("advantage (std)", "train/advantage_std"),
    ("loss", "train/loss"),
    ("KL to the sampler", "alignment/k3"),
    ("entropy", "train/entropy"),
    ("outside clip", "grpo/clipped_fraction"),
    ("ratio", "grpo/mean_ratio"),
    ("gradient norm", "train/grad_norm"),
    ("mismatch", "alignment/diff_abs_mean"),
    ("staleness", "train/staleness_mean"),
    ("truncated", "train/truncation_rate"),
    ("tokens/s", "train/tokens_per_s"),
    ("MFU", "train/mfu"),
)
_TIMES = (
    ("waiting", "train/data_fetch_time"),
    ("forward", "train/forward_time"),
    ("backward", "train/backward_time"),
    ("optimiser", "train/optimizer_time"),
    ("publishing", "train/sync_time"),
)


@dataclass
class RunState:
    """What is known of a run at a moment."""

    name: str
    total_steps: int
    activity: str = "loading"
    step: int = 0
    elapsed_s: float = 0.0
    history: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    """Metrics of the last steps, oldest first."""


def time_shares(history: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return what share of the time of all given steps went where; empty without any time."""
    total = sum(record.get("train/step_time", 0.0) for record in history)
    if not total:
        return []
    found = [(name, sum(record.get(key, 0.0) for record in history)) for name, key in _TIMES]
    return [(name, seconds / total) for name, seconds in found if seconds]


class RunView:
    """A run as rich renders it: a panel as wide as the terminal, at most `_WIDEST`."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for name, key in _ROWS:
            values = [record[key] for record in self._state.history if key in record]
            if values:
                trend = "" if options.ascii_only else sparkline(values, width=max(8, width - 46))
                table.add_row(name, Text(short_number(float(values[-1])), style="bold"), trend)
        body = Table.grid()
        body.add_row(Text(self._headline(), overflow="ellipsis", no_wrap=True))
        if self._state.history:
            body.add_row(table)
            shares = "  ".join(f"{n} {s:.0%}" for n, s in time_shares(list(self._state.history)))
            body.add_row(Text(shares, style="dim", overflow="ellipsis", no_wrap=True))
        title = Text(inert_line(self._state.name, max_characters=max(8, width // 2)), style="bold")
        yield Panel(body, box=ROUNDED, title=title, title_align="left", width=width)

    def _headline(self) -> str:
        state = self._state
        parts = [f"step {state.step} of {state.total_steps}", _clock(state.elapsed_s)]
        times = [r["train/step_time"] for r in state.history if "train/step_time" in r]
        if times and state.step < state.total_steps:
            left_s = (state.total_steps - state.step) * sum(times) / len(times)
            parts.append(f"about {_clock(left_s)} left")
        return " | ".join([*parts, inert_line(state.activity, max_characters=60)])


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw the last values as a row of bars, from their lowest to their highest."""
    shown = [float(value) for value in values[-width:]]
    finite = [value for value in shown if value - value == 0]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0]
        if value - value == 0
        else " "
        for value in shown
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
