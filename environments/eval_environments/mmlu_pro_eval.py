"""MMLU-Pro: harder questions with up to ten options.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/mmlu_pro_eval.py evaluate \
        --env.dataset_path environments/data/mmlu_pro_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`, `category_{k}_accuracy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv, FewShotEvalConfig

__all__ = ["MMLUProEvalEnv"]

CARD = EnvironmentCard(
    task="questions with up to ten options (MMLU-Pro)",
    turns="1",
    reward="1 right, 0 wrong",
    data="MMLU-Pro from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/mmlu_pro_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "mmlu_pro_sample"


class MMLUProEvalEnv(ChoiceEvalEnv):
    """MMLU-Pro; an item has the group `category`."""

    name = "mmlu_pro_eval"
    source = CHOICE_SOURCES["mmlu_pro"]
    env_config_cls = FewShotEvalConfig
    config: FewShotEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    MMLUProEvalEnv.cli()
