"""OCR-VQA: questions that are answered by reading a book cover.

cover, question -> [system, user] -> G completions -> tagged answer -> +1 or -1
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.images import ImageEnv, answer_tagged, score_text, usable

__all__ = ["OcrVqaEnv", "score"]

CARD = EnvironmentCard(
    task="read a book cover",
    turns="1",
    reward="+1 right, -1 wrong",
    data="howard-hou/OCR-VQA from the hub, or `--env.dataset_path`",
    needs="`pip install '.[examples]'`",
    command="process --env.dataset_path environments/data/ocr_vqa_sample --env.total_steps 4",
)

INSTRUCTIONS = (
    "Read the text in the picture and answer the question about it. Give the answer as it is "
    "printed, without any further words, between the tags <answer> and </answer> on one line."
)


def score(answer: str, gold: str) -> float:
    """Return 1.0 if the tagged answer equals the gold one, ignoring case, else -1.0."""
    return score_text(answer_tagged(answer), gold)


SAMPLE = Path(__file__).resolve().parent.parent / "data" / "ocr_vqa_sample"


class OcrVqaEnv(ImageEnv):
    """Questions about the text on a book cover."""

    name = "ocr_vqa"
    hub_name = "howard-hou/OCR-VQA"
    columns = ("image", "questions", "answers")
    instructions = INSTRUCTIONS
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    score_answer = staticmethod(score)

    def question(self, row: Mapping[str, Any]) -> str:
        return usable(row["questions"])

    def gold(self, row: Mapping[str, Any]) -> str:
        return usable(row["answers"])


if __name__ == "__main__":
    OcrVqaEnv.cli()
