"""Render the report of a run as one self-contained HTML file; pure.

    JSONL lines -> records, one per step -> series, smoothed and thinned out -> SVG -> page

The page has no scripts and makes no requests. Its style supports light and dark mode, narrow
screens and printing. Lines differ by color and by dashes (classes `c0` ... `c5`). All text
of a run (settings, names, metrics, rollouts) is escaped.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from atroposlib.utils.text import inert_line, inert_markup
from atroposlib.viewer.rollouts import finite_number
from example_trainer.reporting.examples import RolloutExamples, examples_section


class Series(NamedTuple):
    """One line of a chart; x is ascending, both lists have the same length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    """Finite numbers."""


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Return at each position the mean of the last `window` values."""
    recent: deque[float] = deque(maxlen=window)
    means = []
    for value in values:
        recent.append(value)
        means.append(sum(recent) / len(recent))
    return means


def thin_out(series: Series, *, max_points: int) -> Series:
    """Shorten a series to at most `max_points` by averaging consecutive points."""
    return _averaged(series, -(-len(series.xs) // max_points))


def _averaged(series: Series, size: int) -> Series:
    if size <= 1:
        return series
    starts = range(0, len(series.xs), size)
    return Series(
        series.name,
        [_mean(series.xs[start : start + size]) for start in starts],
        [_mean(series.ys[start : start + size]) for start in starts],
    )


def round_ticks(low: float, high: float, *, most: int = 5) -> list[float]:
    """Return evenly spaced round numbers that enclose the range, with at most `most` intervals."""
    if not high - low > max(abs(high) * 1e-9, 1e-300):
        half = max(abs(high) / 2, 1e-300) if high else 0.5
        low, high = low - half, high + half
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (power * factor for factor in (1, 2, 2.5, 5, 10, 20))
    for step in steps:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def short_number(value: float) -> str:
    """Format a number in a few characters: 0.0123, 1.5, 12,345, 3.4e-07."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e7 or size < 1e-4:
        return f"{value:.2g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size < 1 else f"{value:.5g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


MAX_STEP = 10**12
MAX_VALUE = 1e100
"""Larger values of metrics are left out of charts: their sums and squares would overflow."""
STEP_SIGN = "train/loss"
"""Metric that only the records of optimizer steps have."""


class RunRecords(NamedTuple):
    """The newest run recorded in a metrics file."""

    steps: Sequence[Mapping[str, Any]]
    """One record per optimizer step, in order; each has `step`."""
    num_unreadable: int
    """Lines that are not a record; a file that is being written may end in one."""


def read_records(lines: Iterable[str]) -> RunRecords:
    """Read the newest run of a metrics file, which starts again at the first step.

    Of several records of a step, the last one counts.
    """
    by_step: dict[int, Mapping[str, Any]] = {}
    num_unreadable = 0
    first: int | None = None
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
            if abs(step) > MAX_STEP:
                raise ValueError("not a step")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            num_unreadable += 1
            continue
        if STEP_SIGN not in record:
            continue
        if first is None or step <= first:
            by_step, first = {}, step
        by_step[step] = record
    return RunRecords([by_step[step] for step in sorted(by_step)], num_unreadable)


def charted_number(value: Any) -> float | None:
    """Return a value as a float; None without a finite one up to `MAX_VALUE`."""
    number = finite_number(value)
    return None if number is None or abs(number) > MAX_VALUE else number


def series_of(steps: Sequence[Mapping[str, Any]], key: str, name: str) -> Series | None:
    """Return the values of a metric by step that a chart can show; None without any."""
    values = ((float(record["step"]), charted_number(record.get(key))) for record in steps)
    points = [(step, value) for step, value in values if value is not None]
    if not points:
        return None
    return Series(name, [x for x, _ in points], [y for _, y in points])


NUM_COLORS = 6
_WIDTH, _HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 10, 40
_MAX_POINTS = 400
_SMOOTHED_FROM = 24


class _Frame:
    """Coordinates and axes of a chart."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._x_low, self._x_high = min(xs), max(xs)
        # Without it, a metric that is always 0 would have negative ticks.
        high = max(ys) if any(ys) else 1.0
        self._y_ticks = round_ticks(min(ys), high, most=4)

    def x(self, value: float) -> float:
        span = self._x_high - self._x_low
        share = (value - self._x_low) / span if span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y_ticks[0], self._y_ticks[-1]
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        parts = []
        for tick in self._y_ticks:
            y = self.y(tick)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/><text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" '
                f'text-anchor="end">{short_number(tick)}</text>'
            )
        for tick in self._x_ticks():
            parts.append(
                f'<text class="tick" x="{self.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
                f'text-anchor="middle">{short_number(tick)}</text>'
            )
        parts.append(
            f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" '
            'text-anchor="middle">optimizer step</text>'
        )
        return "".join(parts)

    def _x_ticks(self) -> list[float]:
        if self._x_low == self._x_high:
            return [self._x_low]
        inside = [
            tick
            for tick in round_ticks(self._x_low, self._x_high, most=7)
            if self._x_low <= tick <= self._x_high and tick == int(tick)
        ]
        return inside or [self._x_low, self._x_high]


def line_chart(title: str, series: Sequence[Series], *, smooths: bool = True) -> str:
    """Draw at least one line; if `smooths`, long ones are pale, with their rolling mean on top."""
    thinned = [thin_out(one, max_points=_MAX_POINTS) for one in series]
    frame = _Frame([x for one in thinned for x in one.xs], [y for one in thinned for y in one.ys])
    drawn = [
        _line(one, frame, f"c{i % NUM_COLORS}", window=_window(one) if smooths else 0)
        for i, one in enumerate(thinned)
    ]
    return _svg(title, frame.axes() + "".join(drawn))


def overlay_chart(
    title: str,
    by_color: Mapping[int, Series],
    *,
    x_range: tuple[float, float],
    smooths: bool = True,
) -> str:
    """Draw at least one line, each in its own color, such as one metric of several runs.

    Lines of different length are averaged over the same number of steps, so that none lags behind
    the others.
    """
    size = -(-max(len(one.xs) for one in by_color.values()) // _MAX_POINTS)
    thinned = {color: _averaged(one, size) for color, one in by_color.items()}
    frame = _Frame(x_range, [y for one in thinned.values() for y in one.ys])
    windows = [window for one in thinned.values() if (window := _window(one))]
    shortest = min(windows) if smooths and windows else 0
    drawn = [
        _line(one, frame, f"c{color}", window=shortest if _window(one) else 0)
        for color, one in thinned.items()
    ]
    return _svg(title, frame.axes() + "".join(drawn))


def stacked_chart(title: str, series: Sequence[Series]) -> str:
    """Draw non-negative series over the same steps as stacked areas, the first at the bottom."""
    thinned = [thin_out(one, max_points=_MAX_POINTS) for one in series]
    xs = thinned[0].xs
    floors = [[0.0] * len(xs)]
    for one in thinned:
        floors.append([low + y for low, y in zip(floors[-1], one.ys, strict=True)])
    frame = _Frame(xs, [0.0, *floors[-1]])
    areas = []
    for i, (low, high) in enumerate(itertools.pairwise(floors)):
        there = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, high, strict=True)]
        back = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, low, strict=True)]
        points = " ".join([*there, *reversed(back)])
        areas.append(f'<polygon class="area c{i % NUM_COLORS}" points="{points}"/>')
    return _svg(title, "".join(areas) + frame.axes())


def legend(names: Sequence[str], *, colors: Sequence[int] | None = None) -> str:
    """Return the legend of a chart as HTML: each series with its color; by default in order."""
    return "".join(
        f'<span class="key"><i class="c{i % NUM_COLORS}"></i>{inert_markup(name)}</span>'
        for i, name in zip(colors or range(len(names)), names, strict=True)
    )


def _window(series: Series) -> int:
    """Return the number of points of its rolling mean; 0 if it is too short for one."""
    return 0 if len(series.xs) < _SMOOTHED_FROM else len(series.xs) // 12


def _line(series: Series, frame: _Frame, color: str, *, window: int) -> str:
    if len(series.xs) == 1:
        x, y = frame.x(series.xs[0]), frame.y(series.ys[0])
        return f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if not window:
        return _polyline(series.xs, series.ys, frame, f"line {color}")
    means = rolling_mean(series.ys, window)
    return _polyline(series.xs, series.ys, frame, f"line pale {color}") + _polyline(
        series.xs, means, frame, f"line {color}"
    )


def _polyline(xs: Sequence[float], ys: Sequence[float], frame: _Frame, classes: str) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline class="{classes}" points="{points}"/>'


def _svg(title: str, content: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{inert_markup(title)}">'
        f"{content}</svg>"
    )


_ROWS_PER_END = 5
_TIMES = (
    ("train/data_fetch_time", "waiting for a batch"),
    ("train/forward_time", "forward"),
    ("train/backward_time", "backward"),
    ("train/optimizer_time", "optimizer"),
    ("train/other_compute_time", "other computation"),
    ("train/sync_time", "saving and publishing"),
)
_COMPUTE_PARTS = ("train/forward_time", "train/backward_time", "train/optimizer_time")


class Fact(NamedTuple):
    """A figure at the top of the page."""

    name: str
    value: str


class HeldOut(NamedTuple):
    """Result on problems that were not trained on."""

    name: str
    """The measured quantity, such as `share of right answers`."""
    before: float | None
    """Value before the training; None if it was not measured."""
    after: float
    num_problems: int | None = None


class Chart(NamedTuple):
    """Metrics of a chart and their names in it."""

    title: str
    note: str
    lines: tuple[tuple[str, str], ...]
    smooths: bool = True


CHARTS: Mapping[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart(
            "Reward of the trained batches",
            "mean score and its deviation",
            (("train/reward_mean", "mean"), ("train/reward_std", "deviation")),
        ),
        Chart(
            "Advantage",
            "over trained tokens; without a deviation there is no gradient",
            (("train/advantage_mean", "mean"), ("train/advantage_std", "deviation")),
        ),
        Chart(
            "Loss",
            "a policy loss need not decrease while the reward increases",
            (("train/loss", "total"), ("grpo/policy_loss", "policy"),
             ("sft/loss", "demonstrations"), ("distill/loss", "distillation")),
        ),
        Chart(
            "Entropy",
            "nats per token; near 0, the policy has stopped exploring",
            (("train/entropy", "of the policy"),
             ("train/entropy_estimate", "estimated by samples")),
        ),
        Chart("Gradient norm", "before it is clipped", (("train/grad_norm", "norm"),)),
        Chart("Learning rate", "", (("train/lr", "learning rate"),), smooths=False),
    ),
    "Agreement of sampler and trainer": (
        Chart(
            "KL divergence",
            "in nats per token; k3 estimates, for the teacher over its top tokens",
            (("alignment/k3", "from the sampler"), ("grpo/mean_kl", "from the reference"),
             ("distill/kl", "from the teacher")),
        ),
        Chart(
            "Clipping",
            "share of tokens",
            (("grpo/clipped_fraction", "outside the clip range"),
             ("grpo/bound_fraction", "gradient changed by the clip"),
             ("grpo/truncated_fraction", "importance weight truncated")),
        ),
        Chart("Ratio", "trainer to sampler, mean over tokens", (("grpo/mean_ratio", "ratio"),)),
        Chart(
            "Mismatch of sampler and trainer",
            "absolute difference of their logprobs of the same tokens",
            (("alignment/diff_abs_mean", "mean"),),
        ),
        Chart(
            "Largest mismatch",
            "of a token in a step",
            (("alignment/diff_max", "largest difference"),),
        ),
        Chart(
            "Staleness",
            "optimizer steps between sampling and training",
            (("train/staleness_mean", "mean"), ("train/staleness_max", "largest")),
        ),
    ),
    "Batches and speed": (
        Chart(
            "Trajectories",
            "shares",
            (("train/truncation_rate", "truncated"),
             ("train/zero_advantage_groups_fraction", "groups without a gradient"),
             ("train/padding_fraction", "padding")),
        ),
        Chart("Throughput", "tokens fed to the model per second of computation",
              (("train/tokens_per_s", "tokens/s"),)),
        Chart("Use of the device", "model FLOPs over its peak (MFU)", (("train/mfu", "MFU"),)),
        Chart(
            "Device memory",
            "GiB",
            (("train/gpu_memory_gb", "in use"), ("train/gpu_memory_reserved_gb", "reserved")),
            smooths=False,
        ),
    ),
}  # fmt: skip
"""Charts by the heading above them."""

_COLUMNS = (
    ("step", "step"),
    ("train/reward_mean", "reward"),
    ("train/loss", "loss"),
    ("alignment/k3", "KL to sampler"),
    ("train/entropy", "entropy"),
    ("grpo/clipped_fraction", "outside clip"),
    ("alignment/diff_abs_mean", "mismatch"),
    ("train/staleness_mean", "staleness"),
    ("train/grad_norm", "gradient"),
    ("train/truncation_rate", "truncated"),
    ("train/tokens_per_s", "tokens/s"),
    ("train/step_time", "seconds"),
)


def make_page(
    steps: Sequence[Mapping[str, Any]],
    *,
    title: str,
    facts: Sequence[Fact],
    findings: Sequence[str],
    settings: Mapping[str, Any],
    changed: Mapping[str, Any],
    accuracy: Series | None = None,
    reward_parts: Sequence[Series] = (),
    held_out: Sequence[HeldOut] = (),
    notes: Sequence[str] = (),
    lead: str = "",
    examples: RolloutExamples | None = None,
    rollouts_name: str | None = None,
) -> str:
    """Return the page of a run.

    Args:
        steps: Records of the steps in order.
        title: Heading of the page.
        facts: Numbers of the run.
        findings: Sentences about possible problems.
        settings: Settings of the run, without secrets.
        changed: Those settings that are not at their defaults.
        accuracy: Accuracy logged by the environment.
        reward_parts: Named parts of the reward.
        held_out: Results on held-out problems, shown first.
        notes: Sentences about the page itself.
        lead: Line below the heading: size and duration of the run.
        examples: Rollouts of the first and the last steps.
        rollouts_name: File name of a page of rollouts in the folder of the report.
    """
    parts = [
        _hero(steps, accuracy, held_out),
        _findings(findings, has_steps=bool(steps)),
        examples_section(examples) if examples is not None else "",
        _rollouts_link(rollouts_name),
        _numbers(facts, _meanings(steps, accuracy, reward_parts, held_out)),
        _charts(steps, reward_parts, accuracy=accuracy),
        _table(steps),
        _settings(settings, changed),
        "".join(f'<p class="note">{inert_markup(note)}</p>' for note in notes),
    ]
    return page_around(parts, title=title, lead=lead)


def page_around(
    parts: Sequence[str], *, title: str, lead: str, head: str = "", style: str = ""
) -> str:
    """Return an HTML page with a heading, links to its sections and the style of all reports.

    Args:
        parts: HTML of its sections; empty ones are left out.
        title: Heading of the page.
        lead: Line below the heading.
        head: HTML at the start of its head.
        style: CSS after that of all reports.
    """
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{head}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{inert_markup(title)}</title><style>{style_of('report.css')}{style}</style></head>\n"
        f'<body><a class="skip" href="#content">Skip to the result</a>'
        f"{_top(title, lead, body)}"
        f'<main id="content" tabindex="-1">{body}</main></body></html>\n'
    )


_PLACES = (
    ("answers", "Answers"),
    ("runs", "Runs"),
    ("values", "First, last and best"),
    ("differences", "Different settings"),
    ("numbers", "Numbers"),
    ("curves", "Curves"),
    ("steps", "Steps"),
    ("settings", "Settings"),
)
"""Headings that the navigation links to, by id."""
_MAX_TITLE_CHARACTERS = 120


@cache
def style_of(name: str) -> str:
    """Return a style sheet of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _top(title: str, lead: str, body: str) -> str:
    links = "".join(
        f'<li><a href="#{place}">{name}</a></li>'
        for place, name in _PLACES
        if f'id="{place}"' in body
    )
    heading = inert_markup(inert_line(title, max_characters=_MAX_TITLE_CHARACTERS))
    below = f'<p class="lead">{inert_markup(lead)}</p>' if lead else ""
    return (
        f'<header class="top"><h1>{heading}</h1>{below}'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
    )


def _hero(
    steps: Sequence[Mapping[str, Any]], accuracy: Series | None, held_out: Sequence[HeldOut]
) -> str:
    """Show the result next to the curve of the accuracy, or of the reward."""
    card = _main_curve(steps, accuracy)
    return f'<div class="hero">{_held_out(held_out)}{card}</div>' if held_out or card else ""


def _main_curve(steps: Sequence[Mapping[str, Any]], accuracy: Series | None) -> str:
    if accuracy is not None:
        note = "share of right answers, measured by the environment"
        return _card("Accuracy", note, [accuracy], kind="main")
    chart = CHARTS["Learning"][0]
    return _card(chart.title, chart.note, _found(steps, chart), kind="main")


def _held_out(results: Sequence[HeldOut]) -> str:
    if not results:
        return ""
    shown = "".join(_result(result) for result in results)
    return f'<section class="held-out"><h2>Held-out result</h2>{shown}</section>'


def _result(result: HeldOut) -> str:
    as_text = _percent if _is_share(result) else _three_digits
    after = inert_markup(as_text(result.after))
    big = f"<span>{after}</span> <small>after the training</small>"
    bars = ""
    if result.before is not None:
        before = inert_markup(as_text(result.before))
        big = f"<small>{before} →</small> <span>{after}</span>"
        top = 1.0 if _is_share(result) else max(abs(result.before), abs(result.after), 1e-300)
        if math.isfinite(top) and min(result.before, result.after) >= 0:
            bars = _bar("before", result.before / top) + _bar("after", result.after / top)
    sentence = inert_markup(_sentence(result))
    return (
        f'<div class="result"><p class="big" aria-hidden="true">{big}</p>{bars}'
        f'<p class="note">{sentence}</p></div>'
    )


def _bar(name: str, share: float) -> str:
    return (
        f'<div class="bar" aria-hidden="true"><span>{name}</span>'
        f'<i class="{name}" style="width:{100 * share:.1f}%"></i></div>'
    )


_SHARE_NAMES = ("share", "percent", "accuracy", "fraction", "rate", "pass@")


def _is_share(result: HeldOut) -> bool:
    values = [result.after] if result.before is None else [result.before, result.after]
    is_named = any(word in result.name.lower() for word in _SHARE_NAMES)
    return is_named and all(0.0 <= value <= 1.0 for value in values)


def _percent(value: float) -> str:
    return f"{100 * value:.3g}\u2009%"


def _three_digits(value: float) -> str:
    return short_number(float(f"{value:.3g}")) if math.isfinite(value) else str(value)


def _sentence(result: HeldOut) -> str:
    """Return `share of right answers: 0.12 before, 0.47 after (+0.35), 100 problems`."""
    after = _three_digits(result.after)
    problems = "" if result.num_problems is None else f", {result.num_problems} problems"
    if result.before is None:
        return f"{result.name}: {after} after the training{problems}"
    before = _three_digits(result.before)
    change = f"{result.after - result.before:+.3g}"
    return f"{result.name}: {before} before, {after} after ({change}){problems}"


def _rollouts_link(name: str | None) -> str:
    if name is None:
        return ""
    return f'<p><a href="{inert_markup(name)}">All rollouts of the first and the last steps</a></p>'


def _meanings(
    steps: Sequence[Mapping[str, Any]],
    accuracy: Series | None,
    reward_parts: Sequence[Series],
    held_out: Sequence[HeldOut],
) -> str:
    meanings = {}
    if held_out:
        meanings["held-out result"] = (
            "measured on problems that are not trained on, before and after the training"
        )
    if any("train/reward_mean" in record for record in steps):
        meanings["reward"] = (
            "mean score of the trajectories that were trained on, as sent by the environments; "
            "groups whose scores are all equal are usually not included"
        )
    if accuracy is not None:
        meanings["accuracy"] = (
            "share of right answers among all tries of the environment since its last log, "
            "including groups that were not sent"
        )
    for part in reward_parts:
        meanings[part.name] = (
            "a named part of the environment's reward: mean over all tries, before its weight"
        )
    rows = "".join(
        f"<dt>{inert_markup(name)}</dt><dd>{inert_markup(text)}.</dd>"
        for name, text in meanings.items()
    )
    return f'<h3>What the rewards are</h3><dl class="meanings">{rows}</dl>' if rows else ""


def _numbers(facts: Sequence[Fact], meanings: str) -> str:
    if not facts and not meanings:
        return ""
    tiles = "".join(
        f"<div><dt>{inert_markup(fact.name)}</dt><dd>{inert_markup(fact.value)}</dd></div>"
        for fact in facts
    )
    return (
        f'<section><h2 id="numbers">Numbers</h2><dl class="facts">{tiles}</dl>{meanings}</section>'
    )


def _findings(findings: Sequence[str], *, has_steps: bool) -> str:
    if not has_steps:
        return (
            '<p class="warn">No step was logged: the trainer writes its metrics after each '
            "optimizer step, so the first one has not ended or has failed.</p>"
        )
    if not findings:
        return '<p class="good">No findings in the metrics.</p>'
    rows = "".join(f"<li>{inert_markup(text)}</li>" for text in findings)
    return f'<section class="warn"><h2>Worth checking</h2><ul>{rows}</ul></section>'


def _charts(
    steps: Sequence[Mapping[str, Any]],
    reward_parts: Sequence[Series],
    *,
    accuracy: Series | None,
) -> str:
    """Return the charts under their headings, without the one at the top of the page."""
    rooms = []
    for heading, charts in CHARTS.items():
        is_first = heading == "Learning"
        shown = charts[1:] if is_first and accuracy is None else charts
        cards = [_card("Parts of the reward", "means before their weights", reward_parts)]
        cards = cards if is_first else []
        cards += [
            _card(chart.title, chart.note, _found(steps, chart), smooths=chart.smooths)
            for chart in shown
        ]
        cards += [_times_card(steps)] if heading == "Batches and speed" else []
        if any(cards):
            rooms.append(f'<h3>{heading}</h3><div class="charts">{"".join(cards)}</div>')
    if not rooms:
        return ""
    note = "Pale lines are single steps, strong ones rolling means; the last value is in brackets."
    return (
        f'<section><h2 id="curves">Curves</h2><p class="note">{note}</p>{"".join(rooms)}</section>'
    )


def _found(steps: Sequence[Mapping[str, Any]], chart: Chart) -> list[Series]:
    return _distinct([series_of(steps, key, name) for key, name in chart.lines])


def _times_card(steps: Sequence[Mapping[str, Any]]) -> str:
    times = _times(steps)
    if not times:
        return ""
    drawing = stacked_chart("seconds of a step", times)
    return framed_chart("Time of a step", "seconds", drawing, times, kind="areas")


def _distinct(found: Sequence[Series | None]) -> list[Series]:
    """Return the series that exist, without those that are equal to the first."""
    present = [one for one in found if one is not None]
    return [one for i, one in enumerate(present) if i == 0 or one.ys != present[0].ys]


def _card(
    title: str, note: str, series: Sequence[Series], *, smooths: bool = True, kind: str = ""
) -> str:
    if not series:
        return ""
    return framed_chart(title, note, line_chart(title, series, smooths=smooths), series, kind=kind)


def framed_chart(
    title: str,
    note: str,
    drawing: str,
    series: Sequence[Series],
    *,
    kind: str = "",
    colors: Sequence[int] | None = None,
) -> str:
    """Return a drawing with its title, a note and a legend with the last value of each line."""
    names = [f"{one.name} ({short_number(one.ys[-1])})" for one in series]
    below = f"<small>{note}</small>" if note else ""
    return (
        f'<figure class="chart {kind}"><figcaption><b>{inert_markup(title)}</b>{below}'
        f'</figcaption>{drawing}<div class="legend">{legend(names, colors=colors)}</div></figure>'
    )


def _times(steps: Sequence[Mapping[str, Any]]) -> list[Series]:
    timed = []
    for record in steps:
        total = charted_number(record.get("train/compute_time"))
        if total is not None:
            parts = sum(charted_number(record.get(key)) or 0.0 for key in _COMPUTE_PARTS)
            rest = max(0.0, total - parts)
            timed.append({**record, "train/other_compute_time": rest})
    found = [series_of(timed, key, name) for key, name in _TIMES]
    return [one for one in found if one is not None and len(one.xs) == len(timed) and any(one.ys)]


def _table(steps: Sequence[Mapping[str, Any]]) -> str:
    if not steps:
        return ""
    columns = [(key, name) for key, name in _COLUMNS if any(key in record for record in steps)]
    head = "".join(f'<th scope="col">{name}</th>' for _, name in columns)
    first, last = steps[:_ROWS_PER_END], steps[_ROWS_PER_END:][-_ROWS_PER_END:]
    rows = [_row(record, columns) for record in first]
    num_left_out = len(steps) - len(first) - len(last)
    if num_left_out:
        rows.append(f'<tr class="gap"><td colspan="{len(columns)}">{num_left_out} more</td></tr>')
    rows += [_row(record, columns) for record in last]
    return (
        '<section><h2 id="steps">First and last steps</h2><div class="wide" tabindex="0" '
        'role="region" aria-label="First and last steps"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _row(record: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> str:
    return f"<tr>{''.join(f'<td>{_cell(record.get(key))}</td>' for key, _ in columns)}</tr>"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else inert_markup(inert_line(str(value), max_characters=40))
    number = finite_number(value)
    return inert_line(str(value), max_characters=40) if number is None else short_number(number)


def _settings(settings: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    return (
        '<section><h2 id="settings">Settings</h2><p>Settings that differ from their defaults:</p>'
        f"{_pairs(changed)}<details><summary>All {len(settings)} settings</summary>"
        f"{_pairs(settings)}</details></section>"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{inert_markup(str(name))}</th>'
        f"<td>{inert_markup(str(value))}</td></tr>"
        for name, value in values.items()
    )
    return f'<table class="pairs"><tbody>{rows}</tbody></table>'
