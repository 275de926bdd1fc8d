"""PixMo questions about a photograph, answered in a few words.

    photograph, question -> [system, user] -> G completions -> tagged answer -> +1 or -1

The data set has URLs; images that are missing, too slow or unreadable are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.images import ImageEnv, answer_tagged, score_text, usable

__all__ = ["PixmoPointExplanationsEnv", "score"]

CARD = EnvironmentCard(
    task="answer a question about a photograph in a few words",
    turns="1",
    reward="+1 right, -1 wrong",
    data="allenai/pixmo-point-explanations from the hub, or `--env.dataset_path`",
    needs="`pip install '.[examples]'`",
    command="process --env.dataset_path environments/data/pixmo_point_explanations_sample "
    "--env.total_steps 4",
)

INSTRUCTIONS = (
    "Answer the question about the picture as briefly as you can. Give the answer alone between "
    "the tags <answer> and </answer> on one line."
)


def score(answer: str, gold: str) -> float:
    """Return 1.0 if the tagged answer equals the gold text, ignoring case, else -1.0."""
    return score_text(answer_tagged(answer), gold)


SAMPLE = Path(__file__).resolve().parent.parent / "data" / "pixmo_point_explanations_sample"


class PixmoPointExplanationsEnv(ImageEnv):
    """Questions about a photograph, answered in a few words."""

    name = "pixmo_point_explanations"
    hub_name = "allenai/pixmo-point-explanations"
    columns = ("image_url", "question", "inline_text")
    image_column = "image_url"
    instructions = INSTRUCTIONS
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    score_answer = staticmethod(score)

    def question(self, row: Mapping[str, Any]) -> str:
        return usable(row["question"])

    def gold(self, row: Mapping[str, Any]) -> str:
        return usable(row["inline_text"])


if __name__ == "__main__":
    PixmoPointExplanationsEnv.cli()
