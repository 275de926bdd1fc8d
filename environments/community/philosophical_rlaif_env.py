"""Philosophical RLAIF: answers to users' questions, judged in pairs by their philosophical depth.

    question -> G answers -> each pair judged in both orders -> +1, -1 or a tie, 0

With two answers, the winner scores +1 and the loser -1; with more, each the mean of its results. A
truncated or empty answer scores -1 and loses every comparison. A comparison counts if both orders
have a verdict; a group with an answer that has none fails as `NoVerdictError`. Evaluations compare
one answer to each question with the reply in the data.

The judge is the environment's own model, or that of `--env.judge_base_url`. Questions are the first
messages of WildChat from the hub, or of local files with the column `conversation`; 16 of our own
are in `environments/data/philosophical_sample`. The preference is the opinion of the judge, which
reads answers as quotations, without their thinking.

    python environments/community/philosophical_rlaif_env.py process --env.dataset_path \
        environments/data/philosophical_sample --env.total_steps 4
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.judge import Case, quoted_answers
from atroposlib.tasks.judge_model import JudgeConfig, NoVerdictError, judge_of
from atroposlib.utils.aio import all_results

__all__ = ["PhilosophicalRLAIFConfig", "PhilosophicalRLAIFEnv", "first_exchange", "pair_scores"]

CARD = EnvironmentCard(
    task="answers to users' questions, compared by their philosophical depth",
    turns="1",
    reward="+1 for the answer that wins in both orders, -1 for the other, 0 for a tie",
    data="WildChat from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/philosophical_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).parents[1] / "data" / "philosophical_sample"
LOST = -1.0
PREFERENCE = (
    "The better answer gives the user what was asked for, and looks at its foundations: it makes "
    "assumptions visible, separates concepts that are easily confused, weighs at least one serious "
    "objection, and says how far its reasons reach. Names of philosophers, length and solemn words "
    "are worth nothing in themselves."
)
SYSTEM_PROMPT = (
    "You answer thoughtfully. Give what is asked for, and reflect on it as a philosopher would: "
    "which assumptions it makes, which concepts need to be kept apart, and what a serious critic "
    "would say. You may reason first between <think> and </think>; only what follows is read."
)
GOLD = "It depends on what we mean by it, so let us look at two readings and one objection."
Exchange = Mapping[str, str]
"""One item: `question`, and `reply`, the answer in the data, which may be empty."""


class PhilosophicalRLAIFConfig(HubItemsConfig, JudgeConfig, SingleTurnEnvConfig):
    """Settings of the questions, the answers and the judge."""

    dataset_split: str = Field(
        "train[:1000]",
        description="Split of the data set of the hub; a part is reserved for evaluations.",
    )
    preference: str = Field(PREFERENCE, description="Criterion by which answers are compared.")
    generator_model_name: str | None = Field(
        None, description="Model of the answers; None uses that of the server settings."
    )
    generator_max_tokens: int = Field(1024, ge=1, description="Token limit of an answer.")


def first_exchange(conversation: Any) -> Exchange | None:
    """Return the first message of the user and the reply to it; None without such a message."""
    messages = [message for message in conversation or () if isinstance(message, Mapping)]
    for index, message in enumerate(messages):
        question = str(message.get("content") or "").strip()
        if message.get("role") != "user" or not question:
            continue
        after = messages[index + 1] if index + 1 < len(messages) else {}
        is_reply = after.get("role") == "assistant"
        reply = str(after.get("content") or "").strip() if is_reply else ""
        return {"question": question, "reply": reply}
    return None


def pair_scores(is_lost: Sequence[bool], wins: Mapping[tuple[int, int], int]) -> list[float] | None:
    """Return [G] scores: the mean result of each answer against the others, -1 to 1.

    Args:
        is_lost: [G] whether an answer was truncated or is empty; it scores -1, and each other
            answer wins against it.
        wins: wins of the first answer of a pair in two verdicts, one in each order; without the
            pairs that the judge gave no verdict on.

    Returns:
        None if an answer has no result.
    """
    num_lost = sum(is_lost)
    results: list[list[float]] = [[LOST] if lost else [1.0] * num_lost for lost in is_lost]
    for (first, second), count in wins.items():
        results[first].append(count - 1.0)
        results[second].append(1.0 - count)
    return [statistics.fmean(own) for own in results] if all(results) else None


class PhilosophicalRLAIFEnv(DatasetItems, SingleTurnEnv):
    """Questions whose answers are judged in pairs; an item is an `Exchange`.

    Attributes:
        judge: compares answers in training.
        eval_judge: compares answers with the replies in the data.
    """

    name = "philosophical_rlaif"
    hub_dataset = "allenai/WildChat"
    env_config_cls = PhilosophicalRLAIFConfig
    config: PhilosophicalRLAIFConfig
    columns = ("conversation",)
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 2,
        "max_token_length": 8192,
        "wandb_name": "philosophical_rlaif",
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, config: Any, server_configs: Any, *args: Any, **kwargs: Any) -> None:
        if config.generator_model_name is not None:
            servers = server_configs if isinstance(server_configs, list) else [server_configs]
            changed = {"model_name": config.generator_model_name}
            server_configs = [server.model_copy(update=changed) for server in servers]
        super().__init__(config, server_configs, *args, **kwargs)
        self.judge = judge_of(self, split="train")
        self.eval_judge = judge_of(self, split="eval")

    def _read(self) -> tuple[list[Exchange], list[Exchange]]:
        splits = super()._read()
        train, test = (
            [found for row in rows if (found := first_exchange(row["conversation"]))]
            for rows in splits
        )
        if not train:
            raise ConfigError("no conversation of the data has a message of a user")
        return train, [exchange for exchange in test if exchange["reply"]]

    def prompt(self, item: Exchange) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": item["question"]},
        ]

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        return min(super()._budget(messages), self.config.generator_max_tokens)

    async def score(self, item: Exchange, answer: str) -> float:
        """Return the result against the reply in the data; in evaluations.

        Raises:
            NoVerdictError: an order has no verdict.
        """
        if not answer:
            return LOST
        case = self._case(item, answer, item["reply"])
        wins = await self.eval_judge.wins(case)
        if wins is None:
            raise NoVerdictError("an answer has no comparison with a verdict in both orders")
        return wins - 1.0

    async def score_all(self, item: Exchange, answers: Sequence[str]) -> Sequence[float]:
        """Compare the answers with each other; a single one with the reply in the data."""
        if len(answers) == 1:
            return [await self.score(item, answers[0])]
        complete = [i for i, answer in enumerate(answers) if answer]
        pairs = list(combinations(complete, 2))
        wins = await all_results(
            self.judge.wins(self._case(item, answers[i], answers[j])) for i, j in pairs
        )
        counted = {p: w for p, w in zip(pairs, wins, strict=True) if w is not None}
        scores = pair_scores([not answer for answer in answers], counted)
        if scores is None:
            raise NoVerdictError("an answer has no comparison with a verdict in both orders")
        return scores

    def _case(self, item: Exchange, first: str, second: str) -> Case:
        chat = [{"role": "user", "content": item["question"]}]
        return Case(chat, first, second, self.config.preference)

    async def evaluate_item(self, item: Exchange) -> dict[str, Any]:
        """Return the record of an answer; its score is None if the judge gave no verdict."""
        try:
            return await super().evaluate_item(item)
        except NoVerdictError:
            return {"messages": self.prompt(item), "score": None}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        judged = [sample for sample in samples if sample["score"] is not None]
        metrics = super().evaluation_metrics(judged) if judged else {}
        return {**metrics, "eval/fraction_judged": len(judged) / len(samples)}

    async def close(self) -> None:
        await self.judge.close()
        await self.eval_judge.close()
        await super().close()

    def check_gold_answer(self, item: Exchange) -> str:
        return GOLD

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        answers = quoted_answers(messages)
        return None if answers is None else f"\\boxed{{{'B' if answers[1] == GOLD else 'A'}}}"


if __name__ == "__main__":
    PhilosophicalRLAIFEnv.cli()
