"""Humanity's Last Exam: questions for experts of many fields, with a short answer.

    question -> one chat -> <answer>text</answer> -> equal? contains the gold answer? same number?

    python environments/eval_environments/hle_eval.py evaluate \
        --env.dataset_path environments/data/hle_sample --env.data_dir_to_save_evals results

Questions with an image are left out. A gold answer of one capital letter is an option, and the
reply names it and no other. The hub asks for an account that has accepted its conditions.
Metrics: `accuracy`, `total_evaluated`, `total_correct`, `category_{k}_accuracy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import (
    answer_part,
    compare_math_strings,
    extract_letter_from_answer_tag,
    with_leading_zeros,
)
from atroposlib.tasks.evaluations import EvalFamilyConfig, EvalGrade, EvalQuestion
from atroposlib.tasks.text_evaluations import TEXT_SOURCES, TextEvalEnv, contains_words

__all__ = ["HLEEvalConfig", "HLEEvalEnv", "is_same_answer"]

CARD = EnvironmentCard(
    task="questions for experts of many fields (Humanity's Last Exam)",
    turns="1",
    reward="1 right, 0 wrong",
    data="HLE from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/hle_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "hle_sample"
AROUND_WORDS = ".,:;!?\"'`*_()[]{}$"


class HLEEvalConfig(EvalFamilyConfig):
    """Settings of Humanity's Last Exam."""

    fuzzy_match: bool = Field(
        True,
        description="Whether an answer is also right if the words of the gold answer occur in it, "
        "in order, or if both are the same number.",
    )
    case_sensitive: bool = Field(False, description="Whether upper and lower case differ.")


class HLEEvalEnv(TextEvalEnv):
    """Humanity's Last Exam without images; an item has the group `category`."""

    name = "hle_eval"
    source = TEXT_SOURCES["hle"]
    env_config_cls = HLEEvalConfig
    config: HLEEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def read_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[EvalQuestion]:
        return super().read_rows([row for row in rows if not row.get("image")])

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        [[gold]] = item.gold
        if gold not in tuple(ascii_uppercase):
            return await super().grade(item, completion)
        letter, method = extract_letter_from_answer_tag(answer_part(completion), ascii_uppercase)
        return EvalGrade(float(letter == gold), letter, method, letter is not None)

    async def grade_text(self, item: EvalQuestion, answer: str | None, method: str) -> EvalGrade:
        [[gold]] = item.gold
        is_correct = answer is not None and is_same_answer(
            answer,
            gold,
            is_fuzzy=self.config.fuzzy_match,
            is_case_sensitive=self.config.case_sensitive,
        )
        return EvalGrade(float(is_correct), answer, method, answer is not None)


def is_same_answer(answer: str, gold: str, *, is_fuzzy: bool, is_case_sensitive: bool) -> bool:
    """Return whether an answer equals the gold answer, apart from spaces and punctuation around.

    Symbols within words count: `1/2` is not `12`, and does not contain `2`.

    Args:
        answer: the text between the tags.
        gold: the gold answer.
        is_fuzzy: Whether an answer that contains the words of the gold answer, in order and
            adjacent, or that is the same number, is also right.
        is_case_sensitive: Whether upper and lower case differ.
    """
    if not is_case_sensitive:
        answer, gold = answer.lower(), gold.lower()
    given, wanted = _words(answer), _words(gold)
    if not wanted:
        return answer.strip() == gold.strip()
    if _joined(given) == _joined(wanted):
        return True
    is_number = not any(character.isalpha() for character in gold)
    return is_fuzzy and (
        contains_words(given, wanted) or (is_number and compare_math_strings(answer, gold))
    )


def _joined(words: Sequence[str]) -> str:
    """Return words without spaces, except between digits: `1, 2` is not 12."""
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(words))


def _words(text: str) -> list[str]:
    plain = with_leading_zeros(text.replace("\u2212", "-"))
    words = (word.strip(AROUND_WORDS) for word in plain.split())
    return [word for word in words if word not in {"", "the", "The"}]


if __name__ == "__main__":
    HLEEvalEnv.cli()
