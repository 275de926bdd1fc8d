"""MMLU: questions from 57 subjects with four options.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/mmlu_eval.py evaluate \
        --env.dataset_path environments/data/mmlu_sample --env.data_dir_to_save_evals results

Metrics: `eval/overall_accuracy`, `eval/category_{k}_accuracy`, `eval/subject_{k}_accuracy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import (
    CHOICE_SOURCES,
    MMLU_CATEGORIES,
    ChoiceEvalEnv,
    FewShotEvalConfig,
)
from atroposlib.tasks.evaluations import EvalQuestion, metric_key
from atroposlib.utils.text import near_name

__all__ = ["MMLUEvalConfig", "MMLUEvalEnv"]

CARD = EnvironmentCard(
    task="questions from 57 subjects with four options (MMLU)",
    turns="1",
    reward="1 right, 0 wrong",
    data="MMLU from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/mmlu_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "mmlu_sample"

CATEGORY_OF = {name: category for category, names in MMLU_CATEGORIES.items() for name in names}


class MMLUEvalConfig(FewShotEvalConfig):
    """Settings of MMLU."""

    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")
    subjects: list[str] | None = Field(
        None, description="Subjects to evaluate, such as astronomy; None: all 57."
    )
    include_subject_in_prompt: bool = Field(
        False, description="Whether each question starts with the name of its subject."
    )


class MMLUEvalEnv(ChoiceEvalEnv):
    """MMLU; an item has the groups `subject` and `category`."""

    name = "mmlu_eval"
    source = CHOICE_SOURCES["mmlu"]
    env_config_cls = MMLUEvalConfig
    config: MMLUEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def check_inputs(cls, config: Any) -> None:
        super().check_inputs(config)
        for name in config.subjects or () if config.dataset_path is None else ():
            if name not in CATEGORY_OF:
                raise ConfigError(
                    f"env.subjects: {name!r} is not a subject of MMLU{near_name(name, CATEGORY_OF)}"
                )

    def subsets_of(self, name: str) -> Sequence[str | None]:
        if self.config.subjects and name == self.source.path:
            return self.config.subjects
        return super().subsets_of(name)

    def read_rows(self, rows: Sequence[Any]) -> list[EvalQuestion]:
        """Convert the rows of the chosen subjects, and add their categories."""
        wanted = self.config.subjects
        chosen = [row for row in rows if not wanted or row.get("subject") in wanted]
        return [_with_category(question) for question in super().read_rows(chosen)]

    def question_text(self, item: EvalQuestion) -> str:
        subject = dict(item.groups).get("subject")
        text = super().question_text(item)
        if not self.config.include_subject_in_prompt or subject is None:
            return text
        return f"Subject: {subject.replace('_', ' ')}\n\n{text}"


def _with_category(question: EvalQuestion) -> EvalQuestion:
    subject = dict(question.groups).get("subject")
    category = CATEGORY_OF.get(metric_key(subject)) if subject else None
    if category is None:
        return question
    return question._replace(groups=(*question.groups, ("category", category)))


if __name__ == "__main__":
    MMLUEvalEnv.cli()
