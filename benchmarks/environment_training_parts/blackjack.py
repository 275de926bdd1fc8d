"""Blackjack, one word per decision; the player tosses a coin."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from atroposlib.tasks.blackjack import ACTIONS, Table
from atroposlib.tasks.games import NUM_TRAINING_SEEDS
from benchmarks.environment_training_parts.lesson import Lesson, Messages, WarmUp, played_out
from environments.game_environments.gymnasium.blackjack.blackjack_env_no_thinking import (
    BlackjackEnvNoThinkingConfig,
    BlackjackGame,
)
from example_trainer.demo.settings import DemoSettings
from example_trainer.launch.report import RewardMetric

__all__ = ["blackjack"]

DOOR = Path("environments/game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py")
NUM_GAMES = 2_000
MAX_TOKENS = 256


def blackjack(folder: Path, seed: int) -> Lesson:
    """Return the lesson; `folder` is not needed."""

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        config = BlackjackEnvNoThinkingConfig()
        # From the end, where the training, which begins at the start, will not come.
        for number in range(NUM_TRAINING_SEEDS - count, NUM_TRAINING_SEEDS):
            yield played_out(
                BlackjackGame(Table(config.env_name, seed=number)),
                lambda: rng.choice(ACTIONS),
                max_turns=config.max_episode_turns,
            )

    return Lesson(
        settings=DemoSettings(
            seed=seed,
            steps=60,
            groups_per_step=16,
            group_size=16,
            max_tokens=MAX_TOKENS,
            task=None,
            environment_door=DOOR,
            environment_sections={"env": {"seed": seed, "max_turn_tokens": 4}},
        ),
        evaluation={"eval_temperature": 1.0, "eval_episodes": NUM_GAMES},
        warm_up=WarmUp(steps=60, num_conversations=2_000),
        conversations=conversations,
        measure=f"mean result (-1 to 1) of {NUM_GAMES:,} games with other cards",
        value=float,
        reward=RewardMetric(
            key="_train/avg_reward",
            label="mean result of a game",
            summary="{:+.2f} is the mean result of a game",
            limits=(-1.0, 0.25),
        ),
    )
