"""MuSR: long stories with a question that needs several steps, with numbered options.

    story, question, 1. 2. 3. -> one chat -> <answer>2</answer> -> right or wrong

    python environments/eval_environments/musr_eval.py evaluate \
        --env.dataset_path environments/data/musr_sample --env.data_dir_to_save_evals results

`--env.subset object_placements` takes another part of the data set.
Metrics: `eval/accuracy`, `eval/answer_extraction_rate` (replies that name one option).
"""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar, Literal

from pydantic import Field

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalConfig, ChoiceEvalEnv
from atroposlib.tasks.eval_answers import answer_part, extract_number_from_answer_tag
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion

__all__ = ["MuSREvalConfig", "MuSREvalEnv"]

CARD = EnvironmentCard(
    task="stories with a question that needs several steps (MuSR)",
    turns="1",
    reward="1 right, 0 wrong",
    data="MuSR from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/musr_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "musr_sample"
REQUEST = (
    "Choose one option. End your reply with its number between <answer> and </answer>, as in "
    "<answer>1</answer>."
)


class MuSREvalConfig(ChoiceEvalConfig):
    """Settings of MuSR."""

    subset: Literal["murder_mysteries", "object_placements", "team_allocation"] = Field(
        "murder_mysteries", description="Part of the data set of the hub, where it is a split."
    )


class MuSREvalEnv(ChoiceEvalEnv):
    """MuSR; its options are numbered from 1."""

    name = "musr_eval"
    source = CHOICE_SOURCES["musr"]
    env_config_cls = MuSREvalConfig
    config: MuSREvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @property
    def split(self) -> str:
        return self.config.dataset_split or self.config.subset

    def question_text(self, item: EvalQuestion) -> str:
        options = (f"{number}. {text}" for number, text in enumerate(item.choices, 1))
        return "\n".join([item.question, "", *options, "", REQUEST])

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        number, method = extract_number_from_answer_tag(answer_part(completion), len(item.choices))
        is_found = number is not None
        answer = str(number) if is_found else None
        rate = {"eval/answer_extraction_rate": float(is_found)}
        return EvalGrade(float(answer == self.gold_text(item)), answer, method, is_found, rate)

    def gold_text(self, item: EvalQuestion) -> str:
        return str(ascii_uppercase.index(item.gold) + 1)

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>I go through the story.</think><answer>{self.gold_text(item)}</answer>"


if __name__ == "__main__":
    MuSREvalEnv.cli()
