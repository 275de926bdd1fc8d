r"""OlympiadBench: open problems of mathematical olympiads, some with several answers.

    problem -> one chat -> the one \boxed{} -> math-verify in a worker process -> right or wrong

    python environments/eval_environments/olympiadbench_eval.py evaluate \
        --env.dataset_path environments/data/olympiadbench_sample --env.data_dir_to_save_evals out

The prompt names the unit of an answer, and asks for commas between several answers.
Metrics: those of `gsm8k_eval.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import BOXED_SOURCES, BoxedEvalEnv

__all__ = ["OlympiadBenchEvalEnv"]

CARD = EnvironmentCard(
    task="problems of mathematical olympiads (OlympiadBench)",
    turns="1",
    reward="1 right, 0 wrong",
    data="OlympiadBench from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/olympiadbench_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "olympiadbench_sample"


class OlympiadBenchEvalEnv(BoxedEvalEnv):
    """OlympiadBench, the mathematical problems in English without images."""

    name = "olympiadbench_eval"
    source = BOXED_SOURCES["olympiadbench"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}


if __name__ == "__main__":
    OlympiadBenchEvalEnv.cli()
