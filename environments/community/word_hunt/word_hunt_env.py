"""Word hunt: find words as paths of neighboring letters on a board.

    index -> board -> [user] -> G completions -> <answer> words
        -> different, on the board, in the dictionary? -> their points / the most that are possible

Boards are drawn from the letters of the dictionary, `sample/words.txt` or another list of words:

    python environments/community/word_hunt/word_hunt_env.py process --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard

__all__ = [
    "Dictionary",
    "LetterBoard",
    "WordHuntConfig",
    "WordHuntEnv",
    "draw_board",
    "find_words",
    "has_path",
    "points",
    "score_words",
]

CARD = EnvironmentCard(
    task="find words on a board of letters",
    turns="1",
    reward="points of the words found, as a share of all points",
    data="boards made on the spot; 5,478 words shipped, or `--env.dictionary_path`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample") / "words.txt"
NUM_EVAL_BOARDS = 32
MIN_WORDS_ON_BOARD = 10
MAX_DRAWS = 100
"""Boards that are drawn for one item until one has enough words; then that with the most."""
WORD = re.compile(r"[^\W\d_]+")
QUESTION = (
    "Find words on this board:\n\n{board}\n\nA word is a path from letter to letter: each next one "
    "touches the last, also at a corner, and no place is used twice. Words have {min_length} to "
    "{max_length} letters; longer ones earn more. A word counts once, and only if a dictionary has "
    "it. Write the words between <answer> and </answer>, separated by commas."
)
PointScheme = Literal["word_hunt", "doubling"]


class WordHuntConfig(SingleTurnEnvConfig):
    """Settings of the boards, the words and their points."""

    board_size: int = Field(4, ge=2, le=8, description="Number of rows, and of columns.")
    min_word_length: int = Field(3, ge=2, description="Fewest letters of a word.")
    max_word_length: int = Field(16, ge=2, le=16, description="Most letters of a word.")
    dictionary_path: str | None = Field(
        None, description="Text file with one word a line; None takes the words that are shipped."
    )
    validate_words: bool = Field(
        True, description="Whether words must be in the dictionary, not on the board alone."
    )
    normalize_scores: bool = Field(
        True, description="Whether scores are shares of the best one, not points."
    )
    boards_per_epoch: int = Field(
        100, ge=1, description="Number of different boards; after them the first one is next."
    )
    point_scheme: PointScheme = Field(
        "word_hunt",
        description="Points of a word: word_hunt (100, 400, 800, then 400 more a letter, from "
        "three letters) or doubling (2 to the power of its letters less two).",
    )
    board_seed: int = Field(0, description="Seed of the boards.")

    @model_validator(mode="after")
    def _lengths_are_a_range(self) -> WordHuntConfig:
        if self.min_word_length > self.max_word_length:
            raise ValueError("min_word_length must not exceed max_word_length")
        return self


class Dictionary(NamedTuple):
    """The words that count."""

    words: frozenset[str]
    prefixes: frozenset[str]
    letters: str
    """All letters of all words, of which boards are drawn."""

    @classmethod
    def of(cls, lines: Iterator[str], *, min_length: int, max_length: int) -> Dictionary:
        """Return the words of a list that have a permitted length."""
        texts = {line.strip().lower() for line in lines}
        words = frozenset(t for t in texts if t.isalpha() and min_length <= len(t) <= max_length)
        prefixes = frozenset(word[:end] for word in words for end in range(len(word) + 1))
        return cls(words, prefixes, "".join(sorted(words)))


class LetterBoard(NamedTuple):
    """One board."""

    rows: tuple[str, ...]
    words: tuple[str, ...]
    """All words of the dictionary on it, sorted."""


def points(word: str, scheme: PointScheme = "word_hunt") -> int:
    """Return the points of a word by its length; none below three letters in `word_hunt`."""
    length = len(word)
    if scheme == "doubling":
        return 1 << max(0, length - 2)
    if length >= 6:
        return 1400 + 400 * (length - 6)
    return {3: 100, 4: 400, 5: 800}.get(length, 0)


def find_words(rows: Sequence[str], dictionary: Dictionary) -> set[str]:
    """Return all words of the dictionary on a board."""
    found: set[str] = set()
    paths: list[tuple[tuple[int, int], ...]] = [(place,) for place in _places(rows)]
    while paths:
        path = paths.pop()
        text = "".join(rows[row][column] for row, column in path)
        if text not in dictionary.prefixes:
            continue
        if text in dictionary.words:
            found.add(text)
        paths += [(*path, place) for place in _around(rows, path[-1]) if place not in path]
    return found


def has_path(rows: Sequence[str], word: str) -> bool:
    """Whether a word is on a board."""
    prefixes = frozenset(word[:end] for end in range(len(word) + 1))
    return word in find_words(rows, Dictionary(frozenset([word]), prefixes, word))


def score_words(
    answer: str,
    board: LetterBoard,
    *,
    scheme: PointScheme = "word_hunt",
    extra: Collection[str] = (),
) -> tuple[int, int]:
    """Return the points of the words in the tags, and those of all words on the board.

    Args:
        answer: the completion without its thinking.
        board: the board.
        scheme: name of the points.
        extra: words that count in addition.
    """
    counted = words_of(answer) & {*board.words, *extra}
    return (
        sum(points(word, scheme) for word in counted),
        sum(points(word, scheme) for word in board.words),
    )


def words_of(answer: str) -> set[str]:
    """Return the different words in the tags, in lower case."""
    return set(WORD.findall((only_tagged(answer, "answer") or "").lower()))


def draw_board(seed: str, size: int, dictionary: Dictionary) -> LetterBoard:
    """Draw a board with at least `MIN_WORDS_ON_BOARD` words, or the best of `MAX_DRAWS`."""
    source = random.Random(seed)
    best = LetterBoard((), ())
    for _ in range(MAX_DRAWS):
        letters = "".join(source.choices(dictionary.letters, k=size * size))
        rows = tuple(letters[start : start + size] for start in range(0, len(letters), size))
        words = tuple(sorted(find_words(rows, dictionary)))
        if len(words) > len(best.words):
            best = LetterBoard(rows, words)
        if len(words) >= MIN_WORDS_ON_BOARD:
            break
    if not best.words:
        raise ConfigError(f"{MAX_DRAWS} boards of {size} by {size} have no word; enlarge them")
    return best


def _places(rows: Sequence[str]) -> list[tuple[int, int]]:
    return [(row, column) for row in range(len(rows)) for column in range(len(rows[row]))]


def _around(rows: Sequence[str], place: tuple[int, int]) -> list[tuple[int, int]]:
    size, (row, column) = len(rows), place
    return [
        (r, c)
        for r in range(max(0, row - 1), min(size, row + 2))
        for c in range(max(0, column - 1), min(size, column + 2))
    ]


class WordHuntEnv(SingleTurnEnv):
    """Boards of letters; an item is a `LetterBoard`.

    Attributes:
        iter: boards handed out so far; kept in checkpoints.
        dictionary: the words, after `setup`.
    """

    name = "word_hunt_environment"
    env_config_cls = WordHuntConfig
    config: WordHuntConfig
    dictionary: Dictionary
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 16,
        "max_token_length": 4096,
        "wandb_name": "word_hunt",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    async def setup(self) -> None:
        """Read the dictionary, and draw the boards of evaluations.

        Raises:
            ConfigError: if the dictionary has no words, or no board has one.
        """
        self.dictionary = await asyncio.to_thread(self._read_dictionary)
        self._eval_boards = await asyncio.to_thread(self._draw_eval_boards)

    def _read_dictionary(self) -> Dictionary:
        path = Path(self.config.dictionary_path or SAMPLE)
        shortest, longest = self.config.min_word_length, self.config.max_word_length
        try:
            with path.open(encoding="utf-8") as lines:
                dictionary = Dictionary.of(lines, min_length=shortest, max_length=longest)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the dictionary {path} cannot be read ({error}); --env.dictionary_path takes a "
                "text file with one word a line"
            ) from error
        if not dictionary.words:
            raise ConfigError(f"{path} has no word of {shortest} to {longest} letters")
        return dictionary

    async def get_next_item(self) -> LetterBoard:
        index = self.iter % self.config.boards_per_epoch
        self.iter += 1
        return await asyncio.to_thread(self._draw, str(index))

    def eval_items(self) -> Sequence[LetterBoard]:
        return self._eval_boards

    def _draw_eval_boards(self) -> list[LetterBoard]:
        return [self._draw(f"evaluation {index}") for index in range(NUM_EVAL_BOARDS)]

    def _draw(self, name: str) -> LetterBoard:
        seed = f"{self.config.board_seed} {name}"
        return draw_board(seed, self.config.board_size, self.dictionary)

    def prompt(self, item: LetterBoard) -> list[dict[str, str]]:
        question = QUESTION.format(
            board="\n".join(" ".join(row.upper()) for row in item.rows),
            min_length=self.config.min_word_length,
            max_length=self.config.max_word_length,
        )
        return [{"role": "user", "content": question}]

    async def score(self, item: LetterBoard, answer: str) -> float:
        """Return the share of all points, at most 1.0, or the points."""
        extra = set() if self.config.validate_words else self._on_board(item, answer)
        earned, best = score_words(answer, item, scheme=self.config.point_scheme, extra=extra)
        return min(1.0, earned / max(1, best)) if self.config.normalize_scores else float(earned)

    def _on_board(self, item: LetterBoard, answer: str) -> set[str]:
        lengths = range(self.config.min_word_length, self.config.max_word_length + 1)
        return {w for w in words_of(answer) if len(w) in lengths and has_path(item.rows, w)}

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: LetterBoard) -> str:
        return f"<answer>{', '.join(item.words)}</answer>"


if __name__ == "__main__":
    WordHuntEnv.cli()
