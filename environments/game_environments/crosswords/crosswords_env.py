"""Crosswords, filled in over several turns.

    seed -> board -> ["1-Across: WORD" -> letters kept or removed] x N -> solved, or out of turns

All letters of a board together are worth 1, and solving it is worth 1 more; `README.md` explains
the rewards. No data is downloaded:

    python environments/game_environments/crosswords/crosswords_env.py process \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import (
    Difficulty,
    Game,
    GameEnv,
    GameEnvConfig,
    MoveResult,
    opening_messages,
    words_at,
)

__all__ = [
    "INVALID",
    "LEVELS",
    "UNSOLVED",
    "WIN",
    "Board",
    "BoardSize",
    "Cell",
    "Crossword",
    "CrosswordGame",
    "CrosswordsEnv",
    "Entry",
    "MoveResult",
    "board_of",
    "make_board",
]

Direction = Literal["Across", "Down"]
NUM_ATTEMPTS = 50


class Cell(NamedTuple):
    """A position on the board."""

    row: int
    column: int

    def along(self, direction: Direction, steps: int) -> Cell:
        """Return the cell some steps further; backwards if negative."""
        if direction == "Across":
            return Cell(self.row, self.column + steps)
        return Cell(self.row + steps, self.column)


class BoardSize(NamedTuple):
    """Size of a board."""

    num_words: int
    side: int
    """Maximum number of rows and of columns."""


LEVELS: Mapping[Difficulty, BoardSize] = {
    "easy": BoardSize(3, side=7),
    "medium": BoardSize(6, side=9),
    "hard": BoardSize(10, side=12),
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
        """Name in moves, such as `1-Across`."""
        return f"{self.number}-{self.direction}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(self.start.along(self.direction, i) for i in range(len(self.word)))


@dataclass(frozen=True)
class Board:
    """A finished crossword."""

    num_rows: int
    num_columns: int
    entries: tuple[Entry, ...]
    """Sorted by number, Across before Down."""

    @property
    def letters(self) -> dict[Cell, str]:
        return {
            cell: letter
            for entry in self.entries
            for cell, letter in zip(entry.cells, entry.word, strict=True)
        }


def make_board(clues: Mapping[str, str], level: BoardSize, *, seed: int) -> Board:
    """Return the board of a seed; deterministic for the same words.

    Raises:
        ConfigError: no board was found with these words.
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
    def __init__(self, side: int) -> None:
        self.side = side
        self.letters: dict[Cell, str] = {}
        self.placed: list[tuple[str, Cell, Direction]] = []

    def place(self, word: str) -> None:
        """Place a word at the first position where it fits, if there is one."""
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
    """Remove empty borders and number the starts from left to right, row by row."""
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


WIN = 1.0
UNSOLVED = -0.5
INVALID = -0.2
"""Larger than the penalty of wrong letters in a turn, so that an attempt is better."""
WRONG_CELL = 0.1
"""Penalty of a wrong letter, as a share of the reward of a right one."""

_LINE = re.compile(r"[\s*-]*([0-9]+)\s*-\s*(across|down)\b(.*)", re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"[\s*]*:[\s*]*([A-Za-z]+)[\s*.,;]*", re.ASCII)


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
        return len(self.solved) == len(self.letters)

    def fill_in(self, text: str) -> MoveResult:
        """Fill in the words of a turn; one invalid line makes the whole turn invalid.

        Args:
            text: lines such as `1-Across: PEAR`; other lines are ignored.

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
        """Return the found letters of an entry, such as `P _ A _`."""
        return " ".join(
            self.letters[cell].upper() if cell in self.solved else "_" for cell in entry.cells
        )

    def grid(self) -> str:
        """Return the board: found letters, `_` for hidden ones, `#` for cells without a letter."""
        rows = []
        for row in range(self.board.num_rows):
            cells = [Cell(row, column) for column in range(self.board.num_columns)]
            rows.append(" ".join(self._shown(cell) for cell in cells))
        return "\n".join(rows)

    def unsolved(self) -> list[Entry]:
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

    def _write(self, words: dict[str, str]) -> MoveResult:
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
        return MoveResult(reward + (WIN if self.is_won else 0.0), message)

    def _shown(self, cell: Cell) -> str:
        if cell not in self.letters:
            return "#"
        return self.letters[cell].upper() if cell in self.solved else "_"


def _invalid(problem: str) -> MoveResult:
    return MoveResult(INVALID, f"{problem} Nothing was written.")


CARD = EnvironmentCard(
    task="solve a crossword",
    turns="up to 6",
    reward="per turn, the share of letters found; wrong ones a tenth off, invalid -0.2, solved +1",
    data="793 words with clues shipped",
    command="process --env.total_steps 4",
)

RULES = """Solve this crossword. `_` is a letter to find, `#` belongs to no word.
Each turn, write one or more words, each on a line of its own: {example}: WORD
Right letters stay, wrong ones are rubbed out and cost points.
If a line names no open word of the list or has not as many letters, the turn is lost."""
STATE = "```\n{grid}\n```\n\n{entries}\n\nTurns left: {turns}"
ENTRY = "{name} (row {row}, column {column}, {length} letters): {clue} | {pattern}"


class CrosswordsEnvConfig(GameEnvConfig):
    """Settings of the boards and of the game."""

    difficulty: Difficulty = Field(
        "easy",
        description="easy: 3 words on 7 rows and columns; medium: 6 on 9; hard: 10 on 12.",
    )
    words_path: str | None = Field(
        None, description="File with a word, a tab and a clue per line; None is the shipped list."
    )
    thinking_active: bool = Field(
        True, description="Whether the policy is asked to think before each turn."
    )
    max_turns: int = Field(6, ge=1, description="Maximum number of turns for one board.")


@lru_cache(maxsize=256)
def board_of(difficulty: Difficulty, words_path: str | None, seed: int) -> Board:
    """Return the board of a seed; cached, since all rollouts of a group use the same one."""
    return make_board(words_at(words_path), LEVELS[difficulty], seed=seed)


class Crossword(Game):
    """One crossword as a conversation."""

    def __init__(self, game: CrosswordGame, *, max_turns: int, thinking_active: bool) -> None:
        self.game = game
        self.max_turns = max_turns
        self.unfinished_reward = UNSOLVED + max_turns * INVALID
        self.thinking_active = thinking_active

    def opening(self) -> list[ChatMessage]:
        rules = RULES.format(example=self.game.board.entries[0].name)
        rules_and_state = f"{rules}\n\n{self._state(self.max_turns)}"
        return opening_messages(rules_and_state, thinking_active=self.thinking_active)

    async def reply(self, turn: Turn) -> Reply:
        outcome = self.game.fill_in(turn.answer)
        self.is_won = self.game.is_won
        if self.is_won:
            return Reply(reward=outcome.reward, is_done=True)
        turns_left = self.max_turns - turn.index - 1
        # Stopping early scores no more than invalid moves in all remaining turns.
        self.unfinished_reward = UNSOLVED + turns_left * INVALID
        state = self._state(turns_left)
        return Reply(f"{outcome.message}\n\n{state}", reward=outcome.reward)

    def _state(self, turns_left: int) -> str:
        entries = [
            ENTRY.format(
                name=entry.name,
                row=entry.start.row + 1,
                column=entry.start.column + 1,
                length=len(entry.word),
                clue=entry.clue,
                pattern=self.game.pattern(entry),
            )
            for entry in self.game.unsolved()
        ]
        return STATE.format(grid=self.game.grid(), entries="\n".join(entries), turns=turns_left)


class CrosswordsEnv(GameEnv):
    """Crosswords; an item is the seed of a board."""

    name = "crosswords"
    env_config_cls = CrosswordsEnvConfig
    config: CrosswordsEnvConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 16384,
        "max_turn_tokens": 2048,
    }

    async def setup(self) -> None:
        await asyncio.to_thread(self._board, {"seed": self.config.seed})

    def start_conversation(self, item: dict[str, int]) -> Crossword:
        return Crossword(
            CrosswordGame(self._board(item)),
            max_turns=self.config.max_turns,
            thinking_active=self.config.thinking_active,
        )

    def check_gold_answer(self, item: dict[str, int]) -> str:
        return "\n".join(f"{e.name}: {e.word.upper()}" for e in self._board(item).entries)

    def _board(self, item: dict[str, int]) -> Board:
        return board_of(self.config.difficulty, self.config.words_path, item["seed"])


if __name__ == "__main__":
    CrosswordsEnv.cli()
