"""GSM8K, grade-school word problems with a numeric answer: a complete environment on one page.

    problem -> [system, user] -> G completions -> boxed answer against the gold one -> +1 or -1

`DatasetItems` reads the problems, `SingleTurnEnv` samples and evaluates; this page defines the
prompt and the score. With a vLLM server on port 9001 and without the hub, make a few groups:

    python environments/gsm8k_server.py process --env.dataset_path environments/data/gsm8k_sample \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.math_problems import math_record, math_verdict
from atroposlib.tasks.single_turn_parts import default_configs, rank_by_length
from atroposlib.utils.math_check import MathVerdict

__all__ = ["GSM8kEnv", "GSM8kEnvConfig", "gold_answer"]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="grade-school word problems",
    turns="1",
    reward="+1 right, -1 wrong; by length when all are right",
    data="GSM8K from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4",
)

MODEL = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
SAMPLE = Path(__file__).with_name("data") / "gsm8k_sample"
SYSTEM_PROMPT = (
    "You are an AI that thinks deeply and may reason at great length before it answers. Put your "
    "reasoning inside <think> </think> tags, work through the problem in small steps and check "
    "them, then give the solution after the closing tag.\n\n"
    "You have at most {max_token_length} tokens for reasoning and solution together; use fewer "
    "where fewer are enough.\n\n"
    "State the final answer once, as a plain number, in the form \\boxed{{number}}."
)

Problem = Mapping[str, str]
"""One row: `question`, and `answer`, a worked solution with the gold answer after its last `#`."""


class GSM8kEnvConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Data set of the problems, and sampling of the completions."""


def gold_answer(answer: str) -> str:
    """Return the number after the last `#` of a worked solution, without thousands commas."""
    return answer.rsplit("#", 1)[-1].strip().replace(",", "")


class GSM8kEnv(DatasetItems, SingleTurnEnv):
    """Word problems with a numeric answer; an item is a `Problem`."""

    name = "gsm8k"
    hub_dataset = "gsm8k"
    hub_subset = "main"
    hub_test_split = "test"
    test_fraction = 0.1
    columns = ("question", "answer")
    env_config_cls = GSM8kEnvConfig
    config: GSM8kEnvConfig
    scores_thinking = True  # the check skips the thinking itself, also an unfinished one
    logs_percent_correct = True
    min_trained_tokens = 10
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE), "num_score_workers": 1}

    @classmethod
    def config_init(cls) -> tuple[GSM8kEnvConfig, APIServerConfig]:
        """Return the default settings and the default server."""
        return default_configs(
            GSM8kEnvConfig,
            MODEL,
            port=9001,
            server={"num_requests_for_eval": 256},
            group_size=8,
            total_steps=1000,
            batch_size=12,
            steps_per_eval=100,
            max_token_length=2048,
            wandb_name="gsm8k",
        )

    def prompt(self, item: Problem) -> list[dict[str, str]]:
        """Return the messages that pose a problem and state the token budget."""
        system = SYSTEM_PROMPT.format(max_token_length=self.config.max_token_length)
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": item["question"]},
        ]

    async def score(self, item: Problem, answer: str) -> float:
        """Return 1.0 for the gold answer, -1.0 otherwise."""
        return 1.0 if (await self._verdict(item, answer)).is_correct else -1.0

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """Rank a group of correct answers by length; up to half of the limit a score stays 1."""
        return rank_by_length(scores, trajectories, max_tokens=self.config.max_token_length)

    async def collect_trajectories(
        self, item: Problem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group; None if the gold answer cannot be parsed."""
        if not (await self._verdict(item, "")).is_gold_readable:
            logger.warning("item skipped: its gold answer is not a number: %r", item["answer"])
            return None, []
        return await super().collect_trajectories(item)

    async def evaluate_item(self, item: Problem) -> dict[str, Any]:
        """Return the record of one answer to a test problem, with both answers as parsed."""
        record = await super().evaluate_item(item)
        verdict = await self._verdict(item, record["messages"][-1]["content"])
        return math_record(record, gold_answer(item["answer"]), verdict)

    def check_gold_answer(self, item: Problem) -> str:
        """Return the worked solution as a thought, and its number as the answer."""
        solution, number = item["answer"], gold_answer(item["answer"])
        return f"<think>{solution}\n</think>The answer is \\boxed{{{number}}}."

    async def _verdict(self, item: Problem, completion: str) -> MathVerdict:
        return await math_verdict(self.score_pool, completion, gold_answer(item["answer"]))


if __name__ == "__main__":
    GSM8kEnv.cli()
