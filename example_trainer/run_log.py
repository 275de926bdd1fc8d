"""Outputs of a run while it trains: metrics file, wandb, report, spans, live view.

The metrics file has one line per step:

    metrics.jsonl             of the current run; a resumed run truncates it to its checkpoint
    metrics_settings.json     its settings and its id
    metrics.<n>.jsonl ...     of earlier runs with the same path
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rich.box import ROUNDED
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from atroposlib.errors import ConfigError
from atroposlib.scored_data import is_traceparent
from atroposlib.utils.line_stream import diverted
from atroposlib.utils.run_log import MetricsLog
from atroposlib.utils.text import inert_block, inert_line
from atroposlib.utils.tracing import Tracer, TraceSpan, open_tracer
from example_trainer.config import TrainingConfig
from example_trainer.reporting.page import short_number
from example_trainer.reporting.writing import (
    REPORT_NAME,
    read_settings,
    settings_path,
    write_report,
    write_settings,
)

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

logger = logging.getLogger(__name__)


def with_wandb_names(config: TrainingConfig, run_id: str) -> TrainingConfig:
    """Return the config with complete wandb settings.

    Without a project, wandb is disabled with a warning. A missing group becomes the first eight
    characters of the run's random id, which a resumed run keeps.
    """
    if not config.use_wandb:
        return config
    if not config.wandb_project:
        logger.warning("use_wandb needs wandb_project; writing the local metrics file only")
        return config.model_copy(update={"use_wandb": False})
    if config.wandb_group:
        return config
    return config.model_copy(update={"wandb_group": run_id[:8]})


def open_run_log(
    config: TrainingConfig,
    *,
    run_id: str,
    steps_done: int = 0,
    last_metrics: Mapping[str, float] | None = None,
) -> MetricsLog:
    """Open the run's log: a JSONL file, and wandb and TensorBoard as configured.

    Args:
        config: Settings.
        run_id: Id of the run; a resumed run continues its own file.
        steps_done: Steps completed; later ones will be logged again.
        last_metrics: Metrics of step `steps_done`, logged if its line is missing.
    """
    path = metrics_path_of(config)
    lacks_last = claim_metrics_file(path, run_id=run_id, steps_done=steps_done)
    settings = config.model_dump(mode="json")
    changed = {name: settings[name] for name in config.model_dump(exclude_defaults=True)}
    write_settings(path, settings, changed, run_id=run_id)
    log = MetricsLog(
        use_wandb=config.use_wandb, metrics_path=path, use_tensorboard=config.use_tensorboard
    )
    log.start(
        project=config.wandb_project,
        group=config.wandb_group,
        name=None,
        config=config.model_dump(),
        run_id=run_id,
        steps_done=steps_done,
    )
    if lacks_last and last_metrics:
        log.log(dict(last_metrics), step=steps_done)
    return log


def write_run_report(config: TrainingConfig) -> None:
    """Write the report of a run to the folder of its metrics; failures are logged."""
    path = metrics_path_of(config)
    if not path.is_file():
        return
    report = path.with_name(REPORT_NAME)
    try:
        num_steps = write_report(path, report)
    except (ConfigError, OSError) as error:
        logger.warning("the report could not be written: %s", error)
    else:
        logger.info("report of %d steps: %s", num_steps, report)


def metrics_path_of(config: TrainingConfig) -> Path:
    """Return the JSONL file of a run's metrics."""
    return Path(config.metrics_path or Path(config.save_path) / "metrics.jsonl")


def claim_metrics_file(path: Path, *, run_id: str, steps_done: int) -> bool:
    """Prepare a metrics file for a run that continues after `steps_done` steps.

    The lines of later steps, which are repeated, and an incomplete last line are removed. A file of
    another run is renamed.

    Returns:
        Whether the line of step `steps_done` is missing: the run was killed between writing the
        checkpoint of that step and the line.
    """
    is_own = read_settings(path).get("run_id") == run_id
    if not path.is_file():
        return is_own and steps_done > 0
    if not is_own:
        _set_aside(path)
        return False
    with path.open("rb+") as file:
        file.truncate(length_through(file, steps_done))
        file.seek(0)
        return steps_done > 0 and all(_step_of(line) != steps_done for line in file)


def length_through(lines: Iterable[bytes], steps_done: int) -> int:
    """Return the length in bytes of the complete lines of steps up to `steps_done`."""
    length = 0
    for line in lines:
        step = _step_of(line)
        if step is None or step > steps_done:
            break
        length += len(line)
    return length


def _step_of(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    settings = settings_path(path)
    if settings.is_file():
        settings.rename(settings_path(aside))
    path.rename(aside)


_STEP_PARTS = (
    ("rl.step.wait", "train/data_fetch_time"),
    ("rl.step.compute", "train/compute_time"),
    ("rl.step.publish", "train/sync_time"),
)


class StepSpans:
    """Writes the spans of optimizer steps (docs/telemetry.md), after each has ended.

        rl.step    with links to the groups of its batch, in a trace of its own
          rl.step.wait, rl.step.compute, rl.step.publish
        rl.train   per group, in the group's trace, with a link to the step

    Args:
        tracer: Receives the spans.
        run_id: Id of the run.
    """

    def __init__(self, tracer: Tracer, *, run_id: str) -> None:
        self._tracer = tracer
        self._run_id = run_id
        self._groups: Sequence[Mapping[str, Any]] = ()

    def take_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note the trained groups of the step that starts."""
        self._groups = groups

    def write(self, step: int, *, batch_id: str | None, metrics: Mapping[str, float]) -> None:
        """Write the spans of a step that ends now and made the weights of version `step`.

        `metrics` has the durations of its parts.
        """
        ended = time.time_ns()
        parts = [(name, round(metrics[key] * 1e9)) for name, key in _STEP_PARTS]
        started = ended - sum(duration_ns for _, duration_ns in parts)
        traced = [group for group in self._groups if is_traceparent(group.get("traceparent"))]
        attributes = {
            "rl.run.id": self._run_id,
            "rl.step": step,
            "rl.policy.version": step,
            "rl.batch.id": batch_id,
            "rl.batch.groups": len(self._groups),
            "rl.loss": metrics.get("train/loss"),
            "rl.reward": metrics.get("train/reward_mean"),
            "rl.staleness": metrics.get("train/staleness_mean"),
        }
        links = [group["traceparent"] for group in traced]
        whole = self._tracer.begin("rl.step", attributes, links=links, start_ns=started)
        for name, duration_ns in parts:
            part = self._tracer.begin(name, parent=whole.traceparent, start_ns=started)
            started += duration_ns
            part.end(end_ns=started)
        trained_since = ended - sum(duration_ns for _, duration_ns in parts[1:])
        for group in traced:
            self._write_training(group, step, whole, trained_since, ended)
        whole.end(end_ns=ended)
        self._groups = ()

    def _write_training(
        self, group: Mapping[str, Any], step: int, whole: TraceSpan, started: int, ended: int
    ) -> None:
        sampled_by = group.get("policy_version")
        span = self._tracer.begin(
            "rl.train",
            {
                "rl.step": step,
                "rl.policy.version": step,
                "rl.sampling.policy.version": sampled_by,
                "rl.staleness": None if sampled_by is None else step - 1 - sampled_by,
            },
            parent=group["traceparent"],
            links=[whole.traceparent] if whole.traceparent else [],
            start_ns=started,
        )
        span.end(end_ns=ended)

    def close(self) -> None:
        """Export the spans that are left."""
        self._tracer.close()


def open_step_spans(run_id: str) -> StepSpans | None:
    """Return the writer of spans if `ATROPOS_TRACING` asks for them, else None."""
    tracer = open_tracer("atropos-trainer")
    return None if tracer is None else StepSpans(tracer, run_id=run_id)


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
    ("optimizer", "train/optimizer_time"),
    ("publishing", "train/sync_time"),
)


def time_shares(history: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return the share of each part in the total time of the given steps; empty if it is 0."""
    total = sum(record.get("train/step_time", 0.0) for record in history)
    if not total:
        return []
    found = [(name, sum(record.get(key, 0.0) for record in history)) for name, key in _TIMES]
    return [(name, seconds / total) for name, seconds in found if seconds]


_TREND_MARGIN = 36
"""Columns of the frame, the names and the values."""
_SHORTEST_TREND = 4


@dataclass
class TrainingView:
    """State of a run, rendered by rich as a panel of the terminal's width, at most `_WIDEST`."""

    name: str
    total_steps: int
    activity: str = "loading"
    step: int = 0
    elapsed_s: float = 0.0
    history: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    """Metrics of the last steps, oldest first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        history = list(self.history)  # a copy: another thread appends to it
        trend_width = width - _TREND_MARGIN
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for name, key in _ROWS:
            values = [record[key] for record in history if key in record]
            if values:
                has_room = trend_width >= _SHORTEST_TREND and not options.ascii_only
                trend = sparkline(values, width=trend_width) if has_room else ""
                table.add_row(name, Text(short_number(float(values[-1])), style="bold"), trend)
        body = Table.grid()
        body.add_row(Text(self._headline(history), overflow="ellipsis", no_wrap=True))
        if history:
            body.add_row(table)
            shares = "  ".join(f"{n} {s:.0%}" for n, s in time_shares(history))
            body.add_row(Text(shares, style="dim", overflow="ellipsis", no_wrap=True))
        title = Text(inert_line(self.name, max_characters=max(8, width // 2)), style="bold")
        yield Panel(body, box=ROUNDED, title=title, title_align="left", width=width)

    def _headline(self, history: Sequence[Mapping[str, float]]) -> str:
        parts = [f"step {self.step} of {self.total_steps}", _clock(self.elapsed_s)]
        times = [r["train/step_time"] for r in history if "train/step_time" in r]
        if times and self.step < self.total_steps:
            left_s = (self.total_steps - self.step) * sum(times) / len(times)
            parts.append(f"about {_clock(left_s)} left")
        return " | ".join([*parts, inert_line(self.activity, max_characters=60)])


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw the last values as a row of bars scaled to their range."""
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
    """Live view of one run, drawn by a thread of rich; used as a context manager.

    Log handlers that write to the terminal are redirected to lines above the view, and restored.
    """

    def __init__(
        self,
        name: str,
        total_steps: int,
        *,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = TrainingView(name, total_steps)
        self._stream = stream
        self._clock = clock
        self._started = clock()
        self._ending = contextlib.ExitStack()

    def show_activity(self, text: str) -> None:
        self._view.activity = text

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.step = step
        self._view.history.append(dict(metrics))

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
        is_stopped = isinstance(exc, (KeyboardInterrupt, SystemExit))
        self.show_activity("ended" if exc is None else "stopped" if is_stopped else "failed")
        self._ending.close()

    def _render(self) -> TrainingView:
        self._view.elapsed_s = self._clock() - self._started
        return self._view


def _write_line(console: Console, line: str) -> None:
    console.print(Text(inert_block(line)), soft_wrap=True)
