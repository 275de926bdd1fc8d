"""PubMedQA: questions about the abstract of a medical study, answered with yes, no or maybe.

    abstract, question -> one chat -> <answer>yes</answer> -> right or wrong

    python environments/eval_environments/pubmedqa_eval.py evaluate \
        --env.dataset_path environments/data/pubmedqa_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import answer_part, extract_word_from_answer_tag
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion, EvaluationEnv
from atroposlib.tasks.text_evaluations import PUBMED_DECISIONS, TEXT_SOURCES

__all__ = ["PubMedQAEvalEnv"]

CARD = EnvironmentCard(
    task="yes, no or maybe about a medical study (PubMedQA)",
    turns="1",
    reward="1 right, 0 wrong",
    data="PubMedQA from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/pubmedqa_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "pubmedqa_sample"
REQUEST = "Answer with yes, no or maybe, between <answer> and </answer>."


class PubMedQAEvalEnv(EvaluationEnv):
    """PubMedQA; the gold answer is one of three words."""

    name = "pubmedqa_eval"
    source = TEXT_SOURCES["pubmedqa"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def question_text(self, item: EvalQuestion) -> str:
        return f"{item.question}\n\n{REQUEST}"

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        word, method = extract_word_from_answer_tag(answer_part(completion), PUBMED_DECISIONS)
        return EvalGrade(float(word == item.gold), word, method, word is not None)

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>The groups differ.</think><answer>{item.gold}</answer>"


if __name__ == "__main__":
    PubMedQAEvalEnv.cli()
