"""The drawing of imports: rows, arrows that are left out, and positions."""

from __future__ import annotations

import re

from helpers.import_drawing import draw_imports, rows_of, without_implied

IMPORTS = {
    "cli": frozenset({"envs", "utils", "errors", "leaf"}),
    "envs": frozenset({"utils", "errors"}),
    "utils": frozenset({"errors"}),
    "pages": frozenset({"errors"}),
}
DRAWN = {"cli": {"envs", "leaf"}, "envs": {"utils"}, "utils": {"errors"}, "pages": {"errors"}}
NAMES = ["cli", "envs", "errors", "leaf", "pages", "utils"]


def test_imports_that_follow_from_others_are_left_out() -> None:
    assert without_implied(IMPORTS) == DRAWN


def test_a_package_is_above_all_that_it_imports() -> None:
    rows = rows_of(NAMES, IMPORTS)

    assert rows == {"errors": 0, "leaf": 0, "utils": 1, "pages": 1, "envs": 2, "cli": 3}


def test_every_box_is_drawn_once_and_none_overlaps_another() -> None:
    drawing = draw_imports(IMPORTS)

    boxes = re.findall(r'<rect x="(-?\d+)" y="(\d+)" width="(\d+)"', drawing)
    places = {(int(x), int(y)) for x, y, _ in boxes}
    assert len(places) == len(NAMES) == len(boxes)
    assert re.findall(r"<text [^>]+>(\w+)</text>", drawing) == NAMES
    for x, y in places:
        width = int(boxes[0][2])
        assert not [other for other, row in places if row == y and x < other < x + width]


def test_arrows_point_down_and_are_named() -> None:
    drawing = draw_imports(IMPORTS)

    arrows = re.findall(r'<path d="M-?\d+ (\d+)C?.*? V?.*?"><title>(.+?)</title>', drawing)
    expected = {f"{name} imports {each}" for name in NAMES for each in DRAWN.get(name, ())}
    assert {title for _, title in arrows} == expected
    for ways in re.findall(r'<path d="([^"]+) m', drawing):
        heights = [int(y) for y in re.findall(r"(?:^M-?\d+|C\S+ \S+ \S+ \S+ \S+) (\d+)", ways)]
        assert heights == sorted(heights)
        assert len(heights) >= 2
