"""The rules of Hangman: what a guess reveals, costs and earns. Pure.

word "llama", 6 lives
guess a  ->  _ _ a _ a   2 of 5 letters: +0.4
guess z  ->  a life lost: -0.1
guess z  ->  repeated, a life lost: -0.2
guess llama -> the remaining 3 letters and the win: +0.6 + 1.0
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from atroposlib.errors import ConfigError
from environments.shared.games import NUM_TRAINING_SEEDS, Difficulty

__all__ = ["INVALID", "LEVELS", "LOSS", "WIN", "WRONG", "HangmanGame", "Level", "hidden_word"]

WIN = 1.0
LOSS = -0.5
WRONG = -0.1
INVALID = -0.2


class Level(NamedTuple):
    """How hard a game is."""

    min_letters: int
    max_letters: int
    lives: int
    """Wrong or invalid guesses until the game is lost."""
    shows_clue: bool


LEVELS: Mapping[Difficulty, Level] = {
    "easy": Level(3, 5, lives=8, shows_clue=True),
    "medium": Level(4, 7, lives=7, shows_clue=False),
    "hard": Level(6, 12, lives=5, shows_clue=False),
}


def hidden_word(
    words: Mapping[str, str], level: Level, *, seed: int, held_out_share: float = 0.0
) -> str:
    """Return the word of a seed, the same for the same list of words.

    Args:
        words: word -> clue.
        level: how long the word may be.
        seed: of the game; evaluations have those from `NUM_TRAINING_SEEDS` on.
        held_out_share: about as many of the words are hidden in evaluations and in no training
            game; with a list so short that one side has none, both have all.

    Raises:
        ConfigError: no word has as many letters as the level asks for.
    """
    fitting = sorted(w for w in words if level.min_letters <= len(w) <= level.max_letters)
    if not fitting:
        wanted = f"{level.min_letters} to {level.max_letters} letters"
        raise ConfigError(f"none of the {len(words)} words has {wanted}")
    is_evaluation = seed >= NUM_TRAINING_SEEDS
    own = [w for w in fitting if (_place(w) < held_out_share) == is_evaluation]
    return random.Random(seed).choice(own if held_out_share > 0 and own else fitting)


def _place(word: str) -> float:
    """Return a number from 0 to 1 that depends on the word alone."""
    return zlib.crc32(word.encode()) / 2**32


class Outcome(NamedTuple):
    """What became of a guess."""

    reward: float
    message: str
    """What the player is told."""


class HangmanGame:
    """One game.

    Attributes:
        word: the hidden word, in small letters.
        lives: wrong or invalid guesses left.
        guesses: valid guesses so far, letters and words.
    """

    def __init__(self, word: str, *, lives: int) -> None:
        self.word = word
        self.lives = lives
        self.guesses: list[str] = []

    @property
    def is_won(self) -> bool:
        """Whether every letter is revealed."""
        return self.num_hidden == 0

    @property
    def is_over(self) -> bool:
        """Whether the game is won or lost."""
        return self.is_won or self.lives == 0

    @property
    def num_hidden(self) -> int:
        """Positions not yet revealed."""
        if self.word in self.guesses:
            return 0
        return sum(letter not in self.guesses for letter in self.word)

    @property
    def shown(self) -> str:
        """The word with a line for each hidden letter: `_ _ a _ a`."""
        is_found = self.num_hidden == 0
        return " ".join(x if is_found or x in self.guesses else "_" for x in self.word)

    @property
    def forfeit(self) -> float:
        """What giving up costs: as much as an invalid guess for each life, and the loss."""
        return self.lives * INVALID + LOSS

    def guess(self, text: str | None) -> Outcome:
        """Take a guess; one that is wrong or invalid costs a life.

        Args:
            text: a letter or a word, in any case; None when the turn holds no readable guess.

        Raises:
            ValueError: the game is over.
        """
        if self.is_over:
            raise ValueError("the game is over; no guess can be taken")
        guess = (text or "").lower()
        problem = self._problem(text, guess)
        if problem:
            return self._lose_life(INVALID, problem)
        before = self.num_hidden
        self.guesses.append(guess)
        revealed = before - self.num_hidden
        if revealed == 0:
            return self._lose_life(WRONG, f"{guess} is wrong.")
        reward = revealed / len(self.word) + (WIN if self.is_won else 0.0)
        return Outcome(reward, f"{guess} is right.")

    def _problem(self, text: str | None, guess: str) -> str | None:
        if text is None:
            return "Write exactly one guess, as <guess>LETTER</guess> or <guess>WORD</guess>."
        if not (text.isascii() and text.isalpha()):
            return "A guess consists of the letters a to z."
        if len(guess) not in (1, len(self.word)):
            return f"A guess has one letter, or all {len(self.word)}."
        if guess in self.guesses:
            return f"{guess} was guessed before."
        return None

    def _lose_life(self, reward: float, message: str) -> Outcome:
        self.lives -= 1
        return Outcome(reward + (LOSS if self.lives == 0 else 0.0), message)
