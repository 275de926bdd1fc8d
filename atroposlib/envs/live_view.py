"""The live view of a running environment, in the last lines of the terminal, below the log lines.

    take_snapshot ──every 0.4 s──► RunView ──┐
    log lines, print ──► LineStream ─────────┴──► terminal, in a thread

The view is written to the terminal itself and log lines to their own streams: W&B records these
streams, and must not record a view that is redrawn twice a second. Bold, dim and red are readable
on light and dark backgrounds.

Invariants:
    - While the view is active, nothing else writes to the terminal: `sys.stdout`, `sys.stderr` and
      the log handlers that write there are diverted, and restored at the end.
    - The event loop only takes snapshots; a slow or stopped terminal delays a thread.
    - If the view fails, it ends and the run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TextIO

from rich.box import ROUNDED
from rich.console import Console
from rich.control import Control
from rich.live_render import LiveRender
from rich.panel import Panel
from rich.text import Text

from atroposlib.envs.run_snapshot import ErrorLine, RunSnapshot
from atroposlib.utils.line_stream import LineStream, can_show, diverted
from atroposlib.utils.text import inert_block, inert_line

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

__all__ = [
    "LineStream",
    "RunView",
    "ScoreBar",
    "TerminalDisplay",
    "can_show",
    "score_bars",
    "view_lines",
]

logger = logging.getLogger(__name__)


class ScoreBar(NamedTuple):
    """Number of scores with one value, or in one range."""

    label: str
    """The value, or both ends of the range."""
    num_scores: int


def score_bars(scores: Sequence[float], *, max_bars: int = 5) -> list[ScoreBar]:
    """Count scores by value if they have few values, else by equal ranges, lowest first.

    Args:
        scores: finite numbers.
        max_bars: maximum number of values, and the number of ranges.

    Example:
        score_bars([1.0, -1.0, 1.0]) == [ScoreBar("-1", 1), ScoreBar("1", 2)]
    """
    by_value = Counter(scores)
    if len(by_value) <= max_bars:
        return [ScoreBar(f"{value:.4g}", by_value[value]) for value in sorted(by_value)]
    low, high = min(by_value), max(by_value)
    width = high / max_bars - low / max_bars  # the difference itself may be too large
    counts = [0] * max_bars
    for value, count in by_value.items():
        # The highest value belongs to the last range; a width of 0 is that of denormal numbers.
        position = int(value / width - low / width) if width else 0
        counts[min(position, max_bars - 1)] += count
    is_plain = width >= 0.05 and max(abs(low), abs(high)) < 1000
    edges = [format(low + width * i, ".2f" if is_plain else ".3g") for i in range(max_bars + 1)]
    return [ScoreBar(f"{edges[i]} to {edges[i + 1]}", count) for i, count in enumerate(counts)]


LABEL_WIDTH = 11
COLUMN_WIDTH = 38
WIDEST = 120
LONGEST_BAR = 30
FRAME_WIDTH = 4  # border and padding of both sides
FRAME_HEIGHT = 2
MAX_ERRORS = 4
MAX_COUNTS = 6


class RunView:
    """A snapshot as a panel of rich, at most `WIDEST` columns and `max_lines` lines."""

    def __init__(self, snapshot: RunSnapshot, *, max_lines: int = 40) -> None:
        self._snapshot = snapshot
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        lines = view_lines(
            self._snapshot,
            width=max(1, width - FRAME_WIDTH),
            max_lines=max(1, self._max_lines - FRAME_HEIGHT),
            ascii_only=options.ascii_only,
        )
        name = inert_line(self._snapshot.name, max_characters=max(8, width // 2))
        yield Panel(
            Text("\n").join(lines),
            box=ROUNDED,
            title=Text(name, style="bold"),
            title_align="left",
            subtitle=Text(_duration(self._snapshot.elapsed_s)),
            subtitle_align="right",
            width=width,
            border_style="dim",
        )


def view_lines(
    snapshot: RunSnapshot, *, width: int, max_lines: int = 40, ascii_only: bool = False
) -> list[Text]:
    """Return the lines of the view.

    If there is less room, the histogram is omitted first, then errors, then the last lines.

    Args:
        snapshot: the state to show.
        width: maximum columns of a line.
        max_lines: maximum number of lines.
        ascii_only: Whether the terminal shows ASCII only.
    """
    figures = [*_figure_lines(snapshot, width), *_count_lines(snapshot, width)]
    errors = _error_lines(snapshot.errors)
    scores = _score_lines(snapshot, width, ascii_only=ascii_only)
    if len(figures) + len(errors) + len(scores) > max_lines:
        scores = scores[:1]
    room = max_lines - len(figures) - len(scores)
    lines = [*figures, *scores, *(errors[:1] + errors[1:][-(room - 1) :] if room > 1 else [])]
    for line in lines:
        if ascii_only:
            line.plain = line.plain.replace("…", "...").encode("ascii", "replace").decode()
        line.no_wrap = True
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return lines[:max_lines]


def _figure_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    cells = [
        _cell("now", snapshot.activity),
        _cell(snapshot.step_word, _progress(snapshot.step, snapshot.total_steps)),
        _cell("rollouts", _rollouts(snapshot)),
        _cell("longest", _longest(snapshot)),
        _cell("made", f"{snapshot.groups_done:,} groups, {_rate(snapshot.groups_per_s)}"),
        _cell("tokens/s", f"{snapshot.tokens_per_s:,.0f} ({_large(snapshot.tokens_done)} made)"),
    ]
    if snapshot.queue_groups is not None:
        cells.append(_cell("queue", _queue(snapshot)))
        cells.append(_cell("staleness", _staleness(snapshot)))
    return _in_columns(cells, width)


def _cell(label: str, value: str) -> Text:
    return Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), inert_line(value, max_characters=60))


def _in_columns(cells: list[Text], width: int) -> list[Text]:
    if width < 2 * COLUMN_WIDTH:
        return cells
    lines = []
    for i in range(0, len(cells), 2):
        line = cells[i]
        line.truncate(width // 2 - 1, overflow="ellipsis")
        line.pad_right(max(0, width // 2 - line.cell_len))
        lines.append(line.append_text(cells[i + 1]) if i + 1 < len(cells) else line)
    return lines


def _progress(done: int, total: int) -> str:
    return f"{done:,} of {total:,}" if total >= 0 else f"{done:,}"


def _rollouts(snapshot: RunSnapshot) -> str:
    num_groups, most = snapshot.groups_running, snapshot.most_groups_running
    groups = f"{num_groups:,}" if most is None else f"{num_groups:,} of {most:,}"
    return f"{num_groups * snapshot.group_size:,} (groups: {groups})"


def _longest(snapshot: RunSnapshot) -> str:
    oldest_s = snapshot.oldest_rollout_s
    shown = "nothing runs" if oldest_s is None else f"{oldest_s:,.0f} s"
    return shown + (f", {snapshot.groups_sending:,} sending" if snapshot.groups_sending else "")


def _rate(per_s: float) -> str:
    return f"{per_s:,.1f}/s" if per_s >= 1 else f"{60 * per_s:,.1f}/min"


def _large(number: int) -> str:
    for limit, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if number >= limit:
            return f"{number / (1_000 if letter == 'k' else limit):,.1f}{letter}"
    return f"{number:,}"


def _queue(snapshot: RunSnapshot) -> str:
    batches = snapshot.queue_batches
    return f"{snapshot.queue_groups:,} groups" + (
        f", {batches:,.1f} batches" if batches is not None else ""
    )


def _staleness(snapshot: RunSnapshot) -> str:
    if snapshot.staleness_mean is None:
        return "nothing sent yet"
    return f"{snapshot.staleness_mean:.1f} steps, at most {snapshot.staleness_max}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def _count_lines(snapshot: RunSnapshot, width: int) -> Iterable[Text]:
    named = (
        ("drops", snapshot.drops),
        ("failures", snapshot.failures),
        ("stragglers", snapshot.stragglers),
    )
    for label, counts in named:
        if counts:
            style = "red" if label == "failures" else ""
            yield Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), (_counts(counts), style))


def _counts(counts: Mapping[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda entry: -entry[1])
    shown = [f"{inert_line(name, max_characters=32)} {n:,}" for name, n in ranked[:MAX_COUNTS]]
    left_out = len(ranked) - len(shown)
    return ", ".join(shown) + (f", {left_out} more" if left_out else "")


def _score_lines(snapshot: RunSnapshot, width: int, *, ascii_only: bool) -> list[Text]:
    scores = snapshot.scores
    if not scores:
        return [Text.assemble((f"{'scores':<{LABEL_WIDTH}}", "dim"), "none yet")]
    mean = sum(scores) / len(scores)
    head = f"mean {mean:.3f} of the last {len(scores)}"
    lines = [Text.assemble((f"{'scores':<{LABEL_WIDTH}}", "dim"), head)]
    bars = score_bars(scores)
    label_width = max(len(bar.label) for bar in bars)
    room = max(1, min(LONGEST_BAR, width - LABEL_WIDTH - label_width - 8))
    largest = max(bar.num_scores for bar in bars)
    for bar in bars:
        filled = max(1, round(room * bar.num_scores / largest)) if bar.num_scores else 0
        drawn = ("#" if ascii_only else "█") * filled
        share = f"{bar.num_scores / len(scores):4.0%}"
        lines.append(
            Text(f"{'':<{LABEL_WIDTH}}{bar.label:>{label_width}} {share} ").append(drawn, "dim")
        )
    return lines


def _error_lines(errors: tuple[ErrorLine, ...]) -> list[Text]:
    if not errors:
        return []
    lines = [Text("last warnings and errors", style="dim")]
    for error in errors[-MAX_ERRORS:]:
        moment = time.strftime("%H:%M:%S", time.localtime(error.time_s))
        times = f"{error.count}x " if error.count > 1 else ""
        text = inert_line(error.text, max_characters=WIDEST)
        style = "red" if error.is_error else ""
        lines.append(Text.assemble((f"{moment} {times}", "dim"), (text, style)))
    return lines


NOTHING_YET = RunSnapshot(name="", activity="", elapsed_s=0.0, step=0, total_steps=-1)
LINES_LEFT_FOR_THE_LOG = 4
LONGEST_LAST_DRAW_S = 2.0


class TerminalDisplay:
    """Async context manager that shows the live view.

    Args:
        take_snapshot: called on the event loop; returns None while there is nothing to show.
        stream: the terminal.
        interval_s: seconds between two snapshots.
    """

    def __init__(
        self,
        take_snapshot: Callable[[], RunSnapshot | None],
        *,
        stream: TextIO,
        interval_s: float = 0.4,
    ) -> None:
        self._take_snapshot = take_snapshot
        self._interval_s = interval_s
        self._stream = stream
        self._console = Console(file=stream)
        self._frame: LiveRender | None = None  # currently on the terminal
        self._drawing = threading.RLock()
        self._view = RunView(NOTHING_YET)
        self._terminal = contextlib.ExitStack()
        self._diversions = contextlib.ExitStack()
        self._lines: list[tuple[TextIO, str]] = []  # with their original streams
        self._lines_lock = threading.Lock()
        self._printed_at = 0.0
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TerminalDisplay:
        self._task = asyncio.create_task(self._keep_drawing())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Draw a last time; waits for the terminal only briefly."""
        self._over.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LONGEST_LAST_DRAW_S)

    async def _keep_drawing(self) -> None:
        try:
            while not self._over.is_set():
                await self._draw_next()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), self._interval_s)
            await self._draw_next()
        except Exception:
            logger.exception("the live view failed; the run continues without it")
        finally:
            await asyncio.to_thread(self._leave)

    async def _draw_next(self) -> None:
        snapshot = self._take_snapshot()
        if snapshot is not None:
            await asyncio.to_thread(self._draw, snapshot)

    def _draw(self, snapshot: RunSnapshot) -> None:
        if self._frame is None:
            self._console = self._terminal.enter_context(_separate_console(self._stream))
            self._divert()
            self._console.show_cursor(False)
        with self._drawing:
            view = RunView(snapshot, max_lines=self._console.height - LINES_LEFT_FOR_THE_LOG)
            self._show(view)

    def _show(self, view: RunView) -> None:
        """Replace the last view by the waiting lines and the new view below them."""
        with self._lines_lock:
            lines, self._lines = self._lines, []
        self._printed_at = time.monotonic()
        erasing = Control() if self._frame is None else self._frame.position_cursor()
        self._frame = LiveRender(view)
        if lines:
            self._console.control(erasing)
            for stream, line in lines:
                stream.write(inert_block(line) + "\n")
                stream.flush()
            self._console.print(self._frame)
        else:
            with self._console:  # one write, which does not flicker
                self._console.control(erasing)
                self._console.print(self._frame)
        self._view = view

    def _leave(self) -> None:
        # Without the lock: a thread that is logging holds a handler and waits for the lock.
        self._diversions.close()
        with self._drawing:
            if self._frame is not None:
                self._show(self._view)
                self._console.line()
                self._console.show_cursor(True)
            self._terminal.close()

    def _divert(self) -> None:
        for name in ("stdout", "stderr"):
            original = getattr(sys, name)
            if not original.isatty():
                continue
            above = diverted(original, partial(self._add_line, original), name=name)
            self._diversions.enter_context(above)

    def _add_line(self, stream: TextIO, line: str) -> None:
        with self._lines_lock:
            self._lines.append((stream, line))
        # Otherwise a blocked event loop would hide the last lines of the log.
        if time.monotonic() - self._printed_at > 2 * self._interval_s:
            with self._drawing:
                if self._frame is not None:
                    self._show(self._view)


@contextlib.contextmanager
def _separate_console(stream: TextIO) -> Iterator[Console]:
    """Open a console on the terminal of a stream that does not write to the stream object."""
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):  # no real terminal
        yield Console(file=stream)
        return
    with os.fdopen(descriptor, "w", encoding=stream.encoding, errors="replace") as terminal:
        yield Console(file=terminal)
