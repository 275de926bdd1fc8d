"""ARC: science questions of schools, with three to five options.

    question, A. B. C. D. -> one chat -> <answer>B</answer> -> right or wrong

    python environments/eval_environments/arc_eval.py evaluate \
        --env.dataset_path environments/data/arc_sample --env.data_dir_to_save_evals results

`--env.dataset_subset ARC-Easy` takes the easier part.
Metrics: `accuracy`, `total_evaluated`, `total_correct`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.choice_evaluations import CHOICE_SOURCES, ChoiceEvalEnv

__all__ = ["ARCEvalEnv"]

CARD = EnvironmentCard(
    task="science questions of schools (ARC challenge)",
    turns="1",
    reward="1 right, 0 wrong",
    data="ARC from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/arc_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "arc_sample"


class ARCEvalEnv(ChoiceEvalEnv):
    """ARC, the challenge part."""

    name = "arc_eval"
    source = CHOICE_SOURCES["arc"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    ARCEvalEnv.cli()
