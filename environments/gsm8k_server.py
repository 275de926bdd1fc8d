"""GSM8K: grade-school word problems, one turn, right or wrong.

    problem -> [system, user] -> G completions -> boxed answer against the gold one -> +1 or -1

`HubItems` reads the problems and hands them out; what is asked and what an answer is worth stands
here. Run `python environments/gsm8k_server.py serve --help`, or, with a vLLM server on port 9001
and without the data set's hub, make a few groups:

    python environments/gsm8k_server.py process --env.dataset_path environments/data/gsm8k_sample \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.single_turn_env import (
    Trajectory,
    ask,
    build_group,
    completion_budget,
    sample_trajectories,
)
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.hub_items import HubItems, HubItemsConfig
from atroposlib.utils.aio import all_results
from atroposlib.utils.length_penalty import length_factor
from atroposlib.utils.math_check import MathVerdict, answer_text, check_math_answer

__all__ = ["GSM8kEnv", "GSM8kEnvConfig", "gold_answer", "group_scores"]

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
FREE_LENGTH_FRACTION = 0.5
MIN_TRAINED_TOKENS = 10
"""Shorter completions carry nothing worth learning; they stay in the group but are muted."""

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


class GSM8kEnvConfig(HubItemsConfig):
    """Where the problems come from and how completions are drawn."""

    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")


def gold_answer(answer: str) -> str:
    """Return the number after the last `#` of a worked solution, without thousands commas."""
    return answer.rsplit("#", 1)[-1].strip().replace(",", "")


def prompt_messages(question: str, *, max_token_length: int) -> list[dict[str, str]]:
    """Return the messages that pose a problem and name the token budget."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT.format(max_token_length=max_token_length)},
        {"role": "user", "content": question},
    ]


def score_verdict(verdict: MathVerdict) -> float:
    """Return the score of one completion: 1.0 right, -1.0 wrong."""
    return 1.0 if verdict.is_correct else -1.0


def group_scores(
    scores: Sequence[float], lengths: Sequence[int], *, max_token_length: int
) -> list[float]:
    """Return the scores of a group; one in which all are right is ranked by length.

    Args:
        scores: [G] 1.0 or -1.0.
        lengths: [G] tokens of each trajectory, prompt included.
        max_token_length: the length that earns nothing; half of it is free.
    """
    if any(score != 1.0 for score in scores):
        return list(scores)
    return [
        length_factor(length, max_tokens=max_token_length, free_fraction=FREE_LENGTH_FRACTION)
        for length in lengths
    ]


class GSM8kEnv(HubItems):
    """Word problems with a numeric answer; an item is a `Problem`.

    Attributes:
        percent_correct_buffer: 1.0 or 0.0 for every trajectory since the last log.
        eval_metrics: of evaluations since the last log.
    """

    name = "gsm8k"
    hub_dataset = "gsm8k"
    hub_subset = "main"
    hub_test_split = "test"
    test_fraction = 0.1
    columns = ("question", "answer")
    env_config_cls = GSM8kEnvConfig
    config: GSM8kEnvConfig
    check_settings: ClassVar[dict[str, Any]] = {
        "dataset_path": str(SAMPLE),
        "num_score_workers": 1,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.percent_correct_buffer: list[float] = []
        self.eval_metrics: list[tuple[str, float]] = []

    @classmethod
    def config_init(cls) -> tuple[GSM8kEnvConfig, APIServerConfig]:
        """Return the published settings of this environment."""
        env_config = GSM8kEnvConfig(
            tokenizer_name=MODEL,
            group_size=8,
            total_steps=1000,
            batch_size=12,
            steps_per_eval=100,
            max_token_length=2048,
            wandb_name="gsm8k",
        )
        server_config = APIServerConfig(
            model_name=MODEL,
            base_url="http://localhost:9001/v1",
            api_key="x",
            server_type="vllm",
            num_requests_for_eval=256,
        )
        return env_config, server_config

    async def collect_trajectories(
        self, item: Problem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Wait for one group of completions of a problem and its scores."""
        messages, budget = self._prompt(item)
        if budget < 1:
            logger.warning("a problem leaves no room in max_token_length; skipped")
            return None, []
        trajectories = await sample_trajectories(
            self.server,
            self.tokenizer,
            messages,
            group_size=self.config.group_size,
            max_tokens=budget,
            temperature=self.config.temperature,
        )
        return await self.score(item, messages, trajectories), []

    async def score(
        self,
        item: Problem,
        messages: Sequence[Mapping[str, str]],
        trajectories: Sequence[Trajectory],
    ) -> ScoredDataGroup | None:
        """Turn trajectories into a group; None when the gold answer cannot be read."""
        verdicts = await self._check([trajectory.completion for trajectory in trajectories], item)
        if not trajectories or not all(verdict.is_gold_readable for verdict in verdicts):
            return None
        self.percent_correct_buffer += [float(verdict.is_correct) for verdict in verdicts]
        return build_group(
            messages,
            trajectories,
            group_scores(
                [score_verdict(verdict) for verdict in verdicts],
                [len(trajectory.tokens) for trajectory in trajectories],
                max_token_length=self.config.max_token_length,
            ),
            is_muted=[t.num_completion_tokens < MIN_TRAINED_TOKENS for t in trajectories],
            generation_params={"temperature": self.config.temperature},
            include_messages=self.config.include_messages,
        )

    def check_gold_answer(self, item: Problem) -> str:
        """Return the worked solution as a thought, and its number as the answer."""
        solution, number = item["answer"], gold_answer(item["answer"])
        return f"<think>{solution}\n</think>The answer is \\boxed{{{number}}}."

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Measure the accuracy on the test split."""
        start_time = time.time()
        samples = await all_results(self.evaluate_problem(problem) for problem in self.eval_items())
        accuracy = sum(sample["score"] for sample in samples) / len(samples)
        self.eval_metrics.append(("eval/percent_correct", accuracy))
        logger.info("eval/percent_correct: %.4f of %d problems", accuracy, len(samples))
        await self.evaluate_log(
            metrics={"eval/percent_correct": accuracy},
            samples=samples,
            start_time=start_time,
            end_time=time.time(),
            generation_parameters={
                "temperature": self.config.eval_temperature,
                "max_tokens": self.config.max_token_length,
            },
        )

    async def evaluate_problem(self, problem: Problem) -> dict[str, Any]:
        """Wait for one answer to a test problem; returns its record."""
        messages, budget = self._prompt(problem)
        [(completion, finish_reason)] = await ask(
            self.server,
            self.tokenizer,
            messages,
            n=1,
            max_tokens=budget,
            temperature=self.config.eval_temperature,
            split="eval",
        )
        [verdict] = await self._check([completion], problem)
        return {
            "messages": [*messages, {"role": "assistant", "content": completion}],
            "question": problem["question"],
            "gold_answer": gold_answer(problem["answer"]),
            "gold_parsed": verdict.gold_parsed,
            "model_parsed": verdict.answer_parsed,
            "score": int(verdict.is_correct),
            "correct": verdict.is_correct,
            "finish_reason": finish_reason,
            "response_after_think": answer_text(completion),
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the accuracy since the last log and finished evaluations."""
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.percent_correct_buffer:
            metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(
                self.percent_correct_buffer
            )
        metrics.update(self.eval_metrics)
        self.percent_correct_buffer, self.eval_metrics = [], []
        await super().wandb_log(metrics)

    def _prompt(self, problem: Problem) -> tuple[list[dict[str, str]], int]:
        limit = self.config.max_token_length
        messages = prompt_messages(problem["question"], max_token_length=limit)
        return messages, completion_budget(self.tokenizer, messages, max_token_length=limit)

    async def _check(self, completions: Sequence[str], problem: Problem) -> list[MathVerdict]:
        gold = gold_answer(problem["answer"])
        unfinished = MathVerdict(False, True, gold, "")
        checks = (
            self.score_pool.run(check_math_answer, completion, gold, default=unfinished)
            for completion in completions
        )
        return await all_results(checks)


if __name__ == "__main__":
    GSM8kEnv.cli()
