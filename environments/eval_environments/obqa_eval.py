"""OpenBookQA: questions about elementary science that need common knowledge, with four options.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/obqa_eval.py evaluate \
        --env.dataset_path environments/data/obqa_sample --env.data_dir_to_save_evals results

Metrics: `eval/accuracy`, `eval/answer_extraction_rate` (replies that name one option).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion

__all__ = ["OBQAEvalEnv"]

CARD = EnvironmentCard(
    task="questions about elementary science (OpenBookQA)",
    turns="1",
    reward="1 right, 0 wrong",
    data="OpenBookQA from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/obqa_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "obqa_sample"


class OBQAEvalEnv(ChoiceEvalEnv):
    """OpenBookQA, the test split."""

    name = "obqa_eval"
    source = CHOICE_SOURCES["obqa"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        grade = await super().grade(item, completion)
        rate = {"eval/answer_extraction_rate": float(grade.answer is not None)}
        return grade._replace(values=rate)


if __name__ == "__main__":
    OBQAEvalEnv.cli()
