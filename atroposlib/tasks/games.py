"""Shared parts of games: an item per seed, words with clues, gymnasium, metrics of won games.

seed -> item {"seed": n} -> the same game for every rollout of a group

`WORDS_PATH` is the list written for this repository: 793 common English words of 3 to 10 letters.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from pydantic import Field

from atroposlib.envs.conversation import Conversation
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig, Rollout
from atroposlib.errors import ConfigError, MissingExtraError

__all__ = [
    "NUM_TRAINING_SEEDS",
    "THINK_FIRST",
    "Difficulty",
    "Game",
    "GameEnv",
    "GameEnvConfig",
    "evaluation_seeds",
    "load_gymnasium",
    "read_words",
    "words_at",
]

Difficulty = Literal["easy", "medium", "hard"]

NUM_TRAINING_SEEDS = 1_000_001
"""Training games have the seeds below, evaluation games those from here on."""

THINK_FIRST = "Think first, between <think> and </think>; only what stands behind it is read."


def evaluation_seeds(num_games: int) -> range:
    """Return the seeds of the evaluation, which no training game has."""
    return range(NUM_TRAINING_SEEDS, NUM_TRAINING_SEEDS + num_games)


class GameEnvConfig(MultiTurnEnvConfig):
    """Which games are played."""

    seed: int = Field(
        0, ge=0, lt=NUM_TRAINING_SEEDS, description="Seed of the first game; the next has the next."
    )
    eval_episodes: int = Field(100, ge=0, description="Games of one evaluation.")


class Game(Conversation):
    """One game seen as a conversation.

    Attributes:
        is_won: whether the policy reached the goal.
    """

    is_won: bool = False


class GameEnv(MultiTurnEnv):
    """Games from seeds; write `start_conversation`, which returns a `Game`.

    Attributes:
        iter: training games handed out so far; kept in checkpoints.
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
        """Return the same games in every evaluation."""
        return [{"seed": seed} for seed in evaluation_seeds(self.config.eval_episodes)]

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        metrics = super().metrics_of(rollouts, area)
        if rollouts:
            games = [cast(Game, rollout.conversation) for rollout in rollouts]
            metrics[f"{area}/win_rate"] = statistics.fmean(game.is_won for game in games)
        return metrics

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


WORDS_PATH = Path(__file__).with_name("words.tsv")


def read_words(text: str, *, name: str) -> dict[str, str]:
    """Return the clue of each word, in the order of the lines.

    Args:
        text: content of the file; empty lines are left out.
        name: of the file, for messages.

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
    """Return the words of a file, read once.

    Args:
        path: of the file; None for the shipped list.

    Raises:
        ConfigError: the file cannot be read or has a faulty line.
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
        MissingExtraError: it is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("gymnasium", extra="examples") from error
    return gymnasium
