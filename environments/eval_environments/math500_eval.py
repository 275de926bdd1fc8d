r"""MATH-500: problems of mathematical competitions in five levels.

    problem -> one chat -> the one \boxed{} -> math-verify in a worker process -> right or wrong

    python environments/eval_environments/math500_eval.py evaluate \
        --env.dataset_path environments/data/math500_sample --env.data_dir_to_save_evals results

Metrics: those of `gsm8k_eval.py`, `subject_{k}_accuracy` and `level_{k}_accuracy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import (
    BOXED_SOURCES,
    BoxedEvalConfig,
    BoxedEvalEnv,
    EvalQuestion,
)

__all__ = ["MATH500EvalConfig", "MATH500EvalEnv"]

CARD = EnvironmentCard(
    task="problems of mathematical competitions (MATH-500)",
    turns="1",
    reward="1 right, 0 wrong",
    data="MATH-500 from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/math500_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "math500_sample"

ORIGINAL_PROMPT = (
    "Solve this mathematics problem step by step. Put your final answer in \\boxed{{}}.\n\n"
    "{problem}"
)


class MATH500EvalConfig(BoxedEvalConfig):
    """Settings of MATH-500."""

    use_original_prompt: bool = Field(
        False,
        description="Whether the request comes before the problem, in two sentences, in place of "
        "after it.",
    )


class MATH500EvalEnv(BoxedEvalEnv):
    """MATH-500; an item has the groups `subject` and `level`."""

    name = "math500_eval"
    source = BOXED_SOURCES["math500"]
    env_config_cls = MATH500EvalConfig
    config: MATH500EvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def question_text(self, item: EvalQuestion) -> str:
        if self.config.use_original_prompt:
            return ORIGINAL_PROMPT.format(problem=item.question)
        return super().question_text(item)


if __name__ == "__main__":
    MATH500EvalEnv.cli()
