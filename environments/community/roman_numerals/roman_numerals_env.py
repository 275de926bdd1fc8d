"""Roman numerals: convert numbers up to 3,999 in both directions.

    number, direction -> [user] -> G completions -> <answer> -> equal? -> parts of the score

An answer without the tags earns nothing, a wrong one in tags 0.1, so that the form is learned
first. Needs no data:

    python environments/community/roman_numerals/roman_numerals_env.py process --env.total_steps 4
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["Numeral", "RomanNumeralsConfig", "RomanNumeralsEnv", "score_numeral", "to_roman"]

CARD = EnvironmentCard(
    task="convert Roman numerals, in both directions",
    turns="1",
    reward="0.1 for the tags, 0.9 for the right answer",
    data="made on the spot",
    command="process --env.total_steps 4",
)

LARGEST = 3999
NUM_EVAL_ITEMS = 64
SYMBOLS = {
    1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X",
    9: "IX", 5: "V", 4: "IV", 1: "I",
}  # fmt: skip
QUESTION = "Write {given} {target}. Put the result between <answer> and </answer>."


class RomanNumeralsConfig(SingleTurnEnvConfig):
    """Settings of the numbers."""

    max_number: int = Field(
        LARGEST, ge=1, le=LARGEST, description="Largest number that is asked for."
    )
    seed: int = Field(0, description="Seed of the numbers.")


class Numeral(NamedTuple):
    """One question."""

    number: int
    is_to_roman: bool
    """Whether the number is given, and the numeral is the answer."""

    @property
    def answer(self) -> str:
        return to_roman(self.number) if self.is_to_roman else str(self.number)


def to_roman(number: int) -> str:
    """Return the numeral of a number from 1 to 3,999."""
    numeral = ""
    for value, symbol in SYMBOLS.items():
        count, number = divmod(number, value)
        numeral += symbol * count
    return numeral


def score_numeral(answer: str, item: Numeral) -> dict[str, float]:
    """Return the parts `format` and `answer` of the score."""
    found = only_tagged(answer, "answer")
    if not found:
        return {"format": 0.0, "answer": 0.0}
    given = found if item.is_to_roman else re.sub(r"(?<=\d),(?=\d{3}$)", "", found)
    return {"format": 0.1, "answer": 0.9 * (given == item.answer)}


class RomanNumeralsEnv(SingleTurnEnv):
    """Numbers to convert; an item is a `Numeral`.

    Attributes:
        iter: questions made so far; kept in checkpoints.
    """

    name = "roman_numerals"
    env_config_cls = RomanNumeralsConfig
    config: RomanNumeralsConfig
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {"group_size": 8, "max_token_length": 2048}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    async def get_next_item(self) -> Numeral:
        self.iter += 1
        return self._make(f"{self.config.seed} {self.iter}")

    def eval_items(self) -> Sequence[Numeral]:
        return [self._make(f"evaluation {self.config.seed} {i}") for i in range(NUM_EVAL_ITEMS)]

    def prompt(self, item: Numeral) -> list[dict[str, str]]:
        given, target = to_roman(item.number), "as a number in digits"
        if item.is_to_roman:
            given, target = str(item.number), "as a Roman numeral"
        return [{"role": "user", "content": QUESTION.format(given=given, target=target)}]

    async def score(self, item: Numeral, answer: str) -> dict[str, float]:
        return score_numeral(answer, item)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: Numeral) -> str:
        return f"<answer>{item.answer}</answer>"

    def _make(self, seed: str) -> Numeral:
        source = random.Random(seed)
        return Numeral(source.randint(1, self.config.max_number), source.random() < 0.5)


if __name__ == "__main__":
    RomanNumeralsEnv.cli()
