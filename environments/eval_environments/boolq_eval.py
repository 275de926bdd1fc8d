"""BoolQ: questions about a passage, answered with yes or no.

    passage, question, A. Yes B. No -> one chat -> <answer>A</answer> or yes -> right or wrong

    python environments/eval_environments/boolq_eval.py evaluate \
        --env.dataset_path environments/data/boolq_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`; `yes_accuracy` and `no_accuracy` are those
of the questions whose gold answer is yes or no.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv
from atroposlib.tasks.eval_answers import answer_part, extract_word_from_answer_tag
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion

__all__ = ["BoolQEvalEnv"]

CARD = EnvironmentCard(
    task="yes or no about a passage (BoolQ)",
    turns="1",
    reward="1 right, 0 wrong",
    data="BoolQ from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/boolq_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "boolq_sample"


class BoolQEvalEnv(ChoiceEvalEnv):
    """BoolQ; an item has the group `answer`."""

    name = "boolq_eval"
    source = CHOICE_SOURCES["boolq"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        word, method = extract_word_from_answer_tag(answer_part(completion), ("yes", "no"))
        if word is None and method != "answer_tag_ambiguous":
            return await super().grade(item, completion)
        letter = {"yes": "A", "no": "B"}.get(word or "")
        return EvalGrade(float(letter == item.gold), letter, method, letter is not None)


if __name__ == "__main__":
    BoolQEvalEnv.cli()
