"""Crossword boards: words laid across each other, from a seed. Pure.

    words, seed -> first word -> further words, each through a letter that lies there -> Board

Every run of two or more letters, across or down, is one of the words; no two entries are alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atroposlib.errors import ConfigError
from environments.shared.games import Difficulty

__all__ = ["LEVELS", "Board", "Cell", "Direction", "Entry", "Level", "make_board"]

Direction = Literal["Across", "Down"]
NUM_ATTEMPTS = 50


class Cell(NamedTuple):
    """A place on the board."""

    row: int
    column: int

    def along(self, direction: Direction, steps: int) -> Cell:
        """Return the place some steps further; backwards when negative."""
        if direction == "Across":
            return Cell(self.row, self.column + steps)
        return Cell(self.row + steps, self.column)


class Level(NamedTuple):
    """How large a board is."""

    num_words: int
    side: int
    """Most rows, and most columns."""


LEVELS: Mapping[Difficulty, Level] = {
    "easy": Level(3, side=7),
    "medium": Level(6, side=9),
    "hard": Level(10, side=12),
}


@dataclass(frozen=True)
class Entry:
    """A word on the board and its clue."""

    number: int
    direction: Direction
    start: Cell
    word: str
    clue: str

    @property
    def name(self) -> str:
        """As players write it: `1-Across`."""
        return f"{self.number}-{self.direction}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Where the letters lie, in order."""
        return tuple(self.start.along(self.direction, i) for i in range(len(self.word)))


@dataclass(frozen=True)
class Board:
    """A finished crossword."""

    num_rows: int
    num_columns: int
    entries: tuple[Entry, ...]
    """By number, Across before Down."""

    @property
    def letters(self) -> dict[Cell, str]:
        """The letter of every cell that has one."""
        return {
            cell: letter
            for entry in self.entries
            for cell, letter in zip(entry.cells, entry.word, strict=True)
        }


def make_board(clues: Mapping[str, str], level: Level, *, seed: int) -> Board:
    """Return the board of a seed, the same for the same words.

    Args:
        clues: word to clue.
        level: size of the board.
        seed: of the choice of words and places.

    Raises:
        ConfigError: the words do not cross often enough.
    """
    source = random.Random(seed)
    words = sorted(word for word in clues if len(word) <= level.side)
    for _ in range(NUM_ATTEMPTS):
        source.shuffle(words)
        layout = _Layout(level.side)
        for word in words:
            if len(layout.placed) < level.num_words:
                layout.place(word)
        if len(layout.placed) == level.num_words:
            return _numbered(layout, clues)
    raise ConfigError(
        f"no board of {level.num_words} words on {level.side} rows and columns was found among "
        f"{len(words)} words; a longer word list has more crossings"
    )


class _Layout:
    """Words laid so far."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.letters: dict[Cell, str] = {}
        self.placed: list[tuple[str, Cell, Direction]] = []

    def place(self, word: str) -> None:
        """Lay a word at the first place where it fits, if there is one."""
        for start, direction in self._places(word):
            if self._fits(word, start, direction):
                self.placed.append((word, start, direction))
                for i, letter in enumerate(word):
                    self.letters[start.along(direction, i)] = letter
                return

    def _places(self, word: str) -> Iterator[tuple[Cell, Direction]]:
        if not self.placed:
            yield Cell(self.side // 2, (self.side - len(word)) // 2), "Across"
            return
        directions: tuple[Direction, Direction] = ("Across", "Down")
        for cell, known in list(self.letters.items()):
            for i, letter in enumerate(word):
                if letter == known:
                    for direction in directions:
                        yield cell.along(direction, -i), direction

    def _fits(self, word: str, start: Cell, direction: Direction) -> bool:
        cells = [start.along(direction, i) for i in range(len(word))]
        inside = all(0 <= x < self.side for cell in (cells[0], cells[-1]) for x in cell)
        ends = (start.along(direction, -1), start.along(direction, len(word)))
        if not inside or any(cell in self.letters for cell in ends):
            return False
        other: Direction = "Down" if direction == "Across" else "Across"
        was_taken = False
        for cell, letter in zip(cells, word, strict=True):
            is_taken = cell in self.letters
            if is_taken and (was_taken or self.letters[cell] != letter):
                return False  # two in a row would run along another word
            sides = (cell.along(other, -1), cell.along(other, 1))
            if not is_taken and any(side in self.letters for side in sides):
                return False
            was_taken = is_taken
        return True


def _numbered(layout: _Layout, clues: Mapping[str, str]) -> Board:
    """Cut off empty borders and number the starts from left to right, row by row."""
    top = min(cell.row for cell in layout.letters)
    left = min(cell.column for cell in layout.letters)
    starts = sorted({start for _, start, _ in layout.placed})
    numbers = {start: number for number, start in enumerate(starts, start=1)}
    entries = [
        Entry(
            number=numbers[start],
            direction=direction,
            start=Cell(start.row - top, start.column - left),
            word=word,
            clue=clues[word],
        )
        for word, start, direction in layout.placed
    ]
    return Board(
        num_rows=max(cell.row for cell in layout.letters) - top + 1,
        num_columns=max(cell.column for cell in layout.letters) - left + 1,
        entries=tuple(sorted(entries, key=lambda entry: (entry.number, entry.direction))),
    )
