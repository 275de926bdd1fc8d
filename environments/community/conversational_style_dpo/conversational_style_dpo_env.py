"""Conversational style: pairs of an engaging and a blunt answer, for preference training.

    prompt -> engaging system prompt -> chosen answer   (+1) -+
           -> blunt system prompt    -> rejected answer (-1) -+-> pair, without the system prompts

Both sides follow the same prompt, so that a policy learns the style without being asked for it.
`atropos-dpo-gen` writes the pairs as a data set for preference training. Prompts come from local
files; some are shipped:

    python environments/community/conversational_style_dpo/conversational_style_dpo_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, Field

from atroposlib.envs.base import Item, ScoredDataGroup
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import Answer, PromptRoom, ask, completion_budget
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.utils.aio import all_results
from atroposlib.utils.local_records import read_splits
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

__all__ = [
    "ConversationalStyleConfig",
    "ConversationalStyleDPOEnv",
    "Side",
    "StyleSettings",
]

logger = logging.getLogger("environments.conversational_style_dpo")

CARD = EnvironmentCard(
    task="pairs of an engaging and a blunt answer",
    turns="1",
    reward="+1 for the engaging answer, -1 for the blunt one",
    data="32 prompts shipped, or `--env.dataset_path`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
ENGAGING = (
    "You are a warm and curious partner in conversation. Answer what was asked, take up what the "
    "other person cares about, and end with a question or a thought that invites them to go on."
)
BLUNT = (
    "Answer in as few words as possible. Be flat and impersonal, show no interest in the other "
    "person, and ask nothing."
)


class Side(NamedTuple):
    """Sampling of one side of a pair, and its score."""

    system: str
    temperature: float
    max_tokens: int
    score: float


class StyleSettings(BaseModel):
    """Settings of both sides of a pair; a base in addition to that of the environment."""

    group_size: int = Field(
        2, ge=2, description="Trajectories of a group, two for each pair; one over is left out."
    )
    chosen_temperature: float = Field(
        0.7, ge=0, description="Sampling temperature of the chosen answers."
    )
    chosen_max_tokens: int = Field(
        150, ge=1, le=65536, description="Token limit of a chosen answer."
    )
    rejected_temperature: float = Field(
        0.4, ge=0, description="Sampling temperature of the rejected answers."
    )
    rejected_max_tokens: int = Field(
        50, ge=1, le=65536, description="Token limit of a rejected answer."
    )


class ConversationalStyleConfig(StyleSettings, LocalItemsConfig):
    """Settings of the prompts and of the pairs."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File of prompts, or folder with a train and a test file; None takes the "
        "prompts that are shipped.",
    )


class ConversationalStyleDPOEnv(DatasetItems):
    """Prompts answered in two styles; an item is a row.

    Attributes:
        prompt_column: column of the prompt.
        engaging: system prompt of the chosen answers.
        blunt: system prompt of the rejected answers.
        prompt_room: limit of prompt and completion, and the prompts without room.
    """

    name = "conversational_style_dpo"
    env_config_cls = ConversationalStyleConfig
    config: Any  # a StyleSettings with the source of the rows
    columns = ("prompt",)
    prompt_column: ClassVar[str] = "prompt"
    engaging: ClassVar[str] = ENGAGING
    blunt: ClassVar[str] = BLUNT
    no_gold_answer: ClassVar[str] = "the sides of a pair are not judged"
    default_model = "Qwen/Qwen2.5-1.5B-Instruct"
    default_settings: ClassVar[dict[str, Any]] = {
        "max_token_length": 2048,
        "wandb_name": "conversational_style_dpo",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_room = PromptRoom(self)

    def _read(self) -> tuple[Any, Any]:
        path = Path(self.config.dataset_path or SAMPLE)
        return read_splits(path, self.columns, shuffle_seed=self.config.dataset_seed)

    def sides(self) -> tuple[Side, Side]:
        """Return how the chosen and the rejected answers are sampled."""
        config = self.config
        return (
            Side(self.engaging, config.chosen_temperature, config.chosen_max_tokens, 1.0),
            Side(self.blunt, config.rejected_temperature, config.rejected_max_tokens, -1.0),
        )

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample both sides in one request each; a pair with an empty or equal side is left out."""
        prompt = {"role": "user", "content": str(item[self.prompt_column])}
        sides = self.sides()
        limit = self.prompt_room.limit
        room = min(
            completion_budget(self.tokenizer, self._chat(side, prompt), max_token_length=limit)
            for side in sides
        )
        if room < 1:
            self.prompt_room.skip(limit, missing=1 - room)
            return None, []
        self.prompt_room.has_fit = True
        chosen, rejected = await all_results(
            ask(
                self.server,
                self.tokenizer,
                self._chat(side, prompt),
                n=self.config.group_size // 2,
                temperature=side.temperature,
                max_tokens=min(side.max_tokens, room),
            )
            for side in sides
        )
        pairs = [pair for pair in zip(chosen, rejected, strict=True) if _is_pair(*pair)]
        if not pairs:
            logger.info("item skipped: no answer has a text that differs from the other side's")
            return None, []
        return self._group(prompt, pairs), []

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        is_blunt = str(messages[0].get("content")) == self.blunt
        return "No." if is_blunt else None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: pairs are training data, and have no score of their own."""

    def _chat(self, side: Side, prompt: Mapping[str, str]) -> list[Mapping[str, str]]:
        return [{"role": "system", "content": side.system}, prompt]

    def _group(
        self, prompt: Mapping[str, str], pairs: list[tuple[Answer, Answer]]
    ) -> ScoredDataGroup:
        answers = [answer for pair in pairs for answer in pair]
        chats: list[list[Any]] = [
            [prompt, {"role": "assistant", "content": visible_text(answer.completion)}]
            for answer in answers
        ]
        rows = [
            tokenize_for_trainer(self.tokenizer, chat, finish_reason=answer.finish_reason)
            for chat, answer in zip(chats, answers, strict=True)
        ]
        group: ScoredDataGroup = {
            "tokens": [row["tokens"] for row in rows],
            "masks": [row["masks"] for row in rows],
            "scores": [side.score for side in self.sides()] * len(pairs),
            "finish_reasons": [answer.finish_reason for answer in answers],
            "tokenized_from_text": True,
        }
        if len(answers) != self.config.group_size:
            group["group_overrides"] = {"group_size": len(answers)}
        if self.config.include_messages:
            group["messages"] = chats
        return group


def _is_pair(chosen: Answer, rejected: Answer) -> bool:
    texts = [visible_text(answer.completion).strip() for answer in (chosen, rejected)]
    return all(texts) and texts[0] != texts[1]


if __name__ == "__main__":
    ConversationalStyleDPOEnv.cli()
