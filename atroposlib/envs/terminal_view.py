"""How a running environment is shown in a terminal: a function of one snapshot; pure.

Only bold, dim and red are used, which read on light and dark ground alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.panel import Panel
from rich.text import Text

from atroposlib.envs.run_snapshot import ErrorLine, RunSnapshot
from atroposlib.envs.score_histogram import score_bars
from atroposlib.utils.inert_text import inert_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["RunView", "view_lines"]

LABEL_WIDTH = 11
COLUMN_WIDTH = 38
WIDEST = 120
LONGEST_BAR = 30
FRAME_WIDTH = 4  # border and padding of both sides
FRAME_HEIGHT = 2
MAX_ERRORS = 4
MAX_COUNTS = 6


class RunView:
    """A snapshot as rich renders it: a panel as wide as the terminal, at most `WIDEST`.

    Args:
        snapshot: what to show.
        max_lines: lines of the terminal the panel may take.
    """

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
    """Return what is shown, line by line, none wider than `width`.

    When there is less room the histogram goes first, then errors, then the rest from below.

    Args:
        snapshot: what to show.
        width: columns of a line.
        max_lines: most lines.
        ascii_only: the terminal can show nothing else.
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
    """Put two cells on a line where both fit."""
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
        lines.append(Text.assemble((f"{moment} {times}", "dim"), (text, _style(error))))
    return lines


def _style(error: ErrorLine) -> str:
    return "red" if error.is_error else ""
