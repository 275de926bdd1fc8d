"""DROP: questions about a passage that need counting, comparing and arithmetic.

    passage, question -> one chat -> <answer>text</answer> -> exact match and F1 of words

    python environments/eval_environments/drop_eval.py evaluate \
        --env.dataset_path environments/data/drop_sample --env.data_dir_to_save_evals results

Metrics: `eval/accuracy` (normalized exact match with one of the accepted answers), `eval/avg_f1`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.evaluations import EvalGrade, EvalQuestion
from atroposlib.tasks.text_evaluations import (
    TEXT_SOURCES,
    TextEvalEnv,
    best_drop_match,
)

__all__ = ["DROPEvalEnv"]

CARD = EnvironmentCard(
    task="questions about a passage, with numbers, spans and dates (DROP)",
    turns="1",
    reward="1 exact match with an accepted answer, else 0",
    data="DROP from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/drop_sample",
)
SAMPLE = Path(__file__).parents[1] / "data" / "drop_sample"


class DROPEvalEnv(TextEvalEnv):
    """DROP; the gold answer is a list of accepted answers, each of one or more spans."""

    name = "drop_eval"
    source = TEXT_SOURCES["drop"]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    async def grade_text(self, item: EvalQuestion, answer: str | None, method: str) -> EvalGrade:
        is_equal, f1 = best_drop_match(answer, item.gold) if answer else (False, 0.0)
        return EvalGrade(float(is_equal), answer, method, answer is not None, {"eval/avg_f1": f1})


if __name__ == "__main__":
    DROPEvalEnv.cli()
