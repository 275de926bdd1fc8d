r"""PHYBench: problems of physics whose answers are formulas.

    problem -> one chat -> the one \boxed{} -> equal formula? else how far from it?

    python environments/eval_environments/phybench_eval.py evaluate \
        --env.dataset_path environments/data/phybench_sample --env.data_dir_to_save_evals results

Formulas are compared as expressions, in a worker process; one that cannot be read is compared as
text. Problems without an answer in the data set are left out.
Metrics: those of `gsm8k_eval.py`, `tag_{k}_accuracy`, and `eed_score`: 100 for an equal formula, up
to 60 for one that needs few edits, as described in `atroposlib/tasks/expression_distance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import compare_math_strings, only_boxed_answer
from atroposlib.tasks.evaluations import (
    BOXED_SOURCES,
    BoxedEvalConfig,
    BoxedEvalEnv,
    EvalGrade,
    EvalQuestion,
)
from atroposlib.tasks.expression_distance import NOT_COMPUTED, eed_score

__all__ = ["PHYBenchEvalConfig", "PHYBenchEvalEnv"]

CARD = EnvironmentCard(
    task="problems of physics with a formula as answer (PHYBench)",
    turns="1",
    reward="1 right, 0 wrong",
    data="PHYBench from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/phybench_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "phybench_sample"
COMPARISON_LIMIT_S = 40.0
"""Limit of simplifying both formulas and comparing them; over it, they are compared as texts."""


class PHYBenchEvalConfig(BoxedEvalConfig):
    """Settings of PHYBench."""

    thinking_mode: bool = Field(
        False,
        description="Whether to ask the inference server for reasoning and to send "
        "custom_thinking_prompt.",
    )
    compute_eed_score: bool = Field(
        True, description="Whether to report how close wrong formulas are, as eed_score."
    )
    max_samples: int | None = Field(
        None, ge=1, description="Maximum number of problems, from the start of the data set."
    )
    tags_filter: list[str] | None = Field(
        None, description="Tags of the problems to evaluate, such as MECHANICS; None: all."
    )


class PHYBenchEvalEnv(BoxedEvalEnv):
    """PHYBench; an item has the group `tag`."""

    name = "phybench_eval"
    source = BOXED_SOURCES["phybench"]
    env_config_cls = PHYBenchEvalConfig
    config: PHYBenchEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def read_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[EvalQuestion]:
        tags = {tag.lower() for tag in self.config.tags_filter or ()}
        chosen = [
            row
            for row in rows
            if row["answer"] and (not tags or str(row.get("tag")).lower() in tags)
        ]
        return super().read_rows(chosen[: self.config.max_samples])

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        boxed = only_boxed_answer(completion)
        distance, is_correct, method = NOT_COMPUTED, False, boxed.method
        if boxed.text is not None:
            distance = await self.score_pool.run(
                eed_score, item.gold, boxed.text, timeout=COMPARISON_LIMIT_S, default=NOT_COMPUTED
            )
            is_compared = distance.tree_size >= 0
            method = "expression_compare" if is_compared else "string_compare"
            is_correct = distance.score == 100 or (
                not is_compared and compare_math_strings(boxed.text, item.gold)
            )
        score = 100.0 if is_correct else distance.score
        values = {"eed_score": score} if self.config.compute_eed_score else {}
        return EvalGrade(float(is_correct), boxed.text, method, boxed.text is not None, values)


if __name__ == "__main__":
    PHYBenchEvalEnv.cli()
