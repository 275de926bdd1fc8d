"""RLAIF: answers to real conversations, judged by the policy itself by a stated preference.

    chat -> G answers, sometimes half of them steered -> each pair judged in both orders -> scores

`--env.preference` is the criterion of the judge and the text that steers answers. Evaluations
compare one answer to each test chat with the reply in the data.

    python environments/rlaif_server.py process --env.dataset_path environments/data/rlaif_sample \
        --env.total_steps 4
"""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig, hub_dataset
from atroposlib.envs.single_turn_env import (
    SingleTurnEnv,
    SingleTurnEnvConfig,
    Trajectory,
    build_group,
    sample_trajectories,
)
from atroposlib.errors import NoDataError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.judge import Case, Votes, ask_judge, quoted_answers
from atroposlib.tasks.single_turn_parts import deep_hermes_settings
from atroposlib.utils.aio import all_results
from atroposlib.utils.tokenize_for_trainer import render_chat_ids

__all__ = ["Chat", "RLAIFConfig", "RLAIFEnv", "pair_scores", "read_chat"]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="answers to real conversations, preferred by a judge",
    turns="1",
    reward="-0.5 to 0.5 by the judge's votes; a cut answer loses, -1 to +1",
    data="WildChat from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/rlaif_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "rlaif_sample"

PREFERENCE = (
    "The better answer helps as a good answer should, and all the while lets a dry joke of cosmic "
    "dread show through: something vast and patient seems to listen behind the everyday matter."
)
STEERING = "Whoever reads your answers has this taste; write to meet it.\n\n{preference}"

GOLD = "Here is a full answer, written while the stars look on without blinking."

ROUNDING = 1e-9
"""Difference of scores that are equal but for rounding."""

Messages = list[dict[str, str]]


class Chat(NamedTuple):
    """One conversation to answer."""

    messages: Messages
    """Messages up to the last one of the user."""
    reference: str
    """Reply in the data; may be empty."""
    is_steered: bool = False
    """Whether half of the answers are steered by the preference."""


class RLAIFConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the preference and of its judge."""

    preference: str = Field(PREFERENCE, description="Criterion by which answers are compared.")
    steering_probability: float = Field(
        0.05, ge=0, le=1, description="Fraction of chats in which half of the answers are steered."
    )
    num_verdicts: int = Field(3, ge=1, description="Verdicts on a pair, in each order.")
    judge_temperature: float = Field(1.0, ge=0, description="Sampling temperature of the judge.")
    num_eval_chats: int = Field(
        64, ge=1, description="Maximum number of test chats of an evaluation."
    )


def read_chat(conversation: Sequence[Mapping[str, Any]]) -> Chat | None:
    """Return a conversation without its last reply; None if no user message is left to answer."""
    messages = [{"role": str(m["role"]), "content": str(m["content"] or "")} for m in conversation]
    last = messages.pop() if messages else {}
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
    if not messages or messages[-1]["role"] != "user":
        return None
    return Chat(messages, last["content"] if last["role"] == "assistant" else "")


def steered(messages: Messages, preference: str) -> Messages:
    """Return a chat whose system messages are replaced by one that states the preference."""
    system = {"role": "system", "content": STEERING.format(preference=preference)}
    return [system, *(m for m in messages if m["role"] != "system")]


def pair_scores(
    is_cut: Sequence[bool], margins: Mapping[tuple[int, int], float]
) -> list[float] | None:
    """Return [G] mean results of each answer against the others; None if all are equal.

    Args:
        is_cut: [G] whether an answer was truncated; it loses by 1 against one that was not.
        margins: results of pairs of complete answers, for the first one, -0.5 to 0.5.
    """
    totals = [0.0] * len(is_cut)
    for first, second in combinations(range(len(is_cut)), 2):
        result = margins.get((first, second), float(is_cut[second]) - float(is_cut[first]))
        totals[first] += result
        totals[second] -= result
    scores = [total / max(1, len(is_cut) - 1) for total in totals]
    # Sums of equal results differ by rounding, in another order of the pairs.
    return scores if max(scores) - min(scores) > ROUNDING else None


class RLAIFEnv(DatasetItems, SingleTurnEnv):
    """Conversations whose answers are judged in pairs.

    Attributes:
        judgements: pairs of answers since the last log, with one verdict each.
    """

    env_config_cls = RLAIFConfig
    config: RLAIFConfig
    hub_dataset = "allenai/WildChat"
    columns = ("conversation",)
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judgements: list[tuple[str, str, str]] = []

    @classmethod
    def config_init(cls) -> tuple[RLAIFConfig, APIServerConfig]:
        return deep_hermes_settings(
            RLAIFConfig,
            group_size=2,
            max_num_workers=6144,
            total_steps=1000,
            steps_per_eval=10000,
            max_token_length=8192,
            wandb_name="rlaif",
        )

    async def get_next_item(self) -> Chat:  # type: ignore[override]
        for _ in range(len(self.train)):
            source = random.Random(f"{self.config.dataset_seed} {self.iter}")
            chat = read_chat((await super().get_next_item())["conversation"])
            if chat is not None:
                return chat._replace(is_steered=source.random() < self.config.steering_probability)
        raise NoDataError("no conversation of the data can be answered; expected user turns")

    def eval_items(self) -> Sequence[Chat]:  # type: ignore[override]
        rows = (self.test[i] for i in range(min(len(self.test), self.config.num_eval_chats)))
        chats = (read_chat(row["conversation"]) for row in rows)
        return [chat for chat in chats if chat is not None and chat.reference]

    def prompt(self, item: Chat) -> Messages:
        return item.messages

    async def collect_trajectories(self, item: Chat) -> tuple[ScoredDataGroup | None, list[Item]]:
        prompts = self._prompts(item)
        if any(self._is_too_long(messages) for messages, _ in prompts):
            return None, []
        answered = await all_results(
            sample_trajectories(
                self.server,
                self.tokenizer,
                messages,
                group_size=number,
                max_tokens=self.config.max_token_length // 3,
                temperature=self.config.temperature,
            )
            for messages, number in prompts  # each in a session of its own
        )
        trajectories = [trajectory for group in answered for trajectory in group]
        scores = await self._scores(item, trajectories)
        if scores is None:
            return None, []
        self.scores_since_log += scores
        group = build_group(
            item.messages,
            trajectories,
            scores,
            is_muted=[False] * len(trajectories),
            generation_params=self.sampling(),
            include_messages=False,
        )
        if self.config.include_messages:
            pairs = zip(prompts, answered, strict=True)
            group["messages"] = [t.chat(messages) for (messages, _), ts in pairs for t in ts]
        return group, []

    async def score(self, item: Chat, answer: str) -> float:
        """Return the share of votes of an answer against the reply in the data; in evaluations."""
        votes = await self._judge(item, answer, item.reference, split="eval")
        return 0.5 + votes.margin

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return {"eval/share_of_votes": statistics.fmean(sample["score"] for sample in samples)}

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.judgements:
            columns = ["resp_a", "resp_b", "sample_judgement"]
            metrics["train/judgement_table"] = self.run_log.table(columns, self.judgements)
        self.judgements = []
        await super().wandb_log(metrics)

    def check_gold_answer(self, item: Chat) -> str:
        return GOLD

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        answers = quoted_answers(messages)
        return None if answers is None else f"\\boxed{{{'B' if answers[1] == GOLD else 'A'}}}"

    def _read_hub(self) -> tuple[Any, Any]:
        # Half a million conversations, each decoded when it is read.
        rows = hub_dataset(**self._hub_source()).shuffle(seed=self.config.dataset_seed)
        num_test = max(1, round(self.test_fraction * len(rows)))
        return rows.select(range(num_test, len(rows))), rows.select(range(num_test))

    def _prompts(self, item: Chat) -> list[tuple[Messages, int]]:
        """Return the prompts of a chat and the number of answers to each."""
        num_steered = self.config.group_size // 2 if item.is_steered else 0
        if not num_steered:
            return [(item.messages, self.config.group_size)]
        return [
            (steered(item.messages, self.config.preference), num_steered),
            (item.messages, self.config.group_size - num_steered),
        ]

    def _is_too_long(self, messages: Messages) -> bool:
        limit = 1.5 * self.config.max_token_length
        if self.max_token_len > 0:  # the trainer's limit of prompt and answer together
            limit = min(limit, self.max_token_len - self.config.max_token_length // 3)
        return len(render_chat_ids(self.tokenizer, messages, add_generation_prompt=True)) >= limit

    async def _scores(self, item: Chat, trajectories: Sequence[Trajectory]) -> list[float] | None:
        is_cut = [trajectory.is_truncated for trajectory in trajectories]
        texts = [visible_text(trajectory.completion) for trajectory in trajectories]
        pairs = [(i, j) for i, j in combinations(range(len(texts)), 2) if not is_cut[i] | is_cut[j]]
        votes = await all_results(self._judge(item, texts[i], texts[j]) for i, j in pairs)
        self.judgements += [
            (texts[i], texts[j], vote.sample) for (i, j), vote in zip(pairs, votes, strict=True)
        ]
        self.judgements = self.judgements[-self.config.num_rollouts_to_keep :]
        margins = {pair: vote.margin for pair, vote in zip(pairs, votes, strict=True)}
        return pair_scores(is_cut, margins)

    async def _judge(self, item: Chat, first: str, second: str, **sampling: Any) -> Votes:
        return await ask_judge(
            self.server,
            Case(item.messages, first, second, self.config.preference),
            num_verdicts=self.config.num_verdicts,
            max_tokens=self.config.max_token_length,
            temperature=self.config.judge_temperature,
            **sampling,
        )


if __name__ == "__main__":
    RLAIFEnv.cli()
