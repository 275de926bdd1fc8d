r"""InternBootcamp: tasks of classes with the interface of the package `internbootcamp`.

    case_generator() -> prompt_func(identity) -> completion -> verify_score(text, identity, ...)

`--env.task_name` selects the class: `Coinsbootcamp` of this repository, any class by
`MODULE:CLASS`, the name of a class of the package, or `RandomTask` for a random one of the package
per item. The package is not on PyPI; install it from its repository.

    python environments/intern_bootcamp/intern_bootcamp_env.py process \
        --env.task_name Coinsbootcamp --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.tasks.bootcamps import (
    BootcampCase,
    bootcamp_reward,
    load_bootcamp,
    make_case,
    package_tasks,
    verify_answer,
)
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import DEEP_THINKING, deep_hermes_settings
from atroposlib.utils.aio import all_results

__all__ = ["InternBootcampEnv", "InternBootcampEnvConfig"]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="cases of a bootcamp class: a generator, a prompt and a verifier",
    turns="1",
    reward="+1 right, else -0.5, plus 0.2 if well-formed",
    data="made on the spot",
    needs="core install for `Coinsbootcamp`; other classes by `MODULE:CLASS`",
    command="process --env.task_name Coinsbootcamp --env.total_steps 4",
)

RANDOM_TASK = "RandomTask"


class InternBootcampEnvConfig(SingleTurnEnvConfig):
    """Settings of the task and of its rewards."""

    task_name: str = Field(
        RANDOM_TASK,
        description="Class of the task: Coinsbootcamp, MODULE:CLASS, a class of the package "
        "internbootcamp, or RandomTask for a random one of the package per item.",
    )
    task_params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the class, as JSON."
    )
    correct_reward: float = Field(1.0, description="Reward of a right answer.")
    incorrect_reward: float = Field(-0.5, description="Reward of a wrong answer.")
    format_bonus: float = Field(
        0.2, ge=0, lt=1, description="Score of the verifier for a wrong but well-formed answer."
    )
    require_reasoning: bool = Field(
        True,
        description="Whether the prompt asks for reasoning, and the verifier lowers the score of "
        "completions shorter than min_reasoning_length.",
    )
    min_reasoning_length: int = Field(
        50, ge=1, description="Length in characters below which a completion is short."
    )
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus of rollouts.")
    seed: int = Field(0, description="Seed of the cases.")
    num_eval_cases: int = Field(20, ge=0, le=10_000, description="Number of evaluation cases.")
    case_timeout_s: float = Field(
        30.0, gt=0, description="Time limit of the generator and of the verifier in seconds."
    )


class InternBootcampEnv(SingleTurnEnv):
    """Cases of a bootcamp class; an item is a `BootcampCase`.

    Attributes:
        iter: cases made so far; kept in checkpoints.
        bases: scores of verifiers since the last log, by task.
    """

    name = "intern_bootcamp"
    env_config_cls = InternBootcampEnvConfig
    config: InternBootcampEnvConfig
    scores_thinking = True  # verifiers take the whole completion
    check_settings: ClassVar[dict[str, Any]] = {"task_name": "Coinsbootcamp"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.tasks: list[str] = []
        self.eval_cases: list[BootcampCase] = []
        self.bases: dict[str, list[float]] = defaultdict(list)

    @classmethod
    def config_init(cls) -> tuple[InternBootcampEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            InternBootcampEnvConfig,
            group_size=8,
            max_num_workers_per_node=16,
            total_steps=10000,
            steps_per_eval=100,
            max_token_length=8192,
            min_batch_allocation=0.1,
            wandb_name="intern_bootcamp",
            data_path_to_save_groups="data/intern_bootcamp_random_tasks.jsonl",
        )

    async def setup(self) -> None:
        name = self.config.task_name
        # In a thread: packages of tasks import for seconds.
        if name == RANDOM_TASK:
            self.tasks = await asyncio.to_thread(package_tasks)
        else:
            await asyncio.to_thread(load_bootcamp, name, self.config.task_params)
            self.tasks = [name]
        numbers = range(self.config.num_eval_cases)
        self.eval_cases = await all_results(self._make(f"evaluation {i}") for i in numbers)
        logger.info("%d tasks, %d evaluation cases", len(self.tasks), len(self.eval_cases))

    async def get_next_item(self) -> BootcampCase:
        number, self.iter = self.iter, self.iter + 1
        return await self._make(f"training {number}")

    def eval_items(self) -> Sequence[BootcampCase]:
        return self.eval_cases

    def prompt(self, item: BootcampCase) -> list[dict[str, str]]:
        user = {"role": "user", "content": item.prompt}
        if not self.config.require_reasoning:
            return [user]
        return [{"role": "system", "content": DEEP_THINKING}, user]

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def score(self, item: BootcampCase, answer: str) -> float:
        """Return the reward of an answer; a wrong one after a timeout of the verifier."""
        base = await self._verify(item, answer)
        return self._reward(base)

    def note_group(
        self, item: BootcampCase, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        self.bases[short_name(item.task)] += scores

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        by_task, self.bases = self.bases, defaultdict(list)
        return self._rates("train", by_task)

    async def evaluate_item(self, item: BootcampCase) -> dict[str, Any]:
        return {**await super().evaluate_item(item), "task": short_name(item.task)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        by_task: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            by_task[sample["task"]].append(sample["score"])
        is_right = [sample["score"] == self.config.correct_reward for sample in samples]
        overall = {"eval/overall_accuracy": statistics.fmean(is_right)}
        return {**self._rates("eval", by_task), **overall}

    def is_correct(self, record: Mapping[str, Any]) -> bool:
        return bool(record["score"] == self.config.correct_reward)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: BootcampCase) -> str | None:
        thought = "<think>This case was solved by trying one value after the other.</think>"
        return None if item.solution is None else f"{thought}\n{item.solution}"

    async def _make(self, seed: str) -> BootcampCase:
        seed = f"{seed} {self.config.seed}"
        task = random.Random(seed).choice(self.tasks)
        made: BootcampCase = await self.score_pool.run(
            make_case, task, self.config.task_params, seed, timeout=self.config.case_timeout_s
        )
        return made

    async def _verify(self, item: BootcampCase, answer: str) -> float:
        verify = partial(
            verify_answer,
            format_score=self.config.format_bonus,
            short_penalty=self.config.require_reasoning,
            short_threshold=self.config.min_reasoning_length,
        )
        timeout_s = self.config.case_timeout_s
        base: float = await self.score_pool.run(
            verify, item, answer, timeout=timeout_s, default=0.0
        )
        return base

    def _reward(self, base: float) -> float:
        correct, incorrect = self.config.correct_reward, self.config.incorrect_reward
        return bootcamp_reward(base, correct=correct, incorrect=incorrect)

    def _rates(self, area: str, by_task: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the fractions of right and of well-formed answers of each task."""
        correct, incorrect = self.config.correct_reward, self.config.incorrect_reward
        rates = {}
        for task, scores in by_task.items():
            rates[f"{area}/{task}_accuracy"] = statistics.fmean(s == correct for s in scores)
            rates[f"{area}/{task}_format_rate"] = statistics.fmean(s != incorrect for s in scores)
        return rates


def short_name(task: str) -> str:
    """Return the name of the class of a task."""
    return task.rpartition(":")[2]


if __name__ == "__main__":
    InternBootcampEnv.cli()
