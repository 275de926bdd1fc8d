"""BIG-Bench Hard: reasoning tasks with options, each a part of the data set.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/bbh_eval.py evaluate \
        --env.dataset_path environments/data/bbh_sample --env.data_dir_to_save_evals results

`--env.dataset_subset date_understanding` takes one task.
Metrics: `accuracy`, `total_evaluated`, `total_correct`, `subset_{k}_accuracy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv

__all__ = ["BBHEvalEnv"]

CARD = EnvironmentCard(
    task="reasoning tasks with options (BIG-Bench Hard)",
    turns="1",
    reward="1 right, 0 wrong",
    data="BIG-Bench Hard from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/bbh_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "bbh_sample"


class BBHEvalEnv(ChoiceEvalEnv):
    """BIG-Bench Hard; an item has the group `subset`."""

    name = "bbh_eval"
    source = CHOICE_SOURCES["bbh"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    BBHEvalEnv.cli()
