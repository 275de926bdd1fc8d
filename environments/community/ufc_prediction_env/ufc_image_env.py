r"""Fight predictions from a picture: name the winner of a bout from a card with both records.

    bout -> card, drawn or given -> [system, user + image] -> G completions -> \boxed{} -> +1 or -1

The bouts are those of `ufc_prediction_env.py`. A bout without a picture of its own gets a card on
which its records are drawn, so that the model has to read them:

    python environments/community/ufc_prediction_env/ufc_image_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import Item, ScoredDataGroup
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.images import ImageEnv, ImageEnvConfig, ImageItem, require_pillow
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments.community.ufc_prediction_env.ufc_prediction_env import (
        SAMPLE,
        Bout,
        naming_winner,
        read_bouts,
        score_prediction,
    )
else:
    with sibling_imports(__file__):
        from ufc_prediction_env import SAMPLE, Bout, naming_winner, read_bouts, score_prediction

__all__ = ["UFCImageConfig", "UFCImageEnv", "draw_card"]

CARD = EnvironmentCard(
    task="predict the winner of a bout from a picture of the records",
    turns="1",
    reward="+1 for the name of the winner, else -1",
    data="40 bouts of invented fighters shipped, or `--env.dataset_path`",
    needs="`pip install '.[examples]'`",
    command="process --env.total_steps 4",
)

INSTRUCTIONS = (
    "You predict the winner of a bout of mixed martial arts from a picture of both fighters. You "
    "may reason first. Then name the winner, and no other, as written in the question, once in the "
    "form \\boxed{name}."
)
QUESTION = "The picture shows {fighter_1} and {fighter_2} before their bout. Who wins?"

CARD_SIZE = 640, 320
NAME_CHARACTERS, COLUMN_CHARACTERS, MAX_LINES = 22, 32, 9
NAME_SIZE, RECORD_SIZE = 24, 17
BACKGROUND, INK, RULE = "#f4f1ea", "#1f2430", "#a33b2e"


class UFCImageConfig(ImageEnvConfig):
    """Source of the bouts."""

    dataset_path: str | None = Field(
        None,
        description="File of bouts, or folder with a train and a test file; a column `image` has "
        "their pictures, as base64 or as names of files in the same folder. None takes the bouts "
        "that are shipped.",
    )


def draw_card(bout: Bout) -> Any:
    """Return a picture with name and record of both fighters, side by side, as a PIL image.

    Lines that do not fit are left out. The font of Pillow has the letters of English only, so that
    accents are left out too.
    """
    from PIL import Image, ImageDraw, ImageFont

    width, height = CARD_SIZE
    card = Image.new("RGB", CARD_SIZE, BACKGROUND)
    draw = ImageDraw.Draw(card)
    draw.line([(width // 2, 20), (width // 2, height - 20)], fill=RULE, width=3)
    for number, left in ((1, 24), (2, width // 2 + 24)):
        name = _without_accents(bout[f"fighter_{number}"])[:NAME_CHARACTERS]
        draw.text((left, 24), name, fill=INK, font=ImageFont.load_default(NAME_SIZE))
        lines = [
            line
            for part in _without_accents(bout[f"record_{number}"]).split(";")
            for line in textwrap.wrap(part.strip(), COLUMN_CHARACTERS)
        ]
        font = ImageFont.load_default(RECORD_SIZE)
        draw.multiline_text(
            (left, 70), "\n".join(lines[:MAX_LINES]), fill=INK, font=font, spacing=8
        )
    return card


def _without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


class _WithCards(Sequence[dict[str, Any]]):
    """Bouts whose card is drawn when one of them is taken."""

    def __init__(self, bouts: Sequence[dict[str, Any]]) -> None:
        self._bouts = bouts

    def __len__(self) -> int:
        return len(self._bouts)

    def __getitem__(self, index: Any) -> Any:
        bout = self._bouts[index]
        return bout if bout.get("image") else {**bout, "image": draw_card(bout)}


class UFCImageEnv(ImageEnv):
    """Bouts of two fighters, whose records are in a picture."""

    name = "ufc_image_predictor"
    env_config_cls = UFCImageConfig
    config: UFCImageConfig
    instructions = INSTRUCTIONS
    answer_form: ClassVar[str] = "\\boxed{{{}}}"
    score_answer = staticmethod(score_prediction)

    async def setup(self) -> None:
        """Read the bouts; those of the test file are for evaluations."""
        require_pillow()
        train, test = await asyncio.to_thread(self._read_bouts)
        self.rows = _WithCards([*train, *test])
        self.train = list(range(len(train)))
        num_held_out = min(len(test), self.config.num_eval_items)
        self.held_out = list(range(len(train), len(train) + num_held_out))

    def _read_bouts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        path = Path(self.config.dataset_path or SAMPLE)
        self.folder = path if path.is_dir() else path.parent
        return read_bouts(path, seed=self.config.dataset_seed, optional=("image",))

    def question(self, row: Mapping[str, Any]) -> str:
        return QUESTION.format(**row)

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["winner"])

    async def collect_trajectories(
        self, item: ImageItem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group, which also has the name of the winner."""
        group, backlog = await super().collect_trajectories(item)
        return naming_winner(group, item["gold"]), backlog


if __name__ == "__main__":
    UFCImageEnv.cli()
