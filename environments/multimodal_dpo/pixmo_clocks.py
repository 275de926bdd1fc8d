"""Clocks: the time on a clock face.

    clock -> [system, user] -> G completions -> tagged time -> +1 or -1

Times are equal if the hands show the same: 3:05 and 03:05, or 0:05 and 12:05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.images import RIGHT, WRONG, ImageEnv, answer_tagged, usable

__all__ = ["ClockDatasetEnv", "clock_time", "score"]

CARD = EnvironmentCard(
    task="read the time from a clock face",
    turns="1",
    reward="+1 right, -1 wrong",
    data="junyeong-nero/clock-dataset from the hub, or `--env.dataset_path`",
    needs="`pip install '.[examples]'`",
    command="process --env.dataset_path environments/data/pixmo_clocks_sample --env.total_steps 4",
)

INSTRUCTIONS = (
    "Look at the hands of the clock: the short one tells the hour, the long one the minute. Give "
    "the time as hour and two digits of minutes, such as <answer>7:40</answer>."
)
QUESTION = "What time does this clock show?"

_TIME = re.compile(r"([0-9]{1,2})\s*:\s*([0-9]{2})")
HOURS_OF_DIAL = 12


def clock_time(text: str) -> tuple[int, int] | None:
    """Return hour (0 to 11) and minute of a text such as `03:15`; None if it is not a time.

    Hours above 12 are not on a dial.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        return None
    hour, minute = int(found[1]), int(found[2])
    return (hour % HOURS_OF_DIAL, minute) if hour <= HOURS_OF_DIAL and minute < 60 else None


def score(answer: str, gold: str) -> float:
    """Return 1.0 if the tagged time equals the gold one, else -1.0."""
    found = clock_time(answer_tagged(answer))
    return RIGHT if found is not None and found == clock_time(gold) else WRONG


SAMPLE = Path(__file__).resolve().parent.parent / "data" / "pixmo_clocks_sample"


class ClockDatasetEnv(ImageEnv):
    """Questions about the time on a clock face."""

    name = "pixmo_clocks"
    hub_name = "junyeong-nero/clock-dataset"
    columns = ("image", "hour", "minute")
    instructions = INSTRUCTIONS
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}
    score_answer = staticmethod(score)

    def question(self, row: Mapping[str, Any]) -> str:
        return QUESTION

    def gold(self, row: Mapping[str, Any]) -> str:
        hour, minute = int(usable(row["hour"])), int(usable(row["minute"]))
        return f"{hour % HOURS_OF_DIAL or HOURS_OF_DIAL}:{minute:02d}"


if __name__ == "__main__":
    ClockDatasetEnv.cli()
