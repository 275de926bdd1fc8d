"""Solitaire: a formula for the probability of winning a game of patience.

    question -> [system, user] -> G completions -> <formula> -> number
        -> 1.2 less the relative error, from -1 to 1; -1 without a formula

A formula is arithmetic only: numbers, operators and the functions in `FUNCTIONS`, with bounds on
all sizes. Questions are in `sample/`, or in `--env.dataset_path`:

    cd environments/community/solitaire_winning_probability
    python solitaire_winning_probability_env.py process --env.total_steps 4
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import DEEP_THINKING
from atroposlib.utils.local_records import read_splits

__all__ = ["SolitaireConfig", "SolitaireEnv", "evaluate_formula", "grade", "score_formula"]

CARD = EnvironmentCard(
    task="write a formula for the probability of winning a game of patience",
    turns="1",
    reward="1.2 less the relative error of its value, from -1 to 1",
    data="49 questions shipped, or `--env.dataset_path`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
LOWEST = -1.0
MAX_FORMULA_CHARACTERS = 500
MAX_ARGUMENT = 1_000
"""Largest argument of a factorial or a binomial coefficient."""
MAX_POWER_BITS = 10_000
"""Size of powers of integers that are exact; others are powers of floats."""
INSTRUCTIONS = (
    "Give the probability as a formula between <formula> and </formula>, once: one line in the "
    "syntax of Python that may use numbers, + - * / ** and parentheses, and the functions comb(n, "
    "k), perm(n, k), factorial(n), sqrt, exp, log, min and max, such as "
    "<formula>1 - comb(48, 5) / comb(52, 5)</formula>."
)
Number = int | float


class SolitaireConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Source of the questions, and sampling."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File with the columns question and answer, or folder with a train and a test "
        "file; None takes the questions that are shipped.",
    )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int):
        num_bits = base.bit_length() * exponent
        if exponent >= 0 and num_bits <= MAX_POWER_BITS:
            result: int = base**exponent
            return result
    value = float(base) ** float(exponent)
    if isinstance(value, complex):
        raise ValueError("a power is not real")
    return float(value)


def _bounded(function: Callable[..., int]) -> Callable[..., int]:
    def call(*arguments: Number) -> int:
        whole = [int(argument) for argument in arguments]
        if whole != list(arguments) or max(whole) > MAX_ARGUMENT:
            raise ValueError(f"expected integers up to {MAX_ARGUMENT}")
        return function(*whole)

    return call


OPERATORS: Mapping[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "comb": _bounded(math.comb),
    "perm": _bounded(math.perm),
    "factorial": _bounded(math.factorial),
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "min": min,
    "max": max,
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def evaluate_formula(formula: str) -> float | None:
    """Return the finite value of an arithmetic formula; None for any other text.

    `^` is a power. Names other than those of functions and constants, attributes, comparisons and
    keyword arguments are not arithmetic.
    """
    if len(formula) > MAX_FORMULA_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that run into a word
            tree = ast.parse(formula.strip().replace("^", "**"), mode="eval")
        value = float(_value(tree.body))
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None
    return value if math.isfinite(value) else None


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = FUNCTIONS.get(node.func.id)
        if function is not None:
            return function(*map(_value, node.args))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def grade(value: float, gold: float) -> float:
    """Return 1.2 less the relative error, which counts up to 2, in the range from -1 to 1."""
    error = min(abs(gold - value) / gold, 2.0)
    return max(LOWEST, min(1.0, 1.0 - error + 0.2))


def score_formula(answer: str, gold: float) -> float:
    """Return the grade of the formula in the tags; -1.0 without one that has a value."""
    value = evaluate_formula(only_tagged(answer, "formula") or "")
    return LOWEST if value is None else grade(value, gold)


class SolitaireEnv(DatasetItems, SingleTurnEnv):
    """Questions for probabilities; an item is a row with `question` and the number `answer`."""

    name = "solitaire_winning_probability"
    env_config_cls = SolitaireConfig
    config: SolitaireConfig
    columns = ("question", "answer")
    optional_columns = ("formula",)
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "score_timeout_s": 5.0,
        "wandb_name": "solitaire_winning_probability",
    }

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        path = Path(self.config.dataset_path or SAMPLE)
        seed, optional = self.config.dataset_seed, self.optional_columns
        train, test = read_splits(path, self.columns, shuffle_seed=seed, optional=optional)
        return [_with_number(row) for row in train], [_with_number(row) for row in test]

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": f"{DEEP_THINKING}\n\n{INSTRUCTIONS}"},
            {"role": "user", "content": item["question"]},
        ]

    async def score(self, item: Mapping[str, Any], answer: str) -> float:
        """Evaluate the formula in a worker, as a second limit on its work."""
        return await self.score_pool.run(score_formula, answer, item["answer"], default=LOWEST)

    async def evaluate_item(self, item: Mapping[str, Any]) -> dict[str, Any]:
        record = await super().evaluate_item(item)
        return {**record, "gold_answer": item["answer"]}

    def check_gold_answer(self, item: Mapping[str, Any]) -> str:
        return f"<formula>{item['formula'] or item['answer']}</formula>"


def _with_number(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose answer, a text in a CSV file, is a number."""
    try:
        answer = float(row["answer"])
    except (TypeError, ValueError):
        answer = math.nan
    if not 0 < answer <= 1:
        raise ConfigError(
            f"expected the answer to {row['question']!r:.80} to be a probability above 0, got "
            f"{row['answer']!r:.40}"
        )
    return {**row, "answer": answer}


if __name__ == "__main__":
    SolitaireEnv.cli()
