"""CLEVR questions of several steps about a drawn scene.

picture, question -> [system, user] -> G completions -> boxed answer -> +1 or -1
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.answers import tagged_answer
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.images import RIGHT, WRONG, ImageEnv, answer_boxed, usable

__all__ = ["MultimodalComplexEnv", "score"]

CARD = EnvironmentCard(
    task="questions of several steps about a drawn scene",
    turns="1",
    reward="+1 right, -1 wrong",
    data="MMInstruction/Clevr_CoGenT_TrainA_70K_Complex from the hub, or `--env.dataset_path`",
    needs="`pip install '.[examples]'`",
    command="process --env.dataset_path environments/data/clevr_complex_sample --env.total_steps 4",
)

INSTRUCTIONS = (
    "Look at the picture and answer the question about it. Take its steps one after the other and "
    "say what each gives. Then give the answer once, as a number or a single word, in the form "
    "\\boxed{answer}."
)

YES_NO = ("yes", "no")


def score(answer: str, gold: str) -> float:
    """Return 1.0 if the last box holds the gold answer, else -1.0; only yes and no ignore case."""
    found = answer_boxed(answer)
    if gold.lower() in YES_NO:
        return RIGHT if found.lower() == gold.lower() else WRONG
    return RIGHT if found == gold else WRONG


SAMPLE = Path(__file__).resolve().parent.parent / "data" / "clevr_complex_sample"


class MultimodalComplexEnv(ImageEnv):
    """Questions of several steps about a drawn scene."""

    name = "clevr_complex"
    hub_name = "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex"
    columns = ("image", "problem", "solution")
    answer_form = "\\boxed{{{}}}"
    max_tokens = 2048
    instructions = INSTRUCTIONS
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    score_answer = staticmethod(score)

    def question(self, row: Mapping[str, Any]) -> str:
        return usable(row["problem"])

    def gold(self, row: Mapping[str, Any]) -> str:
        return usable(
            tagged_answer(row["solution"]) or answer_boxed(row["solution"]) or row["solution"]
        )


if __name__ == "__main__":
    MultimodalComplexEnv.cli()
