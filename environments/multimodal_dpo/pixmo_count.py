"""PixMo counting: the number of objects of a kind in a photograph.

    photograph, kind -> [system, user] -> G completions -> tagged number -> +1 or -1

The data set has URLs; images that are missing, too slow or unreadable are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.images import ImageEnv, answer_tagged, score_text, usable

__all__ = ["PixmoCountEnv", "score"]

CARD = EnvironmentCard(
    task="count things in a photograph",
    turns="1",
    reward="+1 right, -1 wrong",
    data="allenai/pixmo-count from the hub, or `--env.dataset_path`",
    needs="`pip install '.[examples]'`",
    command="process --env.dataset_path environments/data/pixmo_count_sample --env.total_steps 4",
)

INSTRUCTIONS = (
    "Count what the question asks for in the picture, each thing once. Give the number in digits, "
    "without any further words, between the tags <answer> and </answer> on one line."
)
QUESTION = "How many of these are in the picture: {label}?"


def score(answer: str, gold: str) -> float:
    """Return 1.0 if the tagged answer is the gold number, else -1.0."""
    return score_text(answer_tagged(answer), gold)


SAMPLE = Path(__file__).resolve().parent.parent / "data" / "pixmo_count_sample"


class PixmoCountEnv(ImageEnv):
    """Questions about the number of objects in a photograph."""

    name = "pixmo_count"
    hub_name = "allenai/pixmo-count"
    columns = ("image_url", "label", "count")
    image_column = "image_url"
    instructions = INSTRUCTIONS
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    score_answer = staticmethod(score)

    def question(self, row: Mapping[str, Any]) -> str:
        return QUESTION.format(label=usable(row["label"]))

    def gold(self, row: Mapping[str, Any]) -> str:
        return usable(row["count"])


if __name__ == "__main__":
    PixmoCountEnv.cli()
