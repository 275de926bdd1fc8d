"""Word sums: arithmetic with large numbers, with a calculator as tools.

    problem -> [user] -> turns that call add, multiply, ... -> <answer>NUMBER</answer> -> 1 or 0

A small penalty for failed calls trains the policy to call the tools correctly. Needs no data:

    python environments/word_sums.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig, Turn
from atroposlib.envs.tools import ToolConversation, ToolResult
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["SumConversation", "WordSum", "WordSumsEnv", "WordSumsEnvConfig"]

CARD = EnvironmentCard(
    task="sums of large numbers, with a calculator as tools",
    turns="up to 6",
    reward="0 or 1; a faulty call -0.1",
    data="made on the spot",
    command="process --env.total_steps 4",
)

ERROR_REWARD = -0.1
NUM_EVAL_ITEMS = 32
STORY = (
    "A depot receives {boxes} boxes with {parts} parts each, and {loose} loose parts. How many "
    "parts is that? End with <answer>NUMBER</answer>."
)


class WordSumsEnvConfig(MultiTurnEnvConfig):
    """Settings of the problems."""

    num_digits: int = Field(4, ge=1, le=12, description="Digits of the numbers in a problem.")
    seed: int = Field(0, description="Seed of the problems.")


class WordSum(NamedTuple):
    """One problem."""

    boxes: int
    parts: int
    loose: int

    @property
    def answer(self) -> int:
        return self.boxes * self.parts + self.loose


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a * b


class SumConversation(ToolConversation):
    """One problem and a calculator."""

    def __init__(self, problem: WordSum) -> None:
        question = STORY.format(**problem._asdict())
        super().__init__([{"role": "user", "content": question}], [add, multiply])
        self.problem = problem

    def state(self) -> list[dict[str, Any]]:
        return [result.model_dump() for result in self.results]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        self.results = [ToolResult(**result) for result in state]

    def reward_of_calls(self, results: Sequence[ToolResult]) -> float:
        return ERROR_REWARD * sum(result.is_error for result in results)

    async def score(self, turn: Turn) -> float:
        found = re.findall(r"<answer>\s*([\d,]{1,40})\s*</answer>", turn.answer)
        return float(bool(found) and found[-1].replace(",", "") == str(self.problem.answer))


class WordSumsEnv(MultiTurnEnv):
    """Problems with large numbers.

    Attributes:
        iter: problems handed out so far; kept in checkpoints.
    """

    name = "word_sums"
    env_config_cls = WordSumsEnvConfig
    config: WordSumsEnvConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_turns": 6,
        "max_token_length": 4096,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    async def get_next_item(self) -> WordSum:
        source = random.Random(f"{self.config.seed}:{self.iter}")
        self.iter += 1
        return self._make_problem(source)

    def eval_items(self) -> Sequence[WordSum]:
        fixed = random.Random(f"evaluation {self.config.seed}")
        return [self._make_problem(fixed) for _ in range(NUM_EVAL_ITEMS)]

    def start_conversation(self, item: WordSum) -> SumConversation:
        return SumConversation(item)

    def encode_item(self, item: WordSum) -> list[int]:
        return list(item)

    def decode_item(self, encoded: list[int]) -> WordSum:
        return WordSum(*encoded)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: WordSum) -> Any:
        return f"<answer>{item.answer}</answer>"

    def _make_problem(self, source: random.Random) -> WordSum:
        low, high = 10 ** (self.config.num_digits - 1), 10**self.config.num_digits - 1
        return WordSum(*(source.randint(low, high) for _ in range(3)))


if __name__ == "__main__":
    WordSumsEnv.cli()
