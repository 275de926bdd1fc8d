"""Blackjack without thinking: one game per conversation, scored by its result.

    seed -> hand -> [hit or stick -> next hand] x N -> won 1, drawn 0, lost -1

An invalid action ends the game with -1. Needs gymnasium, no data:

    python environments/game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py process \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.envs.multi_turn_env import Limits, Rollout
from atroposlib.tasks.blackjack import RULES, Action, Table, describe
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import Game, GameEnv, GameEnvConfig, load_gymnasium

__all__ = ["BlackjackEnvNoThinking", "BlackjackEnvNoThinkingConfig", "BlackjackGame", "read_action"]

CARD = EnvironmentCard(
    task="play blackjack, one word per decision",
    turns="up to 10",
    reward="won 1, drawn 0, lost -1; an invalid action ends the game with -1",
    data="made on the spot",
    needs="`pip install '.[examples]'`",
    command="process --env.total_steps 4",
)

INVALID = -1.0
ONE_WORD = "Answer each hand with one word: hit to take a card, stick to end your turn."

_ACTION = re.compile(r"[\s.!*\"'`]*(hit|stick)[\s.!*\"'`]*", re.IGNORECASE | re.ASCII)


def read_action(answer: str) -> Action | None:
    """Return the action of an answer that consists of one only; None for any other answer."""
    found = _ACTION.fullmatch(answer)
    if found is None:
        return None
    return "hit" if found[1].lower() == "hit" else "stick"


class BlackjackEnvNoThinkingConfig(GameEnvConfig):
    """Settings of a game."""

    env_name: str = Field("Blackjack-v1", description="Name of the game in gymnasium.")
    max_episode_turns: int = Field(10, ge=1, description="Maximum number of decisions in one game.")
    temperature: float = Field(0.5, ge=0, description="Sampling temperature of rollouts.")
    max_turn_tokens: int | None = Field(512, ge=1, description="Maximum tokens of one decision.")


class BlackjackGame(Game):
    """One game as a conversation."""

    unfinished_reward = INVALID

    def __init__(self, table: Table) -> None:
        self.table = table

    def opening(self) -> list[ChatMessage]:
        return [
            {"role": "system", "content": f"{RULES}\n{ONE_WORD}"},
            {"role": "user", "content": describe(self.table.hand)},
        ]

    async def reply(self, turn: Turn) -> Reply:
        action = read_action(turn.answer)
        if action is None:
            return Reply(reward=INVALID, is_done=True)
        reward = self.table.play(action)
        self.is_won = reward > 0
        if self.table.is_over:
            return Reply(reward=reward, is_done=True)
        return Reply(describe(self.table.hand), reward=reward)


class BlackjackEnvNoThinking(GameEnv):
    """Games of blackjack; an item is the seed of the cards."""

    name = "blackjack_no_thinking"
    env_config_cls = BlackjackEnvNoThinkingConfig
    config: BlackjackEnvNoThinkingConfig
    default_model = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 16,
        "max_token_length": 2048,
        "steps_per_eval": 50,
    }

    async def setup(self) -> None:
        await asyncio.to_thread(load_gymnasium)

    def start_conversation(self, item: dict[str, int]) -> BlackjackGame:
        return BlackjackGame(Table(self.config.env_name, seed=item["seed"]))

    def limits(self) -> Limits:
        return replace(super().limits(), max_turns=self.config.max_episode_turns)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        if not rollouts:
            return {}
        rewards = [sum(rollout.rewards) for rollout in rollouts]
        games = [cast(BlackjackGame, rollout.conversation) for rollout in rollouts]
        metrics = {
            "avg_reward": statistics.fmean(rewards),
            "avg_turns": statistics.fmean(len(rollout.rewards) for rollout in rollouts),
            "win_rate": statistics.fmean(game.is_won for game in games),
            "loss_rate": statistics.fmean(reward < 0 for reward in rewards),
            "draw_rate": statistics.fmean(reward == 0 for reward in rewards),
            "num_episodes": len(rollouts),
        }
        return {f"{self.name}_{area}/{name}": value for name, value in metrics.items()}

    def check_gold_answer(self, item: dict[str, int]) -> list[str] | None:
        for num_hits in range(self.config.max_episode_turns):
            table = Table(self.config.env_name, seed=item["seed"])
            actions: list[Action] = [*cast(list[Action], ["hit"] * num_hits), "stick"]
            for action in actions:
                if not table.is_over:
                    table.play(action)
            if table.reward > INVALID:
                return list(actions)
        return None


if __name__ == "__main__":
    BlackjackEnvNoThinking.cli()
