"""Hangman: a hidden word, found by guessing letters.

    seed -> word -> [guess -> letters revealed, or a life lost] x N -> found, or no life left

All letters of a word together are worth 1, and finding it is worth 1 more; `README.md` explains the
rewards. Words come from the shipped list; no data is downloaded:

    python environments/game_environments/hangman/hangman_env.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import (
    NUM_TRAINING_SEEDS,
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
    "LOSS",
    "WIN",
    "WRONG",
    "Difficulty",
    "Hangman",
    "HangmanEnvConfig",
    "HangmanGame",
    "HangmanOnlineEnv",
    "hidden_word",
]

WIN = 1.0
LOSS = -0.5
WRONG = -0.1
INVALID = -0.2


class GameLevel(NamedTuple):
    """Difficulty of a game."""

    min_letters: int
    max_letters: int
    lives: int
    """Number of wrong or invalid guesses that lose the game."""
    shows_clue: bool


LEVELS: Mapping[Difficulty, GameLevel] = {
    "easy": GameLevel(3, 5, lives=8, shows_clue=True),
    "medium": GameLevel(4, 7, lives=7, shows_clue=False),
    "hard": GameLevel(6, 12, lives=5, shows_clue=False),
}


def hidden_word(
    words: Mapping[str, str], level: GameLevel, *, seed: int, held_out_share: float = 0.0
) -> str:
    """Return the word of a seed; deterministic for the same words.

    Args:
        words: words and their clues.
        level: determines the length of the word.
        seed: seed of the game; evaluations have those from `NUM_TRAINING_SEEDS` on.
        held_out_share: approximate fraction of words that occur only in evaluations. If one side
            would have no word, both use all.

    Raises:
        ConfigError: no word has the length of the level.
    """
    fitting = sorted(w for w in words if level.min_letters <= len(w) <= level.max_letters)
    if not fitting:
        wanted = f"{level.min_letters} to {level.max_letters} letters"
        raise ConfigError(f"none of the {len(words)} words has {wanted}")
    is_evaluation = seed >= NUM_TRAINING_SEEDS
    own = [w for w in fitting if (_place(w) < held_out_share) == is_evaluation]
    return random.Random(seed).choice(own if held_out_share > 0 and own else fitting)


def _place(word: str) -> float:
    """Return a hash of the word in [0, 1)."""
    return zlib.crc32(word.encode()) / 2**32


class HangmanGame:
    """One game.

    Attributes:
        word: the hidden word, in lower case.
        lives: lives left.
        guesses: valid guesses so far, letters and words.
    """

    def __init__(self, word: str, *, lives: int) -> None:
        self.word = word
        self.lives = lives
        self.guesses: list[str] = []

    @property
    def is_won(self) -> bool:
        return self.num_hidden == 0

    @property
    def is_over(self) -> bool:
        return self.is_won or self.lives == 0

    @property
    def num_hidden(self) -> int:
        if self.word in self.guesses:
            return 0
        return sum(letter not in self.guesses for letter in self.word)

    @property
    def shown(self) -> str:
        """The word with `_` for each hidden letter, such as `_ _ a _ a`."""
        is_found = self.num_hidden == 0
        return " ".join(x if is_found or x in self.guesses else "_" for x in self.word)

    @property
    def forfeit(self) -> float:
        """Reward of giving up: that of an invalid guess per life, plus that of the loss."""
        return self.lives * INVALID + LOSS

    def guess(self, text: str | None) -> MoveResult:
        """Apply a guess; a wrong or invalid one costs a life.

        Args:
            text: a letter or a word, in any case; None if the turn has no valid guess.

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
        return MoveResult(reward, f"{guess} is right.")

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

    def _lose_life(self, reward: float, message: str) -> MoveResult:
        self.lives -= 1
        return MoveResult(reward + (LOSS if self.lives == 0 else 0.0), message)


CARD = EnvironmentCard(
    task="find a hidden word by its letters",
    turns="up to 20",
    reward="per turn, the share of letters revealed; wrong -0.1, invalid -0.2, found +1, lost -0.5",
    data="793 words shipped",
    command="process --env.total_steps 4",
)

RULES = """We play Hangman. I have hidden an English word of {num_letters} letters.{clue}
Each turn, guess one letter as <guess>e</guess>, or the whole word as <guess>{example}</guess>.
A wrong guess costs a life. So does a turn without a guess, with several, or with a repeated one."""
EXAMPLE = "abcdefghijkl"
STATE = "Word: {shown}\nGuessed: {guesses}\nLives: {lives}"


class HangmanEnvConfig(GameEnvConfig):
    """Settings of the words and of the game."""

    difficulty: Difficulty = Field(
        "easy",
        description="easy: 3 to 5 letters, 8 lives and a clue; medium: 4 to 7 letters, 7 lives; "
        "hard: 6 to 12 letters, 5 lives.",
    )
    words_path: str | None = Field(
        None, description="File with a word, a tab and a clue per line; None is the shipped list."
    )
    held_out_share: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Fraction of the words that occur only in evaluations; 0 shares all words.",
    )
    thinking_active: bool = Field(
        True, description="Whether the policy is asked to think before each turn."
    )
    max_turns: int = Field(20, ge=1, description="Maximum number of guesses in one game.")


class Hangman(Game):
    """One game as a conversation."""

    def __init__(self, game: HangmanGame, *, clue: str, thinking_active: bool) -> None:
        self.game = game
        self.clue = clue
        self.unfinished_reward = game.forfeit
        self.thinking_active = thinking_active

    def opening(self) -> list[ChatMessage]:
        num_letters = len(self.game.word)
        rules = RULES.format(
            num_letters=num_letters,
            clue=f" Clue: {self.clue}." if self.clue else "",
            example=EXAMPLE[:num_letters],
        )
        return opening_messages(f"{rules}\n\n{self._state()}", thinking_active=self.thinking_active)

    async def reply(self, turn: Turn) -> Reply:
        outcome = self.game.guess(only_tagged(turn.answer, "guess"))
        self.is_won = self.game.is_won
        self.unfinished_reward = self.game.forfeit
        if self.game.is_over:
            return Reply(reward=outcome.reward, is_done=True)
        return Reply(f"{outcome.message}\n{self._state()}", reward=outcome.reward)

    def _state(self) -> str:
        guesses = ", ".join(self.game.guesses) or "nothing"
        return STATE.format(shown=self.game.shown, guesses=guesses, lives=self.game.lives)


class HangmanOnlineEnv(GameEnv):
    """Games of Hangman; an item is the seed of its word."""

    name = "hangman"
    env_config_cls = HangmanEnvConfig
    config: HangmanEnvConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 8192,
        "max_turn_tokens": 1024,
    }

    async def setup(self) -> None:
        self.words = await asyncio.to_thread(words_at, self.config.words_path)
        self.level = LEVELS[self.config.difficulty]

    def start_conversation(self, item: dict[str, int]) -> Hangman:
        word = self._word(item)
        return Hangman(
            HangmanGame(word, lives=self.level.lives),
            clue=self.words[word] if self.level.shows_clue else "",
            thinking_active=self.config.thinking_active,
        )

    def check_gold_answer(self, item: dict[str, int]) -> list[str]:
        word = self._word(item)
        return [f"<guess>{letter}</guess>" for letter in dict.fromkeys(word)]

    def _word(self, item: dict[str, int]) -> str:
        share = self.config.held_out_share
        return hidden_word(self.words, self.level, seed=item["seed"], held_out_share=share)


if __name__ == "__main__":
    HangmanOnlineEnv.cli()
