"""GPQA: questions for experts of biology, chemistry and physics, with four options.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/gpqa_eval.py evaluate \
        --env.dataset_path environments/data/gpqa_sample --env.data_dir_to_save_evals results

The data set lists the correct option first; the order of the options depends on the question and
`--env.shuffle_seed`. The hub asks for an account that has accepted its conditions.
Metrics: `eval/overall_accuracy`, `eval/subdomain_{k}_accuracy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv

__all__ = ["GPQAEvalEnv"]

CARD = EnvironmentCard(
    task="questions for experts of the sciences (GPQA diamond)",
    turns="1",
    reward="1 right, 0 wrong",
    data="GPQA from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/gpqa_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "gpqa_sample"


class GPQAEvalEnv(ChoiceEvalEnv):
    """GPQA diamond; an item has the group `subdomain`."""

    name = "gpqa_eval"
    source = CHOICE_SOURCES["gpqa"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    GPQAEvalEnv.cli()
