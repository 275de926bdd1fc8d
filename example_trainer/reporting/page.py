"""Render the report of a run as one self-contained HTML file; pure.

    JSONL lines -> records, one per step -> series, smoothed and thinned out -> SVG -> page

The page has no scripts and makes no requests. Its style supports light and dark mode and printing;
colors are classes (`c0` ... `c5`). All text of a run (settings, names, metrics) is escaped.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.utils.text import inert_line, inert_markup


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
    size = -(-len(series.xs) // max_points)
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
        except (ValueError, KeyError, TypeError):
            num_unreadable += 1
            continue
        if STEP_SIGN not in record:
            continue
        if first is None or step <= first:
            by_step, first = {}, step
        by_step[step] = record
    return RunRecords([by_step[step] for step in sorted(by_step)], num_unreadable)


def series_of(steps: Sequence[Mapping[str, Any]], key: str, name: str) -> Series | None:
    """Return the finite values of a metric by step; None without any."""
    points = [
        (float(record["step"]), float(record[key]))
        for record in steps
        if isinstance(record.get(key), int | float) and math.isfinite(record[key])
    ]
    if not points:
        return None
    return Series(name, [x for x, _ in points], [y for _, y in points])


NUM_COLORS = 6
_WIDTH, _HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 34
_MAX_POINTS = 400
_SMOOTHED_FROM = 24


class _Frame:
    """Coordinates and axes of a chart."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._x_low, self._x_high = min(xs), max(xs)
        self._y_ticks = round_ticks(min(ys), max(ys))

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
                f'y2="{y:.1f}"/><text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" '
                f'text-anchor="end">{short_number(tick)}</text>'
            )
        for tick in self._x_ticks():
            parts.append(
                f'<text class="tick" x="{self.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 15}" '
                f'text-anchor="middle">{short_number(tick)}</text>'
            )
        parts.append(
            f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" '
            'text-anchor="middle">step</text>'
        )
        return "".join(parts)

    def _x_ticks(self) -> list[float]:
        if self._x_low == self._x_high:
            return [self._x_low]
        inside = [
            tick
            for tick in round_ticks(self._x_low, self._x_high, most=8)
            if self._x_low <= tick <= self._x_high and tick == int(tick)
        ]
        return inside or [self._x_low, self._x_high]


def line_chart(title: str, series: Sequence[Series], *, smooths: bool = True) -> str:
    """Draw at least one line; if `smooths`, long ones are pale, with their rolling mean on top."""
    thinned = [thin_out(one, max_points=_MAX_POINTS) for one in series]
    frame = _Frame([x for one in thinned for x in one.xs], [y for one in thinned for y in one.ys])
    drawn = [
        _line(one, frame, f"c{i % NUM_COLORS}", smooths=smooths) for i, one in enumerate(thinned)
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


def legend(names: Sequence[str]) -> str:
    """Return the legend of a chart as HTML: each series with its color."""
    return "".join(
        f'<span class="key"><i class="c{i % NUM_COLORS}"></i>{inert_markup(name)}</span>'
        for i, name in enumerate(names)
    )


def _line(series: Series, frame: _Frame, color: str, *, smooths: bool) -> str:
    if len(series.xs) == 1:
        x, y = frame.x(series.xs[0]), frame.y(series.ys[0])
        return f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if not smooths or len(series.xs) < _SMOOTHED_FROM:
        return _polyline(series.xs, series.ys, frame, f"line {color}")
    means = rolling_mean(series.ys, len(series.ys) // 12)
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


STYLE = """
:root{color-scheme:light dark;--ground:#fff;--text:#1c2126;--dim:#5d6872;--edge:#d9dee3;
--warn:#fff4d6;--warn-edge:#d9a400;--good:#e7f5ea;--good-edge:#4b9b5f;
--c0:#1f6fb2;--c1:#c4501b;--c2:#2d8a4e;--c3:#8b4fb0;--c4:#a8841a;--c5:#5b6670}
@media (prefers-color-scheme:dark){:root{--ground:#16191d;--text:#e4e8ec;--dim:#9aa5af;
--edge:#333a41;--warn:#3a3112;--warn-edge:#b98e1a;--good:#17301e;--good-edge:#4b9b5f;
--c0:#6cb2ec;--c1:#f08a58;--c2:#66c487;--c3:#c08fe0;--c4:#d9b84a;--c5:#a4afb8}}
body{margin:0;background:var(--ground);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:1.5rem}
h1{font-size:1.5rem;margin:0 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:1.5rem 0 .5rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:.6rem;margin:0}
.facts div{border:1px solid var(--edge);border-radius:6px;padding:.5rem .7rem}
dt{color:var(--dim);font-size:.8rem}dd{margin:0;font-size:1rem;font-weight:600;
overflow-wrap:anywhere}
.held-out{border:1px solid var(--edge);border-radius:6px;padding:.6rem 1rem;margin:0 0 1rem}
.held-out h2{margin:0}.held-out ul{margin:.3rem 0 0;padding-left:1.2rem;font-size:1.1rem;
font-weight:600;overflow-wrap:anywhere}
.meanings{display:grid;grid-template-columns:max-content 1fr;gap:.2rem .9rem;margin:0}
.meanings dt{font-size:.9rem}.meanings dd{font-size:.9rem;font-weight:400}
.warn,.good{border-left:4px solid var(--good-edge);background:var(--good);padding:.6rem 1rem;
margin:1rem 0;border-radius:0 6px 6px 0}
.warn{border-color:var(--warn-edge);background:var(--warn)}
.warn h2{margin:0}.warn ul{margin:.3rem 0;padding-left:1.2rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:1rem;
margin-top:1rem}
figure{margin:0;border:1px solid var(--edge);border-radius:6px;padding:.6rem;break-inside:avoid}
figcaption small,.note{color:var(--dim)}
svg{width:100%;height:auto;display:block;margin-top:.3rem}
.grid{stroke:var(--edge);stroke-width:1}.tick{fill:var(--dim);font-size:13px}
.line{fill:none;stroke:var(--colour);stroke-width:1.8;stroke-linejoin:round}
.pale{opacity:.3;stroke-width:1}.area{fill:var(--colour);opacity:.75}.dot{fill:var(--colour)}
.c0{--colour:var(--c0)}.c1{--colour:var(--c1)}.c2{--colour:var(--c2)}.c3{--colour:var(--c3)}
.c4{--colour:var(--c4)}.c5{--colour:var(--c5)}
.legend{font-size:.8rem;display:flex;flex-wrap:wrap;gap:.2rem .9rem}
.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em;
background:var(--colour)}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}
.pairs th,.pairs td{text-align:left;font-weight:400;white-space:normal;overflow-wrap:anywhere}
.pairs th{color:var(--dim);white-space:nowrap}
.gap td{text-align:center;color:var(--dim)}
details{margin-top:.8rem}summary{cursor:pointer}
@media print{main{max-width:none;padding:0}.charts{grid-template-columns:1fr 1fr}}
""".replace("\n", "")


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


CHARTS = (
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
        (("train/loss", "total"), ("grpo/policy_loss", "policy"), ("sft/loss", "demonstrations"),
         ("distill/loss", "distillation")),
    ),
    Chart(
        "KL divergence",
        "in nats per token; k3 estimates, for the teacher over its top tokens",
        (("alignment/k3", "from the sampler"), ("grpo/mean_kl", "from the reference"),
         ("distill/kl", "from the teacher")),
    ),
    Chart(
        "Entropy",
        "nats per token; near 0, the policy has stopped exploring",
        (("train/entropy", "of the policy"), ("train/entropy_estimate", "estimated by samples")),
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
    Chart("Gradient norm", "before it is clipped", (("train/grad_norm", "norm"),)),
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
    Chart("Learning rate", "", (("train/lr", "learning rate"),), smooths=False),
    Chart(
        "Device memory",
        "GiB",
        (("train/gpu_memory_gb", "in use"), ("train/gpu_memory_reserved_gb", "reserved")),
        smooths=False,
    ),
)  # fmt: skip

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
) -> str:
    """Return the page of a run.

    Args:
        steps: Records of the steps in order.
        title: Heading of the page.
        facts: Numbers at the top.
        findings: Sentences about possible problems.
        settings: Settings of the run, without secrets.
        changed: Those settings that are not at their defaults.
        accuracy: Accuracy logged by the environment.
        reward_parts: Named parts of the reward.
        held_out: Results on held-out problems, shown first.
        notes: Sentences about the page itself.
    """
    parts = [
        f"<h1>{inert_markup(title)}</h1>",
        _held_out(held_out),
        _facts(facts),
        _findings(findings, has_steps=bool(steps)),
        _meanings(steps, accuracy, reward_parts, held_out),
        _charts(steps, accuracy, reward_parts),
        _table(steps),
        _settings(settings, changed),
        "".join(f'<p class="note">{inert_markup(note)}</p>' for note in notes),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{inert_markup(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def _held_out(results: Sequence[HeldOut]) -> str:
    if not results:
        return ""
    rows = "".join(f"<li>{inert_markup(_sentence(result))}</li>" for result in results)
    return f'<section class="held-out"><h2>Held-out result</h2><ul>{rows}</ul></section>'


def _sentence(result: HeldOut) -> str:
    """Return `share of right answers: 0.12 before, 0.47 after (+0.35), 100 problems`."""
    after = short_number(float(f"{result.after:.3g}"))
    problems = "" if result.num_problems is None else f", {result.num_problems} problems"
    if result.before is None:
        return f"{result.name}: {after} after the training{problems}"
    before = short_number(float(f"{result.before:.3g}"))
    change = f"{result.after - result.before:+.3g}"
    return f"{result.name}: {before} before, {after} after ({change}){problems}"


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
    return (
        f'<section><h2>What the rewards are</h2><dl class="meanings">{rows}</dl></section>'
        if rows
        else ""
    )


def _facts(facts: Sequence[Fact]) -> str:
    tiles = "".join(
        f"<div><dt>{inert_markup(fact.name)}</dt><dd>{inert_markup(fact.value)}</dd></div>"
        for fact in facts
    )
    return f'<dl class="facts">{tiles}</dl>'


def _findings(findings: Sequence[str], *, has_steps: bool) -> str:
    if not has_steps:
        return '<p class="warn">No step was logged.</p>'
    if not findings:
        return '<p class="good">No findings in the metrics.</p>'
    rows = "".join(f"<li>{inert_markup(text)}</li>" for text in findings)
    return f'<section class="warn"><h2>Worth checking</h2><ul>{rows}</ul></section>'


def _charts(
    steps: Sequence[Mapping[str, Any]], accuracy: Series | None, reward_parts: Sequence[Series]
) -> str:
    cards = [
        _card("Accuracy", "measured by the environment", [accuracy]) if accuracy is not None else ""
    ]
    cards.append(_card("Parts of the reward", "means before their weights", reward_parts))
    for chart in CHARTS:
        found = [series_of(steps, key, name) for key, name in chart.lines]
        cards.append(_card(chart.title, chart.note, _distinct(found), smooths=chart.smooths))
    times = _times(steps)
    if times:
        drawing = stacked_chart("seconds of a step", times)
        cards.append(_framed("Time of a step", "seconds", drawing, times))
    return f'<section class="charts">{"".join(cards)}</section>' if any(cards) else ""


def _distinct(found: Sequence[Series | None]) -> list[Series]:
    """Return the series that exist, without those that are equal to the first."""
    present = [one for one in found if one is not None]
    return [one for i, one in enumerate(present) if i == 0 or one.ys != present[0].ys]


def _card(title: str, note: str, series: Sequence[Series], *, smooths: bool = True) -> str:
    if not series:
        return ""
    return _framed(title, note, line_chart(title, series, smooths=smooths), series)


def _framed(title: str, note: str, drawing: str, series: Sequence[Series]) -> str:
    names = [f"{one.name} ({short_number(one.ys[-1])})" for one in series]
    return (
        f"<figure><figcaption><b>{title}</b> <small>{note}</small></figcaption>{drawing}"
        f'<div class="legend">{legend(names)}</div></figure>'
    )


def _times(steps: Sequence[Mapping[str, Any]]) -> list[Series]:
    timed = []
    for record in steps:
        if isinstance(record.get("train/compute_time"), int | float):
            parts = sum(float(record.get(key) or 0.0) for key in _COMPUTE_PARTS)
            rest = max(0.0, float(record["train/compute_time"]) - parts)
            timed.append({**record, "train/other_compute_time": rest})
    found = [series_of(timed, key, name) for key, name in _TIMES]
    return [one for one in found if one is not None and len(one.xs) == len(timed) and any(one.ys)]


def _table(steps: Sequence[Mapping[str, Any]]) -> str:
    if not steps:
        return ""
    columns = [(key, name) for key, name in _COLUMNS if any(key in record for record in steps)]
    head = "".join(f"<th>{name}</th>" for _, name in columns)
    first, last = steps[:_ROWS_PER_END], steps[_ROWS_PER_END:][-_ROWS_PER_END:]
    rows = [_row(record, columns) for record in first]
    num_left_out = len(steps) - len(first) - len(last)
    if num_left_out:
        rows.append(f'<tr class="gap"><td colspan="{len(columns)}">{num_left_out} more</td></tr>')
    rows += [_row(record, columns) for record in last]
    return (
        '<section><h2>First and last steps</h2><div class="wide"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _row(record: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> str:
    return f"<tr>{''.join(f'<td>{_cell(record.get(key))}</td>' for key, _ in columns)}</tr>"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else inert_markup(inert_line(str(value), max_characters=40))
    return short_number(float(value))


def _settings(settings: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    return (
        "<section><h2>Settings</h2><p>Settings that differ from their defaults:</p>"
        f"{_pairs(changed)}<details><summary>All {len(settings)} settings</summary>"
        f"{_pairs(settings)}</details></section>"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{inert_markup(str(name))}</th><td>{inert_markup(str(value))}</td></tr>"
        for name, value in values.items()
    )
    return f'<div class="wide"><table class="pairs"><tbody>{rows}</tbody></table></div>'
