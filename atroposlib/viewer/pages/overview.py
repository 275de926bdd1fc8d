"""The overview: what the run is doing, and what its scores look like; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atroposlib.viewer.pages.markup import (
    empty,
    figure,
    folded,
    notice,
    number,
    shown,
    sparkline,
    table,
)
from atroposlib.viewer.sources.base import Problems, ServiceFigures

__all__ = ["overview_page"]

_BARS = 10
_SHOWN_PROBLEMS = 100


def overview_page(
    figures: ServiceFigures,
    problems: Problems,
    scores: Mapping[str, Sequence[float]],
    *,
    rewards: Mapping[str, Sequence[tuple[int, float]]],
    num_groups: int,
    num_equal: int,
    metric_drops: Mapping[str, float],
) -> str:
    """Return the page.

    Args:
        figures: what the run tells of itself.
        problems: what could not be read.
        scores: of the latest groups, by the name of their environment.
        rewards: (step, mean score) by the name of their environment, steps ascending.
        num_groups: groups listed here.
        num_equal: of them, those whose scores are all equal.
        metric_drops: groups that environments dropped, by reason.
    """
    parts = [notice(text) for text in figures.notes]
    if not num_groups and figures.why_empty:
        parts.append(empty(f"No groups yet. {figures.why_empty}"))
    tiles = [figure("groups here", number(num_groups))]
    if num_groups:
        tiles.append(figure("scores all equal", f"{num_equal / num_groups:.0%} of groups"))
    tiles += [
        figure(name, value if isinstance(value, str) else number(value), sparkline(history))
        for name, value in figures.current.items()
        for history in [figures.history.get(name, [])]
    ]
    tiles += [
        figure(name, number(_recent(rates)), sparkline(rates))
        for name, rates in figures.per_second.items()
        if rates
    ]
    parts.append(f'<div class="v-figures">{"".join(tiles)}</div>')
    parts.append(_rewards(rewards))
    parts.append("<h3>Scores by environment</h3>" + _distributions(scores))
    parts.append("<h3>Dropped or refused, by reason</h3>" + _drops(figures, metric_drops))
    if problems.count:
        parts.append(_problems(problems))
    return "".join(parts)


def _rewards(rewards: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw the mean score over the steps, one line per environment; nothing without two steps."""
    drawn = [(name, points) for name, points in rewards.items() if len(points) > 1]
    if not drawn:
        return ""
    tiles = "".join(
        figure(
            f"{name or 'not named'}, step {points[0][0]:,} to {points[-1][0]:,}",
            f"{number(points[0][1])} → {number(points[-1][1])}",
            sparkline([reward for _, reward in points]),
        )
        for name, points in drawn
    )
    return f'<h3>Reward over steps</h3><div class="v-figures v-rewards">{tiles}</div>'


def _recent(rates: Sequence[float]) -> float:
    latest = rates[-5:]
    return sum(latest) / len(latest)


def _distributions(scores: Mapping[str, Sequence[float]]) -> str:
    if not any(scores.values()):
        return empty("No scores yet: they appear as groups are read.")
    rows = [_distribution(name, values) for name, values in scores.items() if values]
    return table(("environment", "scores", "mean", "lowest", "highest", "distribution"), rows)


def _distribution(name: str, values: Sequence[float]) -> tuple[str, ...]:
    low, high = min(values), max(values)
    counts = [0] * _BARS
    for value in values:
        place = int((value - low) / (high - low) * _BARS) if high > low else 0
        counts[min(place, _BARS - 1)] += 1
    most = max(counts)
    bars = "".join(
        f'<i style="height:{max(1, round(28 * count / most)) if count else 0}px" '
        f'title="{number(low + (high - low) * i / _BARS)} to '
        f'{number(low + (high - low) * (i + 1) / _BARS)}: {count:,}"></i>'
        for i, count in enumerate(counts)
    )
    return (
        shown(name or "not named"),
        f"{len(values):,}",
        number(sum(values) / len(values)),
        number(low),
        number(high),
        f'<span class="v-bars">{bars}</span>',
    )


def _drops(figures: ServiceFigures, metric_drops: Mapping[str, float]) -> str:
    rows = [
        (shown(reason), "the service", number(count)) for reason, count in figures.drops.items()
    ]
    rows += [(shown(reason), "environments", number(n)) for reason, n in metric_drops.items()]
    if not rows:
        return empty(
            "None known. What environments drop stands in the metrics files they write: "
            "name their folder with --metrics."
        )
    return table(("reason", "told by", "count"), rows)


def _problems(problems: Problems) -> str:
    lines = "".join(f"<li>{shown(text)}</li>" for text in problems.messages[:_SHOWN_PROBLEMS])
    title = f"{problems.count:,} could not be read; the rest is used"
    return folded(title, f"<ul>{lines}</ul>", is_open=True, kind="v-bad")
