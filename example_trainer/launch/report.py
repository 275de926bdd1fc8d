"""Progress display of a run, and its results: reward curve, rollouts page, evaluations.

On a terminal, progress is one live line with a bar and the remaining time. In a log it is one line
per phase and one every few seconds.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from atroposlib.frontend.jsonl2html import generate_html
from example_trainer.cli import require_extra
from example_trainer.reporting.page import rolling_mean


class RewardMetric(NamedTuple):
    """Metric of the trajectories that an environment has scored since the last step."""

    key: str
    """Suffix of the metric's name, after the name of the environment."""
    label: str
    """Label of an axis."""
    summary: str
    """Format string for the progress line, such as `reward {:.3g}`."""
    limits: tuple[float, float] | None
    """Lower and upper bound of its values; None if unbounded."""

    def limits_of(self, rewards: Sequence[float]) -> tuple[float, float] | None:
        """Return the limits of an axis; None if an environment has other values, such as 62 %."""
        if self.limits is None or min(rewards) < self.limits[0] or max(rewards) > self.limits[1]:
            return None
        return self.limits


SHARE_RIGHT = RewardMetric(
    key="train/percent_correct",
    label="fraction of correct answers",
    summary="{:.0%} of the answers correct",
    limits=(0.0, 1.0),
)


BATCH_REWARD = RewardMetric(
    key="train/reward_mean",
    label="mean reward of the groups trained on",
    summary="reward {:.3g}",
    limits=None,
)


_DROPPED = re.compile(
    r"(?:group dropped \(\w+\): |its group is lost(?:: |, \d+ times so far with ))(.+)"
)
_WITHOUT_ROLLOUT = re.compile(r"get_next_item returned None|item skipped: .+")
_WITHOUT_BATCH = re.compile(r"no full batch yet; (?!are environments running)(.+)")
_STEP_LINE = re.compile(r" step \d+/\d+ \|")
_MEANS_OF_ALL_TRIES = (
    # Each environment decides what counts as correct, and some log a percentage.
    SHARE_RIGHT._replace(
        label="percent_correct of the environment", summary="percent_correct {:.3g}"
    ),
    RewardMetric(
        key="train/mean_score", label="mean score", summary="mean score {:.3g}", limits=None
    ),
    RewardMetric(
        key="train/mean_return", label="mean return", summary="mean return {:.3g}", limits=None
    ),
)


class RewardPoint(NamedTuple):
    """Mean reward of all trajectories that the environment scored at one trainer step."""

    step: int
    reward: float


def read_rewards(metrics_path: Path, metric: RewardMetric = SHARE_RIGHT) -> list[RewardPoint]:
    """Read a metric of the environment, without an incomplete last line.

    It includes every trajectory, whereas the trainer gets only groups whose scores differ.
    """
    try:
        lines = metrics_path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    points = []
    for line in lines:
        with contextlib.suppress(ValueError, OverflowError):
            record = json.loads(line)
            reward = next((v for k, v in record.items() if k.endswith(metric.key)), None)
            if reward is not None and math.isfinite(reward):  # NaN: the mean of nothing
                points.append(RewardPoint(int(record["step"]), float(reward)))
    return points


def find_drop(log: str) -> str | None:
    """Return why the last group in an environment's log was dropped, or its rollout failed."""
    reasons = _DROPPED.findall(log)
    return reasons[-1] if reasons else None


def find_lack(log: str) -> str | None:
    """Return the last reason in an environment's log why it started no rollout."""
    reasons = _WITHOUT_ROLLOUT.findall(log)
    return reasons[-1] if reasons else None


def find_unfilled(log: str) -> str | None:
    """Return the reason in the trainer's log why no batch has formed since its last step."""
    reasons = _WITHOUT_BATCH.findall(_STEP_LINE.split(log)[-1])
    return reasons[-1] if reasons else None


def find_rewards(
    environment_paths: Sequence[Path], trainer_path: Path
) -> tuple[RewardMetric, list[RewardPoint]]:
    """Read the reward of a run.

    This is the mean over all trajectories if there is one environment, which logs it, else the mean
    over the groups trained on.
    """
    if len(environment_paths) == 1:
        for metric in _MEANS_OF_ALL_TRIES:
            points = read_rewards(environment_paths[0], metric)
            if points:
                return metric, points
    return BATCH_REWARD, read_rewards(trainer_path, BATCH_REWARD)


def read_evaluation(folder: Path) -> dict[str, float]:
    """Return the metrics that `evaluate` has written to a folder; empty without any."""
    try:
        report = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        metrics = report["results"]["all"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def count_steps(metrics_path: Path) -> int:
    """Return the number of steps that the trainer has logged."""
    try:
        return metrics_path.read_text(encoding="utf-8").count('"train/loss"')
    except FileNotFoundError:
        return 0


def write_curve(
    points: Sequence[RewardPoint], path: Path, *, metric: RewardMetric = SHARE_RIGHT
) -> None:
    """Draw the reward over the steps, with a rolling mean, as a PNG."""
    with require_extra("trainer"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    steps = [point.step for point in points]
    rewards = [point.reward for point in points]
    window = _window(len(points))
    # Without pyplot, which needs a window system and keeps global figures.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#9db4c0", linewidth=1, label="one step")
    axes.plot(
        steps, rolling_mean(rewards, window), color="#253237", linewidth=2, label=_smoothing(window)
    )
    axes.set(xlabel="trainer step", ylabel=metric.label, ylim=metric.limits_of(rewards))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def curve_text(
    points: Sequence[RewardPoint],
    *,
    metric: RewardMetric = SHARE_RIGHT,
    width: int = 72,
    height: int = 14,
) -> str:
    """Draw the rolling mean of the reward over the steps for a terminal, without colors.

    A narrower terminal gets a narrower drawing.
    """
    with require_extra("trainer"):
        import plotext

    window = _window(len(points))
    rewards = rolling_mean([point.reward for point in points], window)
    figure = plotext.figure
    figure.clear()
    width = min(width, max(_NARROWEST_CURVE, shutil.get_terminal_size().columns))
    figure.plot_size(width, height)
    figure.label("trainer step", axis="x")
    ticks = _step_ticks(points, most=max(2, width // 9))
    figure.ruler("x").ticks(ticks, [str(tick) for tick in ticks])
    limits = metric.limits_of(rewards)
    if limits is not None:
        figure.ruler("y").lim(*limits)
    signal = figure.signal([point.step for point in points], rewards, marker="braille")
    signal.lines()
    figure.draw(signal)
    drawing = str(plotext.uncolorize(figure.build().string()))
    return f"{metric.label} ({_smoothing(window)})\n{drawing}"


def _step_ticks(points: Sequence[RewardPoint], *, most: int) -> list[int]:
    """Return steps for an axis, at equal distances, with the first and the last one."""
    first, last = points[0].step, points[-1].step
    count = min(most, last - first + 1)
    if count < 2:
        return [first]
    return sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)})


def write_rollouts_page(
    files: Sequence[Sequence[Path]], page_path: Path, *, groups_per_end: int
) -> int:
    """Write a page of the first and the last groups of a run; return the number of groups.

    Args:
        files: JSONL files of groups for each environment, oldest first.
        page_path: The HTML file, not written without groups; a JSONL file is written next to it.
        groups_per_end: Number of groups from the start of the run, and from its end.
    """
    each = max(1, groups_per_end // max(1, len(files)))
    first: list[str] = []
    last: list[str] = []
    for paths in files:
        with contextlib.ExitStack() as opened:
            lines = itertools.chain.from_iterable(
                opened.enter_context(path.open(encoding="utf-8", errors="replace"))
                for path in paths
            )
            first += itertools.islice(lines, each)
            last += deque(lines, maxlen=each)
    if not first:
        return 0
    chosen_path = page_path.with_suffix(".jsonl")
    # A process that was killed leaves a line without an end, which another one follows.
    ended = [f"{line.rstrip()}\n" for line in (*first, *last)]
    chosen_path.write_text("".join(ended), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the path
        generate_html(chosen_path, page_path)
    return len(first) + len(last)


def plain_number(value: float) -> str:
    """Return a metric with four digits; rounding errors around 0 become 0."""
    return f"{round(value, 12) + 0.0:.4g}"


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """Return a metric and, if it is known, its interval of 95 %: `0.53 (0.36 to 0.69)`."""
    low, high = metrics.get(f"{name}_ci_low"), metrics.get(f"{name}_ci_high")
    shown = plain_number(metrics[name])
    if low is None or high is None:
        return shown
    return f"{shown} ({low:.2g} to {high:.2g})"


_NARROWEST_CURVE = 32


def _smoothing(window: int) -> str:
    return f"mean of {window} steps" if window > 1 else "each step"


def _window(num_points: int) -> int:
    return max(1, min(20, num_points // 4))


_SECONDS_BETWEEN_LINES = 15.0


_WIDE_TERMINAL = 72
"""Columns from which there is room for a bar and the remaining time."""


def _bar_columns(width: int) -> list[ProgressColumn]:
    """Return the columns of the live line: the state is cut if there is no room, times are not."""
    state = TextColumn(
        "{task.fields[state]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    elapsed = TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7))
    if width < _WIDE_TERMINAL:
        return [state, elapsed]
    return [
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=28 if width >= 110 else 14),
        state,
        elapsed,
        TextColumn("left", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(
            elapsed_when_finished=False, table_column=Column(no_wrap=True, min_width=7)
        ),
    ]


class RunProgress:
    """Displays the phases of a run, one at a time, with a live bar on a terminal."""

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self.seconds_by_phase: dict[str, float] = {}
        """Duration of each phase by key, in order."""
        self._started = clock()
        self._phase: str | None = None
        self._phase_started = self._started
        self._last_line = self._started
        self._state = self._shown_state = ""
        self._state_since = self._started
        self._task: TaskID | None = None
        self._bar = Progress(
            *_bar_columns(self.console.width),
            console=self.console,
            transient=True,
            expand=True,
        )

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    def announce(self, introduction: str, titles: Sequence[str]) -> None:
        """Print the titles of the phases before the first one starts."""
        self.console.print(escape(introduction))
        for title in titles:
            self.console.print(f"   - {escape(title)}")
        self.console.print()

    def begin(self, phase: str, title: str, *, expected: str) -> None:
        """Start a phase, given its key in `seconds_by_phase`, title, and duration in words."""
        self.end()
        self._phase = phase
        self._phase_started = self._last_line = self._clock()
        self._state = self._shown_state = ""
        number = len(self.seconds_by_phase) + 1
        self.console.print(f"[bold]{number}. {escape(title)}[/bold] ({escape(expected)})")
        if self.console.is_terminal:
            self._task = self._bar.add_task("  ", total=None, state="")

    def update(self, done: float, total: float | None, state: str) -> None:
        """Show the progress of the phase: units done, their total if known, and a description."""
        now = self._clock()
        if state != self._state:
            self._state, self._state_since = state, now
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, state=escape(state))
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            line = f"{state}{self._time_left(done, total)}"
            if state == self._shown_state:
                line = f"no change for {now - self._state_since:.0f} s"
            self._shown_state = state
            self.console.print(f"   {escape(line)}")

    def note(self, text: str) -> None:
        self.console.print(f"   {escape(text)}")

    def end(self) -> None:
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
