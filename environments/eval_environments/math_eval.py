r"""MATH: problems of mathematical competitions, seven subjects in five levels.

    problem -> one chat -> the one \boxed{} -> math-verify in a worker process -> right or wrong

    python environments/eval_environments/math_eval.py evaluate \
        --env.dataset_path environments/data/math_eval_sample --env.data_dir_to_save_evals results

The gold answer is the last box of the solution. `--env.dataset_subset geometry` takes one subject.
Metrics: those of `gsm8k_eval.py`, `subject_{k}_accuracy` and `level_{k}_accuracy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import BOXED_SOURCES, BoxedEvalEnv

__all__ = ["MATHEvalEnv"]

CARD = EnvironmentCard(
    task="problems of mathematical competitions (MATH)",
    turns="1",
    reward="1 right, 0 wrong",
    data="MATH from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/math_eval_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "math_eval_sample"


class MATHEvalEnv(BoxedEvalEnv):
    """MATH; an item has the groups `type` (its subject) and `level`."""

    name = "math_eval"
    source = BOXED_SOURCES["math"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    MATHEvalEnv.cli()
