r"""AIMO: problems of the first AI Mathematical Olympiad prize, whose answers are integers.

    problem -> one chat -> the one \boxed{} -> math-verify in a worker process -> right or wrong

    python environments/eval_environments/aimo_eval.py evaluate \
        --env.dataset_path environments/data/aimo_sample --env.data_dir_to_save_evals results

Metrics: those of `gsm8k_eval.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import BOXED_SOURCES, BoxedEvalEnv

__all__ = ["AIMOEvalEnv"]

CARD = EnvironmentCard(
    task="olympiad problems with integer answers (AIMO progress prize 1)",
    turns="1",
    reward="1 right, 0 wrong",
    data="AIMO from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/aimo_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "aimo_sample"


class AIMOEvalEnv(BoxedEvalEnv):
    """The problems of the first AIMO progress prize."""

    name = "aimo_eval"
    source = BOXED_SOURCES["aimo"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    AIMOEvalEnv.cli()
