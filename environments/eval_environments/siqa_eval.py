"""Social IQa: what people feel, want and do in everyday situations, with three options.

    context, question, A. B. C. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/siqa_eval.py evaluate \
        --env.dataset_path environments/data/siqa_sample --env.data_dir_to_save_evals results

Metrics: `accuracy`, `total_evaluated`, `total_correct`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv

__all__ = ["SIQAEvalEnv"]

CARD = EnvironmentCard(
    task="questions about people in everyday situations (Social IQa)",
    turns="1",
    reward="1 right, 0 wrong",
    data="Social IQa from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/siqa_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "siqa_sample"


class SIQAEvalEnv(ChoiceEvalEnv):
    """Social IQa, the validation split."""

    name = "siqa_eval"
    source = CHOICE_SOURCES["siqa"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    SIQAEvalEnv.cli()
