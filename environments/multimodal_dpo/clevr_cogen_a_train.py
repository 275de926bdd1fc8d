"""CLEVR counting: the number of objects of a kind in a drawn scene.

picture, question -> [system, user] -> G completions -> boxed number -> +1 or -1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.images import RIGHT, WRONG, ImageEnv, answer_boxed, usable

__all__ = ["MultimodalExampleEnv", "gold_count", "score"]

CARD = EnvironmentCard(
    task="count things in a drawn scene",
    turns="1",
    reward="+1 right, -1 wrong",
    data="leonardPKU/clevr_cogen_a_train from the hub, or `--env.dataset_path`",
    needs="`pip install '.[examples]'`",
    command="process --env.dataset_path environments/data/clevr_cogen_a_train_sample "
    "--env.total_steps 4",
)

INSTRUCTIONS = (
    "Look at the picture and count with care: say in a few sentences what you see and how you "
    "count. Then give the number once, in digits, as \\boxed{number}."
)

_COUNT = re.compile(r"<answer>\s*([0-9]{1,2})\s*</answer>")


def gold_count(solution: str) -> str:
    """Return the one or two digits between the `<answer>` tags of a solution.

    Raises:
        ValueError: the solution states no count.
    """
    found = _COUNT.search(solution)
    if found is None:
        raise ValueError(f"no count in the solution {solution[:60]!r}")
    return found[1]


def score(answer: str, gold: str) -> float:
    """Return 1.0 if the last box holds exactly the gold number, else -1.0."""
    return RIGHT if answer_boxed(answer) == gold else WRONG


SAMPLE = Path(__file__).resolve().parent.parent / "data" / "clevr_cogen_a_train_sample"


class MultimodalExampleEnv(ImageEnv):
    """Questions about the number of objects in a drawn scene."""

    name = "clevr_cogen_a_train"
    hub_name = "leonardPKU/clevr_cogen_a_train"
    columns = ("image", "problem", "solution")
    answer_form = "\\boxed{{{}}}"
    max_tokens = 2048
    instructions = INSTRUCTIONS
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    score_answer = staticmethod(score)

    def question(self, row: Mapping[str, Any]) -> str:
        return usable(row["problem"])

    def gold(self, row: Mapping[str, Any]) -> str:
        return gold_count(row["solution"])


if __name__ == "__main__":
    MultimodalExampleEnv.cli()
