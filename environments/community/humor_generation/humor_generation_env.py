"""Humor: jokes in the style and the format that are asked for, rated by a judge.

    row -> [system, user] -> G jokes -> judge: six lines `Score: n` -> their mean

The judge is the environment's own model, or that of `--env.judge_base_url`. Rows come from local
files; some are shipped:

    python environments/community/humor_generation/humor_generation_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.judge import quotations, quoted_parts
from atroposlib.tasks.judge_model import JudgeConfig, NoVerdictError, judge_of
from atroposlib.utils.local_records import read_splits

__all__ = ["RUBRIC", "HumorConfig", "HumorEnv", "read_scores"]

CARD = EnvironmentCard(
    task="write jokes in a given style and format",
    turns="1",
    reward="0 to 2.67, the mean of six ratings of a judge; 0 without a joke",
    data="20 rows shipped, or `--env.dataset_path`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
MAX_JOKE_CHARACTERS = 4_000
RUBRIC = (
    ("relevance", 2, "it has the format and the subject that were asked for"),
    ("style", 2, "it sounds like the comedian or the style that was asked for"),
    ("creativity", 3, "the idea is new, and not a joke that is known"),
    ("effectiveness", 3, "it is funny: set-up and punchline work"),
    ("virality", 3, "people would repeat it to others"),
    ("coherence", 3, "it makes sense, and each sentence is needed"),
)
"""Name of a rating, its highest number, and its meaning, in the order of the judge's lines."""
SCORE_LINE = re.compile(r"[ \t*-]*Score:[ \t*]*(\d)[ \t*]*", re.IGNORECASE)
"""A rating on a line of its own, which may be bold or an entry of a list."""
SYSTEM_PROMPT = (
    "You are a comedy writer. Write what is asked for, new and in the style that is named, and "
    "nothing else: no introduction and no explanation. You may reason first between <think> and "
    "</think>."
)
QUESTION = "Write in the style of: {comedian}\nFormat: {format}\n\n{question}"
REQUEST = (
    "You rate comedy for an editor who wants honest numbers. Rate the joke by each of these items, "
    "in this order, with an integer:\n\n{items}\n\nMost jokes deserve low numbers. Write a line "
    "with a short reason for each item, and after it a line such as `Score: 1`; six such lines in "
    "all.\n\n{quotations}"
)


class HumorConfig(LocalItemsConfig, JudgeConfig, SingleTurnEnvConfig):
    """Settings of the rows and of the judge."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File of rows, or folder with a train and a test file; None takes the rows "
        "that are shipped.",
    )


def read_scores(verdict: str) -> list[int] | None:
    """Return the ratings of a judge's reply; None unless it has six in order, each in its range."""
    found = [SCORE_LINE.fullmatch(line) for line in visible_text(verdict).splitlines()]
    numbers = [int(line[1]) for line in found if line]
    most = [highest for _, highest, _ in RUBRIC]
    if len(numbers) != len(most) or any(n > m for n, m in zip(numbers, most, strict=True)):
        return None
    return numbers


class HumorEnv(DatasetItems, SingleTurnEnv):
    """Requests for jokes; an item is a row.

    Attributes:
        judge: rates jokes.
    """

    name = "humor"
    env_config_cls = HumorConfig
    config: HumorConfig
    columns = ("comedian", "format", "question")
    optional_columns = ("response",)
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "wandb_name": "humor",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = judge_of(self, split="train")

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        path = Path(self.config.dataset_path or SAMPLE)
        seed, optional = self.config.dataset_seed, self.optional_columns
        return read_splits(path, self.columns, shuffle_seed=seed, optional=optional)

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": QUESTION.format(**item)},
        ]

    async def score(self, item: Mapping[str, Any], answer: str) -> float:
        """Return the mean rating; 0.0 for an empty or endless joke, which is not judged.

        Raises:
            NoVerdictError: the judge did not give six ratings in their ranges.
        """
        if not answer.strip() or len(answer) > MAX_JOKE_CHARACTERS:
            return 0.0
        lines = (f"{name}, 0 to {most}: {meaning}" for name, most, meaning in RUBRIC)
        parts = {"request": QUESTION.format(**item), "joke": answer}
        request = REQUEST.format(items="\n".join(lines), quotations=quotations(parts))
        verdict = await self.judge.reply(request)
        scores = read_scores(verdict)
        if scores is None:
            raise NoVerdictError(f"the judge did not give six ratings: {verdict[-80:]!r}")
        return statistics.fmean(scores)

    async def close(self) -> None:
        await self.judge.close()
        await super().close()

    def check_gold_answer(self, item: Mapping[str, Any]) -> str:
        return str(item["response"] or "My bakery is haunted. The ghosts only come for the boos.")

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        parts = quoted_parts(str(messages[-1].get("content")))
        if not parts:
            return None
        is_sentence = parts["joke"].strip()[-1:] in (".", "!", "?", '"')
        return "\n".join(f"Score: {most if is_sentence else 0}" for _, most, _ in RUBRIC)


if __name__ == "__main__":
    HumorEnv.cli()
