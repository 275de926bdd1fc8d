"""Shared parts of games: items from seeds, words with clues, gymnasium, the win rate.

seed -> item {"seed": n} -> the same game for every rollout of a group

`WORDS_PATH` is the list written for this repository: 793 common English words of 3 to 10 letters.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Conversation
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig, Rollout
from atroposlib.errors import ConfigError, MissingExtraError

__all__ = [
    "NUM_TRAINING_SEEDS",
    "THINK_FIRST",
    "Difficulty",
    "Game",
    "GameEnv",
    "GameEnvConfig",
    "MoveResult",
    "SeededEnv",
    "evaluation_seeds",
    "load_gymnasium",
    "opening_messages",
    "read_words",
    "words_at",
]

Difficulty = Literal["easy", "medium", "hard"]

NUM_TRAINING_SEEDS = 1_000_001
"""Training games have smaller seeds; evaluation games have seeds from here on."""

THINK_FIRST = "Think first, between <think> and </think>; only what stands behind it is read."


def evaluation_seeds(num_games: int) -> range:
    """Return the seeds of an evaluation, disjoint from those of training."""
    return range(NUM_TRAINING_SEEDS, NUM_TRAINING_SEEDS + num_games)


def opening_messages(rules_and_state: str, *, thinking_active: bool) -> list[ChatMessage]:
    """Return the first messages of a game, with `THINK_FIRST` as system message if wanted."""
    system = [{"role": "system", "content": THINK_FIRST}] if thinking_active else []
    return [*system, {"role": "user", "content": rules_and_state}]


class MoveResult(NamedTuple):
    """Result of a move."""

    reward: float
    message: str
    """Reply to the player."""


class GameEnvConfig(MultiTurnEnvConfig):
    """Settings of games from seeds."""

    seed: int = Field(
        0,
        ge=0,
        lt=NUM_TRAINING_SEEDS,
        description="Seed of the first game; later games have consecutive seeds.",
    )
    eval_episodes: int = Field(100, ge=0, description="Number of games of one evaluation.")


class Game(Conversation):
    """One game as a conversation."""

    is_won: bool = False
    """Whether the policy reached the goal."""


class SeededEnv(MultiTurnEnv):
    """Conversations from seeds; write `start_conversation`.

    Attributes:
        iter: training seeds handed out so far; kept in checkpoints.
    """

    env_config_cls = GameEnvConfig
    config: GameEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    async def get_next_item(self) -> dict[str, int]:
        seed = (self.config.seed + self.iter) % NUM_TRAINING_SEEDS
        self.iter += 1
        return {"seed": seed}

    def eval_items(self) -> Sequence[dict[str, int]]:
        return [{"seed": seed} for seed in evaluation_seeds(self.config.eval_episodes)]

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


class GameEnv(SeededEnv):
    """Games from seeds; write `start_conversation`, which returns a `Game`."""

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        metrics = super().metrics_of(rollouts, area)
        if rollouts:
            games = [cast(Game, rollout.conversation) for rollout in rollouts]
            metrics[f"{area}/win_rate"] = statistics.fmean(game.is_won for game in games)
        return metrics

    def is_correct(self, rollout: Rollout) -> bool:
        """Whether the game was won; a lost one may have a positive return."""
        return bool(cast(Game, rollout.conversation).is_won)


WORDS_PATH = Path(__file__).with_name("words.tsv")


def read_words(text: str, *, name: str) -> dict[str, str]:
    """Return the clue of each word, in the order of the lines; empty lines are ignored.

    Args:
        text: content of the file.
        name: name of the file, for error messages.

    Raises:
        ConfigError: a line is not a word with a clue, or a word occurs twice.
    """
    clues: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        word, _, clue = (part.strip() for part in line.partition("\t"))
        if not (word.isascii() and word.isalpha() and word.islower() and clue):
            raise ConfigError(
                f"{name}, line {number}: expected a word of the letters a to z, a tab and a clue, "
                f"got {line[:60]!r}"
            )
        if word in clues:
            raise ConfigError(f"{name}, line {number}: {word!r} is there twice")
        clues[word] = clue
    if not clues:
        raise ConfigError(f"{name} has no words")
    return clues


@lru_cache(maxsize=4)
def words_at(path: str | None) -> Mapping[str, str]:
    """Return the words of a file and their clues; cached. None is the shipped list.

    Raises:
        ConfigError: the file cannot be read or has an invalid line.
    """
    file = WORDS_PATH if path is None else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the word list {file} cannot be read: {error}") from error
    return MappingProxyType(read_words(text, name=str(file)))


@lru_cache(maxsize=1)
def load_gymnasium() -> Any:
    """Return the package.

    Raises:
        MissingExtraError: gymnasium is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("gymnasium", extra="examples") from error
    return gymnasium
