"""Charts as SVG text, without a plotting library: lines, and stacked areas; pure.

Colours are classes (`c0` ... `c5`), so that the page decides them for light and dark ground.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from atroposlib.utils.text import inert_markup
from example_trainer.reporting.series import (
    Series,
    rolling_mean,
    round_ticks,
    short_number,
    thin_out,
)

__all__ = ["NUM_COLOURS", "legend", "line_chart", "stacked_chart"]

NUM_COLOURS = 6
_WIDTH, _HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 34
_MAX_POINTS = 400
_SMOOTHED_FROM = 24


class _Frame:
    """Where numbers lie on the chart, and its axes."""

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
    """Draw lines; longer ones pale, with their rolling mean on top.

    Args:
        title: said to who cannot see the chart.
        series: at least one, each with at least one point.
        smooths: False draws them as they are.
    """
    thinned = [thin_out(one, max_points=_MAX_POINTS) for one in series]
    frame = _Frame([x for one in thinned for x in one.xs], [y for one in thinned for y in one.ys])
    drawn = [
        _line(one, frame, f"c{i % NUM_COLOURS}", smooths=smooths) for i, one in enumerate(thinned)
    ]
    return _svg(title, frame.axes() + "".join(drawn))


def stacked_chart(title: str, series: Sequence[Series]) -> str:
    """Draw shares on top of each other, the first at the bottom.

    Args:
        title: said to who cannot see the chart.
        series: at least one, all over the same steps, none below 0.
    """
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
        areas.append(f'<polygon class="area c{i % NUM_COLOURS}" points="{points}"/>')
    return _svg(title, "".join(areas) + frame.axes())


def legend(names: Sequence[str]) -> str:
    """Return the legend of a chart as HTML: each series with its color."""
    return "".join(
        f'<span class="key"><i class="c{i % NUM_COLOURS}"></i>{inert_markup(name)}</span>'
        for i, name in enumerate(names)
    )


def _line(series: Series, frame: _Frame, colour: str, *, smooths: bool) -> str:
    if len(series.xs) == 1:
        x, y = frame.x(series.xs[0]), frame.y(series.ys[0])
        return f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if not smooths or len(series.xs) < _SMOOTHED_FROM:
        return _polyline(series.xs, series.ys, frame, f"line {colour}")
    means = rolling_mean(series.ys, len(series.ys) // 12)
    return _polyline(series.xs, series.ys, frame, f"line pale {colour}") + _polyline(
        series.xs, means, frame, f"line {colour}"
    )


def _polyline(xs: Sequence[float], ys: Sequence[float], frame: _Frame, classes: str) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline class="{classes}" points="{points}"/>'


def _svg(title: str, content: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{inert_markup(title)}">'
        f"{content}</svg>"
    )
