"""The rules of a crossword: what filled-in words earn. Pure.

    two words of 4 letters that cross, 7 cells
    "1-Across: PEAR"                 right   4 of 7 cells: +4/7
    "2-Down: RING"  for R O C K      G N I wrong, the crossing R was right before: -0.1 * 3/7
    "2-Down: ROCKS"                  invalid, nothing is written: -0.2
    "2-Down: ROCK"                   3 of 7 cells and the crossword is solved: +3/7 + 1.0

Right letters stay, wrong ones are rubbed out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from environments.game_environments.crosswords.board import Board, Cell, Entry

__all__ = ["INVALID", "UNSOLVED", "WIN", "WRONG_CELL", "CrosswordGame", "Outcome"]

WIN = 1.0
UNSOLVED = -0.5
INVALID = -0.2
"""More than the wrong letters of a turn can cost, so that trying is better."""
WRONG_CELL = 0.1
"""What a wrong letter costs, as a share of what a right one earns."""

_LINE = re.compile(r"[\s*-]*([0-9]+)\s*-\s*(across|down)\b(.*)", re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"\s*:[\s*]*([A-Za-z]+)[\s*.,;]*", re.ASCII)


class Outcome(NamedTuple):
    """What became of a turn."""

    reward: float
    message: str
    """What the player is told."""


class CrosswordGame:
    """One crossword.

    Attributes:
        board: the solution.
        solved: cells whose letter was found.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.letters = board.letters
        self.solved: set[Cell] = set()
        self._entries = {entry.name: entry for entry in board.entries}

    @property
    def is_won(self) -> bool:
        """Whether every letter was found."""
        return len(self.solved) == len(self.letters)

    def fill_in(self, text: str) -> Outcome:
        """Write the words of a turn; one faulty line and none of them is written.

        Args:
            text: lines such as `1-Across: PEAR`; other lines are not looked at.

        Raises:
            ValueError: the crossword is solved.
        """
        if self.is_won:
            raise ValueError("the crossword is solved; no turn can be taken")
        words: dict[str, str] = {}
        for line in filter(None, map(_LINE.match, text.splitlines())):
            name = f"{int(line[1][:9])}-{line[2].capitalize()}"
            word = _WORD.fullmatch(line[3])
            if word is None:
                return _invalid(f"{name} needs a colon and a word of the letters A to Z.")
            problem = self._problem(name, word[1])
            if problem or name in words:
                return _invalid(problem or f"{name} is there twice.")
            words[name] = word[1].lower()
        if not words:
            return _invalid("There is no line such as `1-Across: WORD`.")
        return self._write(words)

    def pattern(self, entry: Entry) -> str:
        """Return the letters of an entry that were found: `P _ A _`."""
        return " ".join(
            self.letters[cell].upper() if cell in self.solved else "_" for cell in entry.cells
        )

    def grid(self) -> str:
        """Return the board: found letters, `_` for hidden ones, `#` where no letter belongs."""
        rows = []
        for row in range(self.board.num_rows):
            cells = [Cell(row, column) for column in range(self.board.num_columns)]
            rows.append(" ".join(self._shown(cell) for cell in cells))
        return "\n".join(rows)

    def unsolved(self) -> list[Entry]:
        """Return the entries with a hidden letter."""
        return [e for e in self.board.entries if not self.solved.issuperset(e.cells)]

    def _problem(self, name: str, word: str) -> str | None:
        entry = self._entries.get(name)
        if entry is None:
            return f"There is no {name}."
        if len(word) != len(entry.word):
            return f"{name} has {len(entry.word)} letters, not {len(word)}."
        if self.solved.issuperset(entry.cells):
            return f"{name} is solved already."
        return None

    def _write(self, words: dict[str, str]) -> Outcome:
        right: set[Cell] = set()
        wrong: set[tuple[Cell, str]] = set()
        for name, word in words.items():
            for cell, letter in zip(self._entries[name].cells, word, strict=True):
                if self.letters[cell] == letter:
                    right.add(cell)
                else:
                    wrong.add((cell, letter))
        new = right - self.solved
        self.solved |= new
        reward = (len(new) - WRONG_CELL * len(wrong)) / len(self.letters)
        message = f"{len(new)} new letters are right, {len(wrong)} are wrong and were rubbed out."
        return Outcome(reward + (WIN if self.is_won else 0.0), message)

    def _shown(self, cell: Cell) -> str:
        if cell not in self.letters:
            return "#"
        return self.letters[cell].upper() if cell in self.solved else "_"


def _invalid(problem: str) -> Outcome:
    return Outcome(INVALID, f"{problem} Nothing was written.")
