"""Problems to train on and to evaluate with, from the hub or from files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import read_splits
from environments.shared.hub import hub_rows

__all__ = ["MATH_SETS", "SAMPLE", "ZERO_SETS", "EvalSet", "MathProblem", "load_problems"]

logger = logging.getLogger(__name__)

SAMPLE = Path(__file__).parents[1] / "data" / "math_sample"
TRAIN = "zwhe99/DeepMath-103K"
SHUFFLE_SEED = 42


class MathProblem(NamedTuple):
    """One problem."""

    question: str
    answer: str
    r"""The gold answer inside `\boxed{}`."""
    subset: str
    """The evaluation set it belongs to; empty for training."""


class EvalSet(NamedTuple):
    """An evaluation set of the hub."""

    subset: str
    path: str
    split: str
    question: str
    """Its columns."""
    answer: str


MATH_SETS = (
    EvalSet("aime24", "HuggingFaceH4/aime_2024", "train", "problem", "answer"),
    EvalSet("math500", "HuggingFaceH4/math-500", "test", "problem", "answer"),
    EvalSet("amc23", "math-ai/amc23", "test", "question", "answer"),
)
ZERO_SETS = (
    *MATH_SETS,
    EvalSet("minerva", "math-ai/minervamath", "test", "question", "answer"),
    EvalSet("olympiad", "math-ai/olympiadbench", "test", "question", "final_answer"),
)


def load_problems(
    dataset_path: str | None, eval_sets: Sequence[EvalSet]
) -> tuple[list[MathProblem], list[MathProblem]]:
    """Return training problems, shuffled with a fixed seed, and evaluation problems.

    Args:
        dataset_path: file or folder with the columns `question` and `final_answer`, and `subset`
            in the test file if there are several; None loads from the hub.
        eval_sets: those of the hub; none of them for no evaluation.

    Raises:
        ConfigError: something is missing; the message says what. No training problem has an
            answer that is text.
    """
    if dataset_path is not None:
        train_rows, test_rows = read_splits(
            Path(dataset_path),
            ("question", "final_answer"),
            shuffle_seed=SHUFFLE_SEED,
            optional=("subset",),
        )
        test = _problems(test_rows, "question", "final_answer", subset="test")
    else:
        train_rows = hub_rows(TRAIN, split="train", shuffle_seed=SHUFFLE_SEED)
        test = [problem for eval_set in eval_sets for problem in _from_hub(eval_set)]
    train = _problems(train_rows, "question", "final_answer", subset="")
    if not train:
        raise ConfigError(f"{dataset_path or TRAIN} has no problem whose final_answer is text")
    return train, test if eval_sets else []


def _from_hub(eval_set: EvalSet) -> list[MathProblem]:
    rows = hub_rows(eval_set.path, split=eval_set.split)
    return _problems(rows, eval_set.question, eval_set.answer, subset=eval_set.subset)


def _problems(
    rows: Sequence[Mapping[str, Any]], question: str, answer: str, *, subset: str
) -> list[MathProblem]:
    problems = []
    for row in rows:
        gold = row[answer]
        if isinstance(gold, list) and gold:
            gold = gold[0]
        if isinstance(gold, int | float) and not isinstance(gold, bool) and subset:
            gold = _number_text(gold)  # evaluation sets have numbers as well
        if isinstance(gold, str):
            name = str((row.get("subset") if subset == "test" else None) or subset)
            problems.append(MathProblem(row[question], f"\\boxed{{{gold}}}", name))
    if len(problems) < len(rows):
        logger.warning("%d problems left out: answers are no text", len(rows) - len(problems))
    return problems


def _number_text(number: float) -> str:
    """Return every digit of a number, without an exponent."""
    text = format(Decimal(repr(number)), "f")
    return text.removesuffix(".0")
