"""Text reversal: write a text backwards, character by character.

    text -> [system, user] -> G completions -> <reversed_text> -> equal to text[::-1]? -> 1 or 0

A row has the column `text`. The comparison is exact: spaces at both ends count. Without the hub:

    python environments/text_reversal_environment.py process --env.dataset_path \
        environments/data/text_reversal_sample --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig, hub_rows
from atroposlib.envs.single_turn_env import SingleTurnEnvConfig, Trajectory, ask
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import (
    DEEP_THINKING,
    ThinkingEnv,
    answer_after_thinking,
    deep_hermes_settings,
)
from atroposlib.utils.local_records import read_split

__all__ = ["TextReversalConfig", "TextReversalEnv", "score_reversal", "tagged_text"]

logger = logging.getLogger("environments.text_reversal")

CARD = EnvironmentCard(
    task="write a text backwards",
    turns="1",
    reward="1 when every character is right, else 0",
    data="TextReversalDataset from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/text_reversal_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "text_reversal_sample"
OPEN, CLOSE = "<reversed_text>", "</reversed_text>"
BASE_PROMPT = (
    "You reverse texts. Write the characters of the user's text in the opposite order, the last "
    "one first, and change nothing else: letters keep their case, and spaces, line breaks and "
    f"punctuation are characters as well. Put the result between {OPEN} and {CLOSE}, exactly once "
    "and without anything else between the tags."
)


class TextReversalConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Settings of the data sets, the prompt and sampling."""

    dataset_path: str | None = Field(  # type: ignore[assignment]
        None,
        description="File, or folder with a train and a test file; None takes train_dataset and "
        "eval_dataset.",
    )
    train_dataset: str = Field(
        "NousResearch/TextReversalDataset",
        description="Training rows: a data set of the hub, or a JSONL, JSON, CSV or Parquet file.",
    )
    train_split: str = Field("train", description="Split of train_dataset.")
    eval_dataset: str = Field(
        "NousResearch/TextReversalDataset",
        description="Evaluation rows: a data set of the hub, or a local file.",
    )
    eval_split: str = Field("test", description="Split of eval_dataset.")
    thinking_mode: bool = Field(
        False,
        description="Whether the prompt requests thinking in tags before the answer. Reasoning "
        "parameters of providers are not sent.",
    )
    custom_base_system_prompt: str | None = Field(
        None, description="Replaces the system prompt that states the task."
    )
    custom_thinking_prompt: str | None = Field(
        None, description="Replaces the prompt that requests thinking."
    )
    temperature: float | None = Field(  # type: ignore[assignment]
        None,
        ge=0,
        description="Sampling temperature of rollouts; None takes rollout_temperature.",
    )
    rollout_temperature: float = Field(
        1.0, ge=0, description="Sampling temperature of rollouts, unless temperature is given."
    )
    eval_temperature: float = Field(0.6, ge=0, description="Sampling temperature of evaluations.")
    train_max_tokens: int = Field(
        7168, ge=1, description="Maximum tokens of a completion in training."
    )
    eval_max_tokens: int = Field(
        16384, ge=1, description="Maximum tokens of a completion in evaluations."
    )
    max_retries: int = Field(
        3,
        ge=1,
        le=100,
        description="Maximum number of requests per evaluation item while answers are too short.",
    )
    retry_delay: float = Field(1.0, ge=0, description="Seconds between such requests.")
    min_response_length: int = Field(
        5, ge=0, description="Characters below which an answer in an evaluation is too short."
    )
    full_debug: bool = Field(False, description="Whether every scored group is logged.")


def tagged_text(answer: str) -> str | None:
    """Return the text between the tags as it is; None unless there is exactly one pair."""
    before, opened, rest = answer.partition(OPEN)
    inside, closed, after = rest.partition(CLOSE)
    is_alone = OPEN not in inside + after and CLOSE not in before + after
    return inside if opened and closed and is_alone else None


def answer_of(completion: str, *, is_thinking: bool) -> str | None:
    """Return the tagged text after the thinking; None without one.

    Args:
        completion: the whole completion.
        is_thinking: Whether one pair of thinking tags is required.
    """
    shown = answer_after_thinking(completion) if is_thinking else visible_text(completion)
    return None if shown is None else tagged_text(shown)


def score_reversal(completion: str, text: str, *, is_thinking: bool) -> float:
    """Return 1.0 for the reversed text, else 0.0.

    A line break directly after the opening and before the closing tag is accepted.
    """
    answer, gold = answer_of(completion, is_thinking=is_thinking), text[::-1]
    if answer is None:
        return 0.0
    unwrapped = answer.removeprefix("\n").removesuffix("\n")
    return float(gold in (answer, unwrapped))


class TextReversalEnv(DatasetItems, ThinkingEnv):
    """Texts to write backwards; an item is a row with the column `text`.

    Attributes:
        counts: attempts, successes and format errors since the last log.
    """

    name = "text_reversal"
    env_config_cls = TextReversalConfig
    config: TextReversalConfig
    columns = ("text",)
    logs_percent_correct = True
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, config: TextReversalConfig, *args: Any, **kwargs: Any) -> None:
        # The base class would send reasoning parameters of providers for a thinking_mode.
        super().__init__(config.model_copy(update={"thinking_mode": False}), *args, **kwargs)
        self.config.thinking_mode = config.thinking_mode
        self.counts: Counter[str] = Counter()

    @classmethod
    def config_init(cls) -> tuple[TextReversalConfig, APIServerConfig]:
        return deep_hermes_settings(
            TextReversalConfig,
            group_size=8,
            max_num_workers_per_node=8,
            total_steps=2000,
            steps_per_eval=25,
            max_token_length=8192,
            thinking_mode=True,
            eval_max_tokens=8192,
            min_batch_allocation=0.1,
            wandb_name="text_reversal",
        )

    async def setup(self) -> None:
        if self.config.full_debug:
            logger.setLevel(logging.DEBUG)
        await super().setup()
        for number, row in enumerate((*self.train, *self.test)):
            if not isinstance(row["text"], str) or not row["text"]:
                raise ConfigError(f"row {number}: expected text to be a text, got {row['text']!r}")

    def _read(self) -> tuple[Any, Any]:
        if self.config.dataset_path is not None:
            return super()._read()
        return (
            self._read_split(self.config.train_dataset, self.config.train_split),
            self._read_split(self.config.eval_dataset, self.config.eval_split),
        )

    def _read_split(self, name: str, split: str) -> list[dict[str, Any]]:
        path, seed = Path(name), self.config.dataset_seed
        if path.is_dir() or path.suffix or path.is_file():
            return read_split(path, [split], self.columns)
        rows = hub_rows(name, split=split, shuffle_seed=seed)
        if rows and "text" not in rows[0]:
            raise ConfigError(f"{name} has no column text; it has {', '.join(rows[0])}")
        return rows

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        system = self.config.custom_base_system_prompt or BASE_PROMPT
        if self.config.thinking_mode:
            system = f"{self.config.custom_thinking_prompt or DEEP_THINKING}\n\n{system}"
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": item["text"]},
        ]

    def sampling(self) -> dict[str, Any]:
        given = self.config.temperature
        return {"temperature": self.config.rollout_temperature if given is None else given}

    async def score(self, item: Mapping[str, Any], answer: str) -> float:
        return score_reversal(
            self._completed(answer), item["text"], is_thinking=self.config.thinking_mode
        )

    def note_group(
        self, item: Mapping[str, Any], trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        logger.debug("%.60r: scores %s", item["text"], scores)
        self.counts["attempts"] += len(scores)
        self.counts["successes"] += sum(score > 0 for score in scores)
        self.counts["format_errors"] += sum(
            trajectory.is_truncated or not self._has_format(trajectory.completion)
            for trajectory in trajectories
        )

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        counts, self.counts = self.counts, Counter()
        total = max(1, counts["attempts"])
        metrics = {
            "success_rate": counts["successes"] / total,
            "failure_rate": 1 - counts["successes"] / total,
            "format_error_rate": counts["format_errors"] / total,
            "format_compliance_rate": 1 - counts["format_errors"] / total,
            "thinking_mode_enabled": float(self.config.thinking_mode),
            "total_attempts": counts["attempts"],
            "successful_reversals": counts["successes"],
            "failed_reversals": counts["attempts"] - counts["successes"],
            "format_errors": counts["format_errors"],
        }
        named = {f"train/{name}": value for name, value in metrics.items()}
        return {**super().train_metrics(scores), **named}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        lengths = [sample["response_length"] for sample in samples]
        metrics = {
            "avg_response_length": statistics.fmean(lengths),
            "response_length_std": statistics.pstdev(lengths),
            "thinking_utilization_rate": statistics.fmean(s["has_thought"] for s in samples),
            "format_compliance_rate": statistics.fmean(s["has_format"] for s in samples),
            "total_dataset_items": len(self.test),
            "evaluated_items": len(samples),
            "valid_scores": len(samples),
        }
        named = {f"eval/{name}": value for name, value in metrics.items()}
        return {**super().evaluation_metrics(samples), **named}

    @property
    def eval_token_limit(self) -> int:
        return self.config.eval_max_tokens

    async def evaluate_item(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of an answer; one that is too short is requested again."""
        messages = self.prompt(item)
        for attempt in range(self.config.max_retries):
            if attempt:
                await asyncio.sleep(self.config.retry_delay)
            [reply] = await ask(
                self.server,
                self.tokenizer,
                messages,
                n=1,
                max_tokens=self.config.eval_max_tokens,
                temperature=self.config.eval_temperature,
                split="eval",
            )
            text = reply.completion
            if len(text.strip()) >= self.config.min_response_length:
                break
        shown = self._shown(text, is_cut=reply.finish_reason == "length")
        score = await self.score(item, shown)
        return {
            "messages": [*messages, {"role": "assistant", "content": text}],
            "question": item["text"],
            "gold_answer": item["text"][::-1],
            "model_parsed": answer_of(
                self._completed(shown), is_thinking=self.config.thinking_mode
            ),
            "score": score,
            "correct": score > 0,
            "finish_reason": reply.finish_reason,
            "response_length": len(text),
            "has_thought": answer_after_thinking(self._completed(text)) is not None,
            "has_format": self._has_format(shown),
        }

    def check_gold_answer(self, item: Mapping[str, Any]) -> str:
        thought = "<think>I go from the end to the start.</think>"
        return f"{thought * self.config.thinking_mode}{OPEN}{item['text'][::-1]}{CLOSE}"

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        return min(self.config.train_max_tokens, super()._budget(messages))

    def _has_format(self, completion: str) -> bool:
        is_thinking = self.config.thinking_mode
        return answer_of(self._completed(completion), is_thinking=is_thinking) is not None

    def _completed(self, completion: str) -> str:
        return self.opened_tag + completion if completion else ""


if __name__ == "__main__":
    TextReversalEnv.cli()
