"""Draw the sample data of the environments in this folder: small images and their rows.

python -m environments.multimodal_dpo.draw_samples [FOLDER]     default: environments/data
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.tasks.images import require_pillow

__all__ = ["draw_samples"]

DATA = Path(__file__).resolve().parent.parent / "data"
SIZE = 144
NUM_ROWS = 8
COLOURS = {"red": (200, 40, 40), "green": (40, 140, 60), "blue": (50, 80, 200)}
SHAPES = ("circle", "square", "triangle")
PAPER = (245, 243, 238)
INK = (40, 40, 40)
BOOKS = [
    ("Rivers of Clay", "Ada Moor"),
    ("The Quiet Engine", "Tom Reed"),
    ("Salt and Snow", "Nora Falk"),
    ("Counting Stars", "Omar Lind"),
    ("A Small Harbour", "Eva Stone"),
    ("Maps of Wind", "Jon Birch"),
    ("Night Gardens", "Lea Lane"),
    ("Seven Bridges", "Max Field"),
]

Drawn = tuple[Any, dict[str, Any]]
"""An image and its columns."""


def draw_samples(folder: Path) -> None:
    """Write `<name>_sample/train.jsonl` and its PNG files for each environment."""
    makers: dict[str, tuple[str, Callable[[int, random.Random], Drawn]]] = {
        "clevr_cogen_a_train": ("image", counted_scene),
        "clevr_complex": ("image", compared_scene),
        "ocr_vqa": ("image", book_cover),
        "pixmo_clocks": ("image", clock),
        "pixmo_count": ("image_url", labelled_scene),
        "pixmo_point_explanations": ("image_url", explained_scene),
    }
    for name, (column, make) in makers.items():
        target = folder / f"{name}_sample"
        target.mkdir(parents=True, exist_ok=True)
        lines = []
        for i in range(NUM_ROWS):
            picture, columns = make(i, random.Random(f"{name} {i}"))
            file_name = f"{i}.png"
            picture.quantize(16).save(target / file_name, optimize=True)
            lines.append(json.dumps({column: file_name, **columns}) + "\n")
        (target / "train.jsonl").write_text("".join(lines), encoding="utf-8")


def counted_scene(index: int, rng: random.Random) -> Drawn:
    """Return a scene and the number of its objects."""
    picture, things = scene(2 + index % 6, rng)
    solution = f"<answer> {len(things)} </answer>"
    return picture, {"problem": "How many things are there?", "solution": solution}


def compared_scene(index: int, rng: random.Random) -> Drawn:
    """Return a scene and a question of two steps."""
    picture, things = scene(3 + index % 4, rng)
    counts = Counter(shape for _, shape in things)
    if index % 2:
        number = counts["circle"] + counts["square"]
        problem = "How many things are circles or squares?"
        return picture, {"problem": problem, "solution": f"<answer> {number} </answer>"}
    answer = "yes" if counts["circle"] > counts["square"] else "no"
    problem = "Are there more circles than squares?"
    return picture, {"problem": problem, "solution": f"<answer> {answer} </answer>"}


def labelled_scene(index: int, rng: random.Random) -> Drawn:
    """Return a scene and the number of its objects of one shape."""
    picture, things = scene(3 + index % 5, rng)
    shape = things[0][1]
    return picture, {"label": f"{shape}s", "count": sum(kind == shape for _, kind in things)}


def explained_scene(index: int, rng: random.Random) -> Drawn:
    """Return a scene of one object and its color or shape."""
    picture, [(colour, shape)] = scene(1, rng)
    if index % 2:
        return picture, {"question": f"What colour is the {shape}?", "inline_text": [colour]}
    return picture, {"question": f"Which shape is {colour}?", "inline_text": [shape]}


def book_cover(index: int, _: random.Random) -> Drawn:
    """Return a book cover and questions about its text."""
    title, author = BOOKS[index]
    picture, pen = canvas()
    colour = list(COLOURS.values())[index % len(COLOURS)]
    pen.rectangle((12, 6, SIZE - 12, SIZE - 6), fill=colour)
    for y, text in ((40, title), (104, author)):
        pen.text((SIZE / 2, y), text, fill=PAPER, anchor="mm", font_size=13)
    questions = ["What is the title of this book?", "Who wrote this book?"]
    answers = [title, author]
    turn = index % 2
    return picture, {"questions": questions[turn:], "answers": answers[turn:]}


def clock(index: int, rng: random.Random) -> Drawn:
    """Return a clock face and its time."""
    hour, minute = 1 + (index * 5) % 12, rng.randrange(0, 60, 5)
    picture, pen = canvas()
    centre = SIZE / 2
    pen.ellipse((6, 6, SIZE - 6, SIZE - 6), outline=INK, width=3)
    for number in range(1, 13):
        pen.text(at(number / 12, 54), str(number), fill=INK, anchor="mm", font_size=12)
    pen.line((centre, centre, *at((hour + minute / 60) / 12, 28)), fill=INK, width=5)
    pen.line((centre, centre, *at(minute / 60, 44)), fill=COLOURS["red"], width=3)
    return picture, {"hour": hour, "minute": minute}


def at(turn: float, radius: float) -> tuple[float, float]:
    """Return the point of a dial at a fraction of a turn, clockwise from the top."""
    angle = 2 * math.pi * turn
    return SIZE / 2 + radius * math.sin(angle), SIZE / 2 - radius * math.cos(angle)


def scene(num_things: int, rng: random.Random) -> tuple[Any, list[tuple[str, str]]]:
    """Return an image of objects that do not touch, and color and shape of each."""
    picture, pen = canvas()
    cell = SIZE // 3
    things = []
    for place in rng.sample(range(9), num_things):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        left, top = place % 3 * cell + 10, place // 3 * cell + 10
        right, bottom = left + cell - 20, top + cell - 20
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        else:
            corners = [((left + right) / 2, top), (right, bottom), (left, bottom)]
            pen.polygon(corners, fill=COLOURS[colour])
        things.append((colour, shape))
    return picture, things


def canvas() -> tuple[Any, Any]:
    """Return an empty image and a drawing object for it."""
    picture = require_pillow().new("RGB", (SIZE, SIZE), PAPER)
    from PIL import ImageDraw

    return picture, ImageDraw.Draw(picture)


if __name__ == "__main__":
    draw_samples(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
