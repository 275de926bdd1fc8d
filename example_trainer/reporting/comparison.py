"""Render the comparison of several runs as one self-contained HTML file; pure.

    records and settings of each run -> charts with one line per run, tables of what differs -> page

A run has one color on the whole page, and all charts have the same steps on their x axis. Names,
paths and settings of runs are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atroposlib.utils.text import inert_line, inert_markup
from example_trainer.reporting.page import (
    CHARTS,
    NUM_COLORS,
    Chart,
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


class _Metric(NamedTuple):
    """A row of the table of values."""

    key: str
    name: str
    goal: Literal["largest", "smallest"] | None = None
    """The better values; None if neither is better by itself."""


_METRICS = (
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
    """Return the last name of each path, with as many parents as make it differ from the others.

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
    ends = [run.steps[end]["step"] for run in runs for end in (0, -1)]
    x_range = (float(min(ends)), float(max(ends)))
    main, rooms = _cards(runs, x_range)
    return page_around(
        [
            f'<div class="hero">{_runs(runs)}{main}</div>',
            _values(runs),
            _differences(runs),
            f'<section><h2 id="curves">Curves</h2><p class="note">{_NOTE}</p>'
            f"{''.join(rooms)}</section>",
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


def _cards(runs: Sequence[ComparedRun], x_range: tuple[float, float]) -> tuple[str, list[str]]:
    """Return the chart at the top of the page, and the others under their headings."""
    main = ""
    rooms = []
    for heading, charts in CHARTS.items():
        more = _TIME_CHARTS if heading == "Batches and speed" else ()
        found = [
            (chart, *overlay) for chart in (*charts, *more) for overlay in _overlays(chart, runs)
        ]
        if found and found[0][0] is CHARTS["Learning"][0]:
            main = _card(*found.pop(0), x_range, kind="main")
        if found:
            cards = "".join(_card(*one, x_range) for one in found)
            rooms.append(f'<h3>{heading}</h3><div class="charts">{cards}</div>')
    return main, rooms


def _overlays(
    chart: Chart, runs: Sequence[ComparedRun]
) -> Iterator[tuple[str, Mapping[int, Series]]]:
    """Yield the name and the lines of each metric of a chart, without copies of its first one.

    The name of a chart's only metric is empty.
    """
    first: Mapping[int, Series] = {}
    for i, (key, name) in enumerate(chart.lines):
        found = {color: series_of(run.steps, key, run.label) for color, run in enumerate(runs)}
        by_color = {color: one for color, one in found.items() if one is not None}
        if by_color and by_color != first:
            yield name if len(chart.lines) > 1 else "", by_color
        first = by_color if i == 0 else first


def _card(
    chart: Chart,
    name: str,
    by_color: Mapping[int, Series],
    x_range: tuple[float, float],
    *,
    kind: str = "",
) -> str:
    title = f"{chart.title}: {name}" if name else chart.title
    drawing = overlay_chart(title, by_color, x_range=x_range, smooths=chart.smooths)
    lines, colors = list(by_color.values()), list(by_color)
    return framed_chart(title, chart.note, drawing, lines, kind=kind, colors=colors)


def _values(runs: Sequence[ComparedRun]) -> str:
    table = _table(
        "First, last and best values",
        [(metric.name, cells) for metric in _METRICS if (cells := _value_cells(metric, runs))],
        list(enumerate(runs)),
    )
    note = (
        "Mean of the first steps → mean of the last ones, each a tenth of the shortest run, at "
        f"most {_MAX_WINDOW}. Below it, the best mean over that number of steps, and the step at "
        "which it ends."
    )
    return (
        '<section><h2 id="values">First, last and best values</h2>'
        f'<p class="note">{note}</p>{table}</section>'
    )


def _value_cells(metric: _Metric, runs: Sequence[ComparedRun]) -> list[str]:
    """Return a cell for each run; none if no run has the metric."""
    found = [series_of(run.steps, metric.key, run.label) for run in runs]
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


def _rounded(value: float) -> str:
    return short_number(float(f"{value:.3g}"))


def _differences(runs: Sequence[ComparedRun]) -> str:
    """Return the settings that differ; runs whose settings are not known are left out."""
    known = [(color, run) for color, run in enumerate(runs) if run.settings]
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
