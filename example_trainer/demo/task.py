"""The problems of the demo, generated and scored by the environment's code.

The training problems and the held-out problems of a seed are disjoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from example_trainer.cli import require_extra

if TYPE_CHECKING:
    from atroposlib.tasks.reasoning_gym import ReasoningGymEnvConfig, TaskItem


@dataclass(frozen=True)
class Problem:
    """One problem of the environment."""

    item: TaskItem
    messages: list[dict[str, str]]
    """The prompt."""

    @property
    def worked_solution(self) -> str:
        """A completion with all steps and the answer."""
        return worked_sum(str(self.item.entry["metadata"]["expression"]))

    @property
    def direct_solution(self) -> str:
        """A completion with the answer only."""
        return f"<answer>{self.item.entry['answer']}</answer>"

    def is_correct(self, completion: str) -> bool:
        """Return whether the environment gives a completion the full score."""
        from atroposlib.tasks.reasoning_gym import score_completion

        return score_completion(completion, self.item) >= 1.0


def worked_sum(expression: str) -> str:
    """Compute a sum from left to right, with one equation per operator, then the answer.

    `4 - 1 - 7` gives `4 - 1 = 3 ; 3 - 7 = -4 <answer>-4</answer>`.

    Raises:
        ValueError: `expression` is not a sequence of integers joined by + and -.
    """
    if not re.fullmatch(r"-?\d+( [+-] -?\d+)*", expression):
        raise ValueError(f"not a sum of integers: {expression!r}")
    first, *rest = expression.split(" ")
    total = int(first)
    equations = []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        equations.append(f"{total} {sign} {number} = {result}")
        total = result
    return f"{' ; '.join(equations)} <answer>{total}</answer>".lstrip()


def held_out_problems(env_settings: Mapping[str, Any]) -> list[Problem]:
    """Return the environment's evaluation set, which is disjoint from its training set."""
    config = _config(env_settings)
    from atroposlib.tasks.reasoning_gym import eval_items

    with require_extra("examples"):
        return [_problem(item, config) for item in eval_items(config)]


def training_problems(env_settings: Mapping[str, Any], count: int) -> list[Problem]:
    """Return the first `count` training problems of the environment."""
    config = _config(env_settings)
    from atroposlib.tasks.reasoning_gym import train_item

    with require_extra("examples"):
        return [_problem(train_item(config, index), config) for index in range(count)]


def _config(env_settings: Mapping[str, Any]) -> ReasoningGymEnvConfig:
    from atroposlib.tasks.reasoning_gym import ReasoningGymEnvConfig

    return ReasoningGymEnvConfig(**env_settings)


def _problem(item: TaskItem, config: ReasoningGymEnvConfig) -> Problem:
    from atroposlib.tasks.reasoning_gym import prompt_messages

    return Problem(item, prompt_messages(item, config))
