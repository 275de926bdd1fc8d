"""HellaSwag: the most plausible continuation of an everyday scene, out of four.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/hellaswag_eval.py evaluate \
        --env.dataset_path environments/data/hellaswag_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`, `activity_{k}_accuracy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv
from atroposlib.tasks.evaluations import EvalQuestion

__all__ = ["HellaSwagEvalEnv"]

CARD = EnvironmentCard(
    task="the most plausible continuation of a scene (HellaSwag)",
    turns="1",
    reward="1 right, 0 wrong",
    data="HellaSwag from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/hellaswag_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "hellaswag_sample"


class HellaSwagEvalEnv(ChoiceEvalEnv):
    """HellaSwag; an item has the group `activity`."""

    name = "hellaswag_eval"
    source = CHOICE_SOURCES["hellaswag"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def question_text(self, item: EvalQuestion) -> str:
        return f"Which option continues this text best?\n\n{super().question_text(item)}"


if __name__ == "__main__":
    HellaSwagEvalEnv.cli()
