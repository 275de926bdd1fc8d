"""WinoGrande: which of two names or things fills the blank of a sentence.

    sentence with _, A. B. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/winogrande_eval.py evaluate \
        --env.dataset_path environments/data/winogrande_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv

__all__ = ["WinoGrandeEvalEnv"]

CARD = EnvironmentCard(
    task="the blank of a sentence, with two options (WinoGrande)",
    turns="1",
    reward="1 right, 0 wrong",
    data="WinoGrande from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/winogrande_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "winogrande_sample"


class WinoGrandeEvalEnv(ChoiceEvalEnv):
    """WinoGrande, the validation split."""

    name = "winogrande_eval"
    source = CHOICE_SOURCES["winogrande"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    WinoGrandeEvalEnv.cli()
