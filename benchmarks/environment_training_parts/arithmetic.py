"""Reasoning gym's basic arithmetic: two or three one-digit numbers, precedence included.

The player works an expression out, products first, and slips in one equation of five.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment_training_parts.lesson import Lesson, Messages, WarmUp
from example_trainer.demo.settings import DemoSettings
from example_trainer.demo.task import training_problems
from example_trainer.launch.report import SHARE_RIGHT

__all__ = ["arithmetic", "worked_out"]

TASK = "basic_arithmetic"
PARAMS = {
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+", "-", "*"],
    "allow_parentheses": False,
    "allow_negation": False,
}
SLIP_SHARE = 0.2
NUM_HELD_OUT = 512
CORRECT = 0.5
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
PRECEDENCE = (("*",), ("+", "-"))


def arithmetic(folder: Path, seed: int) -> Lesson:
    """Return the lesson; `folder` is not needed."""
    env: dict[str, Any] = {
        "task_names": [TASK],
        "task_params": {TASK: PARAMS},
        "system_prompt": "Give the answer in <answer> tags.",
        "seed": seed,
        "eval_seed": 1_000_003 + seed,
        "num_eval_samples_per_task": NUM_HELD_OUT,
        "top_p": 1.0,
        "num_score_workers": 0,
    }

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        for problem in training_problems(env, count):
            text = worked_out(str(problem.item.entry["metadata"]["expression"]), rng)
            yield [*problem.messages, {"role": "assistant", "content": text}]

    return Lesson(
        settings=DemoSettings(seed=seed, steps=40, task=None, environment_sections={"env": env}),
        evaluation={"eval_temperature": 1.0, "eval_budget_factor": 1.0},
        warm_up=WarmUp(steps=240, num_conversations=8_000),
        conversations=conversations,
        measure=f"accuracy on {NUM_HELD_OUT} problems never trained on",
        value=lambda score: float(score >= CORRECT),
        reward=SHARE_RIGHT,
    )


def worked_out(expression: str, rng: random.Random) -> str:
    """Work an expression out, one equation per operation, and answer; now and then with a slip.

    Without a slip `2 + 3 * 4` gives `3 * 4 = 12 ; 2 + 12 = 14 <answer>14</answer>`.
    """
    first, *rest = expression.split(" ")
    numbers = [int(first), *map(int, rest[1::2])]
    operators = rest[::2]
    equations = []
    for rank in PRECEDENCE:
        index = 0
        while index < len(operators):
            if operators[index] not in rank:
                index += 1
                continue
            left, right = numbers[index : index + 2]
            operator = operators.pop(index)
            result = OPERATIONS[operator](left, right)
            if rng.random() < SLIP_SHARE:
                result += rng.choice((-2, -1, 1, 2))
            equations.append(f"{left} {operator} {right} = {result}")
            numbers[index : index + 2] = [result]
    return f"{' ; '.join(equations)} <answer>{numbers[0]}</answer>"
