"""Render the comparison of several runs as one self-contained HTML file; pure.

    records and settings of each run -> charts with one line per run, tables of what differs -> page

A run has one color on the whole page, and all charts have the same steps on their x axis. Names,
paths and settings of runs are escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atroposlib.utils.text import inert_line, inert_markup
from example_trainer.reporting.page import (
    CHARTS,
    NUM_COLORS,
    Chart,
    HeldOut,
    Series,
    framed_chart,
    legend,
    overlay_chart,
    page_around,
    rolling_mean,
    series_of,
    short_number,
    style_of,
)

MAX_RUNS = NUM_COLORS
"""Runs of one page; each has a color of its own."""
PAGE_MARK = '<meta name="generator" content="atropos-report, several runs">'
"""Mark at the start of each such page, by which a file is known to be one."""


class ComparedRun(NamedTuple):
    """One of the runs of the page."""

    label: str
    """Name in legends and tables; that of each run differs."""
    source: str
    """Path of its metrics."""
    lead: str
    """Model, size and duration in one line."""
    steps: Sequence[Mapping[str, Any]]
    """Records of the steps in order."""
    settings: Mapping[str, Any]
    """Settings without secrets; empty if they are not known."""
    environments: Mapping[str, Mapping[str, Any]]
    """Settings of each environment by its name, without secrets."""
    accuracy: Series | None
    """Accuracy logged by the environment."""
    reward_parts: Sequence[Series]
    """Named parts of the reward."""
    held_out: Sequence[HeldOut]
    """Results on held-out problems."""

    def series(self, key: str) -> Series | None:
        """Return a metric by step under the name of the run; None if it was not logged."""
        found = self.accuracy if key == _ACCURACY else series_of(self.steps, key, self.label)
        return None if found is None else found._replace(name=self.label)


_ACCURACY = "accuracy"
"""Key of `ComparedRun.accuracy`; no metric of a trainer has it."""


class _Metric(NamedTuple):
    """A row of the table of values."""

    key: str
    name: str
    goal: Literal["largest", "smallest"] | None = None
    """The better values; None if neither is better by itself."""


_METRICS = (
    _Metric(_ACCURACY, "accuracy", "largest"),
    _Metric("train/reward_mean", "reward", "largest"),
    _Metric("train/loss", "loss"),
    _Metric("sft/loss", "loss of demonstrations", "smallest"),
    _Metric("distill/kl", "KL from the teacher", "smallest"),
    _Metric("train/entropy", "entropy"),
    _Metric("grpo/mean_kl", "KL from the reference"),
    _Metric("alignment/k3", "KL from the sampler", "smallest"),
    _Metric("alignment/diff_abs_mean", "mismatch", "smallest"),
    _Metric("grpo/clipped_fraction", "outside the clip range"),
    _Metric("train/grad_norm", "gradient norm"),
    _Metric("train/staleness_mean", "staleness, steps", "smallest"),
    _Metric("train/truncation_rate", "truncated", "smallest"),
    _Metric("train/tokens_per_s", "tokens/s", "largest"),
    _Metric("train/step_time", "seconds of a step", "smallest"),
)
_ACCURACY_CHART = Chart(
    "Accuracy", "share of right answers, measured by the environment", ((_ACCURACY, ""),)
)
_PART_CHART = Chart("Part of the reward", "mean before its weight", ())
_TIME_CHARTS = (
    Chart("Time of a step", "seconds", (("train/step_time", "time"),)),
    Chart("Wait for a batch", "seconds of a step", (("train/data_fetch_time", "time"),)),
)
"""In place of the stacked areas of one run."""
_END_SHARE = 10
_MAX_WINDOW = 100
_PLACE = re.compile(r"(^|_)(path|dir|folder|port|url)s?(_|$)")
"""Names of settings that differ between runs of the same settings."""
_MAX_SETTING_CHARACTERS = 300
_NOTE = (
    "Pale lines are single steps, strong ones means over the same number of steps for each run; "
    "the last value is in brackets."
)


def make_labels(paths: Sequence[Path]) -> list[str]:
    """Return the last name of each path, with the parents that make it differ from the others.

    Args:
        paths: Different absolute paths.
    """
    return [_label(path, [other for other in paths if other != path]) for path in paths]


def _label(path: Path, others: Sequence[Path]) -> str:
    for size in range(1, len(path.parts)):
        end = path.parts[-size:]
        if all(other.parts[-size:] != end for other in others):
            return "/".join(end)
    return str(path)


def make_comparison_page(runs: Sequence[ComparedRun]) -> str:
    """Return the page of two to `MAX_RUNS` runs, of which each has at least one step."""
    rooms = _rooms(runs)
    xs = [x for room in rooms.values() for one in room for s in one.by_color.values() for x in s.xs]
    x_range = (min(xs), max(xs))
    learning = rooms["Learning"]
    main = ""
    results = [one for one in learning if one.chart in (_ACCURACY_CHART, CHARTS["Learning"][0])]
    if results:  # the first one of those that most runs have
        shown = max(results, key=lambda one: len(one.by_color))
        learning.remove(shown)
        main = _card(shown, x_range, kind="main")
    curves = "".join(
        f'<h3>{heading}</h3><div class="charts">{cards}</div>'
        for heading, room in rooms.items()
        if (cards := "".join(_card(one, x_range) for one in room))
    )
    return page_around(
        [
            f'<div class="hero">{_runs(runs)}{main}</div>',
            _values(runs),
            _differences(runs),
            f'<section><h2 id="curves">Curves</h2><p class="note">{_NOTE}</p>{curves}</section>',
        ],
        title=f"Comparison of {len(runs)} training runs",
        lead=" · ".join(run.label for run in runs),
        head=PAGE_MARK,
        style=style_of("comparison.css"),
    )


def _runs(runs: Sequence[ComparedRun]) -> str:
    rows = "".join(
        f"<li>{legend([run.label], colors=[color])}<small>{inert_markup(run.lead)}</small>"
        f"<small>{inert_markup(run.source)}</small></li>"
        for color, run in enumerate(runs)
    )
    return f'<section><h2 id="runs">Runs</h2><ul class="cards">{rows}</ul></section>'


class _Overlay(NamedTuple):
    """One metric of all runs that have it."""

    chart: Chart
    name: str
    """Name of the metric if the chart has several."""
    by_color: Mapping[int, Series]


def _rooms(runs: Sequence[ComparedRun]) -> dict[str, list[_Overlay]]:
    """Return the metrics that any run has, by their heading."""
    extended = {
        "Learning": (_ACCURACY_CHART, *CHARTS["Learning"]),
        "Batches and speed": (*CHARTS["Batches and speed"], *_TIME_CHARTS),
    }
    rooms = {
        heading: [found for chart in charts for found in _overlays(chart, runs)]
        for heading, charts in {**CHARTS, **extended}.items()
    }
    parts = [{part.name: part for part in run.reward_parts} for run in runs]
    for name in sorted({name for of_run in parts for name in of_run}):
        found = [
            of_run[name]._replace(name=run.label) if name in of_run else None
            for run, of_run in zip(runs, parts, strict=True)
        ]
        rooms["Learning"].append(_Overlay(_PART_CHART, name, _by_color(found)))
    return rooms


def _by_color(found: Iterable[Series | None]) -> dict[int, Series]:
    return {color: one for color, one in enumerate(found) if one is not None}


def _overlays(chart: Chart, runs: Sequence[ComparedRun]) -> Iterator[_Overlay]:
    """Yield each metric of a chart, without copies of its first one."""
    first: Mapping[int, Series] = {}
    for i, (key, name) in enumerate(chart.lines):
        by_color = _by_color(run.series(key) for run in runs)
        if by_color and by_color != first:
            yield _Overlay(chart, name if len(chart.lines) > 1 else "", by_color)
        first = by_color if i == 0 else first


def _card(overlay: _Overlay, x_range: tuple[float, float], *, kind: str = "") -> str:
    chart, name, by_color = overlay
    title = f"{chart.title}: {name}" if name else chart.title
    drawing = overlay_chart(title, by_color, x_range=x_range, smooths=chart.smooths)
    lines, colors = list(by_color.values()), list(by_color)
    return framed_chart(title, chart.note, drawing, lines, kind=kind, colors=colors)


def _values(runs: Sequence[ComparedRun]) -> str:
    rows = [(metric.name, cells) for metric in _METRICS if (cells := _value_cells(metric, runs))]
    results = [{result.name: result for result in run.held_out} for run in runs]
    for name in dict.fromkeys(name for of_run in results for name in of_run):
        rows.append((f"held-out {name}", [_before_and_after(one.get(name)) for one in results]))
    table = _table("First, last and best values", rows, list(enumerate(runs)))
    note = (
        "Mean of the first steps → mean of the last ones, each a tenth of the shortest run, at "
        f"most {_MAX_WINDOW}. Below it, the best mean over that number of steps, and the step at "
        "which it ends. Held-out results are before → after the training."
    )
    return (
        '<section><h2 id="values">First, last and best values</h2>'
        f'<p class="note">{note}</p>{table}</section>'
    )


def _value_cells(metric: _Metric, runs: Sequence[ComparedRun]) -> list[str]:
    """Return a cell for each run; none if no run has the metric."""
    found = [run.series(metric.key) for run in runs]
    lengths = [len(one.ys) for one in found if one is not None]
    if not lengths:
        return []
    window = max(1, min(_MAX_WINDOW, min(lengths) // _END_SHARE))
    return ["not logged" if one is None else _ends(one, window, metric.goal) for one in found]


def _ends(series: Series, window: int, goal: Literal["largest", "smallest"] | None) -> str:
    means = rolling_mean(series.ys, window)[window - 1 :]
    ends = (
        _rounded(means[0]) if len(means) == 1 else f"{_rounded(means[0])} → {_rounded(means[-1])}"
    )
    if goal is None or max(means) == min(means):
        return ends
    best = max(means) if goal == "largest" else min(means)
    step = series.xs[means.index(best) + window - 1]
    return f"{ends}<small>best {_rounded(best)} at {step:.0f}</small>"


def _before_and_after(result: HeldOut | None) -> str:
    if result is None:
        return "not measured"
    after = _rounded(result.after)
    return after if result.before is None else f"{_rounded(result.before)} → {after}"


def _rounded(value: float) -> str:
    return short_number(float(f"{value:.3g}")) if math.isfinite(value) else str(value)


def _differences(runs: Sequence[ComparedRun]) -> str:
    """Return the settings that differ; runs whose settings are not known are left out."""
    known = [
        (color, run._replace(settings={**run.settings, **_of_environments(run, runs)}))
        for color, run in enumerate(runs)
        if run.settings
    ]
    unknown = [run.label for run in runs if not run.settings]
    body = ""
    if len(known) > 1:
        names = dict.fromkeys(name for _, run in known for name in run.settings)
        different = [
            name
            for name in names
            if any(run.settings.get(name) != known[0][1].settings.get(name) for _, run in known)
        ]
        main = [name for name in different if not _PLACE.search(name)]
        places = [name for name in different if _PLACE.search(name)]
        body = f"<p>{len(names) - len(different)} of {len(names)} settings are equal.</p>"
        body += _settings_table(main, known, "Different settings")
        if places:
            body += (
                f"<details><summary>{len(places)} different paths, addresses and ports</summary>"
                f"{_settings_table(places, known, 'Different paths, addresses and ports')}"
                "</details>"
            )
    if unknown:
        listed = inert_markup(", ".join(unknown))
        body += f'<p class="note">Settings were not found next to the metrics of: {listed}.</p>'
    return f'<section><h2 id="differences">Different settings</h2>{body}</section>'


def _of_environments(run: ComparedRun, runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the settings of environments that all runs have, under names as of their flags."""
    return {
        f"env.{name}" if environment == "environment" else f"{environment}: env.{name}": value
        for environment, settings in run.environments.items()
        for name, value in settings.items()
        if all(name in other.environments.get(environment, {}) for other in runs)
    }


def _settings_table(
    names: Sequence[str], known: Sequence[tuple[int, ComparedRun]], label: str
) -> str:
    rows = [(name, [_setting(run.settings, name) for _, run in known]) for name in names]
    return _table(label, rows, known) if rows else ""


def _table(
    label: str,
    rows: Sequence[tuple[str, Sequence[str]]],
    runs: Sequence[tuple[int, ComparedRun]],
) -> str:
    """Return a table with one column for each run.

    Args:
        label: Name of the table.
        rows: Name and HTML of the cells of each row.
        runs: Color of each run, and the run.
    """
    head = "".join(
        f'<th scope="col">{legend([run.label], colors=[color])}</th>' for color, run in runs
    )
    body = "".join(
        f'<tr><th scope="row">{inert_markup(name)}</th>'
        f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table class="runs">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _setting(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "not set"
    text = str(settings[name])
    return inert_markup(inert_line(text, max_characters=_MAX_SETTING_CHARACTERS))
