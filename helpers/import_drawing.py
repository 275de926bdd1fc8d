"""A drawing of the imports between packages, as SVG: every arrow points down.

    imports ──► implied ones left out ──► rows ──► order within rows ──► SVG

The layout is Sugiyama's: an arrow that passes a row takes a place in it, so that it crosses no
box, and each row is ordered by the mean position of its neighbors.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

__all__ = ["draw_imports"]

Place: TypeAlias = "str | tuple[str, str, int]"
"""A package, or where the arrow between two packages passes a row."""

BOX_WIDTH, BOX_HEIGHT = 150, 30
GAP, PASS_WIDTH = 22, 14
ROW_HEIGHT = 74
SWEEPS = 12


def without_implied(imports: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Leave out imports that follow from others: a to c, where a imports b, and b imports c."""

    def reached(name: str) -> frozenset[str]:
        direct = imports.get(name, frozenset())
        return direct.union(*map(reached, direct))

    return {
        name: targets - frozenset().union(*map(reached, targets))
        for name, targets in imports.items()
    }


def rows_of(names: Iterable[str], imports: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Return the row of each package, 0 at the bottom: one above the highest that it imports."""

    def row(name: str) -> int:
        return 1 + max(map(row, imports.get(name, ())), default=-1)

    return {name: row(name) for name in names}


def paths_of(imports: Mapping[str, frozenset[str]], rows: Mapping[str, int]) -> list[list[Place]]:
    """Return the places of each arrow, from the importer down to what it imports."""
    return [
        [source, *((source, target, i) for i in range(rows[source] - 1, rows[target], -1)), target]
        for source, targets in imports.items()
        for target in sorted(targets)
    ]


def ordered(
    paths: Sequence[Sequence[Place]], rows: Mapping[str, int]
) -> tuple[list[list[Place]], dict[Place, float]]:
    """Return the places of each row in their order, and the x coordinate of their centers."""
    above: dict[Place, list[Place]] = {name: [] for name in rows}
    below: dict[Place, list[Place]] = {name: [] for name in rows}
    layers: list[list[Place]] = [[] for _ in range(1 + max(rows.values()))]
    for name, row in rows.items():
        layers[row].append(name)
    for path in paths:
        for upper, lower in itertools.pairwise(path):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
        for place in path[1:-1]:
            layers[_row(place, rows)].append(place)
    centers: dict[Place, float] = {}
    for layer in layers:
        _spread(layer, centers, {})
    for sweep in range(SWEEPS):
        goes_down = sweep % 2 == 0
        neighbors = above if goes_down else below
        for layer in reversed(layers) if goes_down else layers:
            wanted = {
                place: sum(centers[other] for other in neighbors[place]) / len(neighbors[place])
                for place in layer
                if neighbors.get(place)
            }
            layer.sort(key=lambda place: wanted.get(place, centers[place]))
            _spread(layer, centers, wanted)
    return layers, centers


def _row(place: Place, rows: Mapping[str, int]) -> int:
    return rows[place] if isinstance(place, str) else place[2]


def _spread(
    layer: Sequence[Place], centers: dict[Place, float], wanted: Mapping[Place, float]
) -> None:
    """Put the places of a row beside each other, around the middle of where they are wanted."""
    x, starts = 0.0, []
    for place in layer:
        width = BOX_WIDTH if isinstance(place, str) else PASS_WIDTH
        starts.append(x + width / 2)
        x += width + GAP
    shift = -(x - GAP) / 2
    if wanted:
        off = [wanted[p] - start for p, start in zip(layer, starts, strict=True) if p in wanted]
        shift = sum(off) / len(off)
    for place, start in zip(layer, starts, strict=True):
        centers[place] = start + shift


def draw_imports(imports: Mapping[str, Iterable[str]]) -> str:
    """Return an SVG element with a box for each package, and arrows to what it imports.

    Args:
        imports: The packages that each package imports; it may have no circle.

    Raises:
        RecursionError: there is a circle.
    """
    complete = {name: frozenset(targets) for name, targets in imports.items()}
    names = sorted(complete.keys() | frozenset().union(*complete.values()))
    drawn = without_implied(complete)
    rows = rows_of(names, complete)
    paths = paths_of(drawn, rows)
    layers, centers = ordered(paths, rows)
    left = min(centers.values()) - BOX_WIDTH / 2 - 1
    width = max(centers.values()) + BOX_WIDTH / 2 + 1 - left
    height = ROW_HEIGHT * (len(layers) - 1) + BOX_HEIGHT + 2

    def point(place: Place) -> tuple[float, float]:
        return centers[place] - left, (len(layers) - 1 - _row(place, rows)) * ROW_HEIGHT + 1

    lines = [
        f'<svg class="imports" viewBox="0 0 {width:.0f} {height}" role="img" '
        'aria-label="Imports between packages; the table below has the same">'
    ]
    for path in paths:
        title = f"<title>{html.escape(f'{path[0]} imports {path[-1]}')}</title>"
        lines.append(f'<path d="{_curve([point(place) for place in path])}">{title}</path>')
    for name in names:
        x, y = point(name)
        lines.append(
            f'<g><rect x="{x - BOX_WIDTH / 2:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="4"/>'
            f'<text x="{x:.0f}" y="{y + 20:.0f}">{html.escape(name)}</text></g>'
        )
    return "\n".join([*lines, "</svg>"])


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return the path from the lower edge of the first box to the upper edge of the last."""
    x, y = points[0][0], points[0][1] + BOX_HEIGHT
    parts = [f"M{x:.0f} {y:.0f}"]
    for next_x, next_y in points[1:]:
        middle = (y + next_y) / 2
        parts.append(f"C{x:.0f} {middle:.0f} {next_x:.0f} {middle:.0f} {next_x:.0f} {next_y:.0f}")
        x, y = next_x, next_y + BOX_HEIGHT
        parts.append(f"V{y:.0f}")
    tip = "m-4 -6 l4 6 l4 -6"
    return " ".join([*parts[:-1], tip])
