"""Number guessing: a hidden number, a guess per turn, "higher" or "lower" as the answer.

    secret -> user: find it -> [guess -> higher or lower] x N -> found, or out of turns

The reward of a guess is the fraction of the total information that it gains, minus a cost per turn.
The right guess earns `WIN` in addition. The fractions of a won game add up to 1, so only fewer
turns increase the return. A guess that is known to be wrong gains no information. A game that a
limit ends scores no more than one whose remaining turns are invalid. Needs no data:

    python environments/number_guessing.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.multi_turn_env import (
    ChatMessage,
    Conversation,
    MultiTurnEnv,
    MultiTurnEnvConfig,
    Reply,
    Turn,
)
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["GuessingGame", "NumberGuessingEnv", "NumberGuessingEnvConfig"]

CARD = EnvironmentCard(
    task='find a hidden number by "higher" and "lower"',
    turns="up to 10",
    reward="per turn, the information gained by the guess; +1 when found",
    data="made on the spot",
    command="process --env.total_steps 4",
)

WIN = 1.0
TURN_COST = 0.05
UNREADABLE = -0.2
NOT_FOUND = -0.5
NUM_EVAL_ITEMS = 32
PROMPT = (
    "I am thinking of a whole number from 1 to {highest}. Find it in as few guesses as you can; I "
    'answer each with "higher" or "lower". Write a guess as <guess>NUMBER</guess>.'
)


class NumberGuessingEnvConfig(MultiTurnEnvConfig):
    """Settings of the hidden numbers."""

    highest: int = Field(100, ge=2, description="The largest number that may be hidden.")
    seed: int = Field(0, description="Seed of the hidden numbers.")


class GuessingGame(Conversation):
    """One game.

    Attributes:
        low: smallest number that is still possible.
        high: largest number that is still possible.
    """

    def __init__(self, secret: int, *, highest: int, max_turns: int) -> None:
        self.secret = secret
        self.low, self.high = 1, highest
        self.total_information = math.log(highest)
        self.max_turns = max_turns
        self.unfinished_reward = NOT_FOUND + max_turns * UNREADABLE

    def opening(self) -> list[ChatMessage]:
        return [{"role": "user", "content": PROMPT.format(highest=self.high)}]

    async def reply(self, turn: Turn) -> Reply:
        turns_left = self.max_turns - turn.index - 1
        self.unfinished_reward = NOT_FOUND + turns_left * UNREADABLE
        found = re.findall(r"<guess>\s*(\d{1,9})\s*</guess>", turn.answer)
        if not found:
            return Reply("Write a guess as <guess>NUMBER</guess>.", reward=UNREADABLE)
        guess = int(found[-1])
        if guess == self.secret:
            return Reply(reward=WIN + self._narrow(guess, guess), is_done=True)
        if guess < self.secret:
            return Reply("higher", reward=self._narrow(guess + 1, self.high))
        return Reply("lower", reward=self._narrow(self.low, guess - 1))

    def state(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "unfinished": self.unfinished_reward}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.low, self.high = state["low"], state["high"]
        self.unfinished_reward = state["unfinished"]

    def _narrow(self, low: int, high: int) -> float:
        before = self.high - self.low + 1
        self.low, self.high = max(self.low, low), min(self.high, high)
        gained = math.log(before / (self.high - self.low + 1)) / self.total_information
        return gained - TURN_COST


class NumberGuessingEnv(MultiTurnEnv):
    """Games with hidden numbers; an item is the number.

    Attributes:
        iter: games handed out so far; kept in checkpoints.
    """

    name = "number_guessing"
    env_config_cls = NumberGuessingEnvConfig
    config: NumberGuessingEnvConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_turns": 10,
        "max_token_length": 4096,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    async def get_next_item(self) -> int:
        numbers = random.Random(f"{self.config.seed}:{self.iter}")
        self.iter += 1
        return numbers.randint(1, self.config.highest)

    def eval_items(self) -> Sequence[int]:
        num_items = min(NUM_EVAL_ITEMS, self.config.highest)
        return [1 + i * self.config.highest // num_items for i in range(num_items)]

    def start_conversation(self, item: int) -> GuessingGame:
        return GuessingGame(item, highest=self.config.highest, max_turns=self.config.max_turns)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: Any) -> str:
        return f"<guess>{item}</guess>"


if __name__ == "__main__":
    NumberGuessingEnv.cli()
