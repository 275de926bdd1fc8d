"""PIQA: which of two ways reaches an everyday goal.

    goal, A. B. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/piqa_eval.py evaluate \
        --env.dataset_path environments/data/piqa_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv

__all__ = ["PIQAEvalEnv"]

CARD = EnvironmentCard(
    task="ways to reach everyday goals (PIQA)",
    turns="1",
    reward="1 right, 0 wrong",
    data="PIQA from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/piqa_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "piqa_sample"


class PIQAEvalEnv(ChoiceEvalEnv):
    """PIQA, the validation split."""

    name = "piqa_eval"
    source = CHOICE_SOURCES["piqa"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    PIQAEvalEnv.cli()
