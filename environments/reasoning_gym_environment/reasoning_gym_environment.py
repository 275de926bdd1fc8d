"""Reasoning gym: procedural tasks with their own scorers, one turn, a score in [0, 1].

    task and question -> [system, user] -> G completions -> <answer> -> the task's scorer

`atroposlib/tasks/reasoning_gym.py` makes and scores the items, `SingleTurnEnv` samples and
evaluates; this page adds the curriculum and the files of saved rollouts. Nothing is downloaded.
Run it with `serve`, `process` or `evaluate`, for example:

    python environments/reasoning_gym_environment/reasoning_gym_environment.py process --help
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum
from atroposlib.envs.reporting import Reward
from atroposlib.envs.single_turn_env import SingleTurnEnv, Trajectory
from atroposlib.tasks import reasoning_gym as tasks
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.reasoning_gym import (
    CORRECT,
    Curriculum,
    ReasoningGymEnvConfig,
    TaskItem,
)
from atroposlib.tasks.single_turn_parts import RolloutDump, default_configs, rank_by_length

__all__ = ["Curriculum", "ReasoningGymEnv", "ReasoningGymEnvConfig"]

logger = logging.getLogger("environments.reasoning_gym_environment")

CARD = EnvironmentCard(
    task="about a hundred procedural tasks",
    turns="1",
    reward="0 to 1 from the task's own scorer",
    data="made on the spot",
    needs="`pip install '.[examples]'`",
    command="process --env.task_names chain_sum --env.total_steps 4",
)

MODEL = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
FREE_LENGTH_FRACTION = 0.75


class ReasoningGymEnv(SingleTurnEnv):
    """Tasks of the reasoning-gym package; an item is a `TaskItem`.

    Attributes:
        iter: training items handed out so far; kept in checkpoints.
        curriculum_state: restored state of the curriculum.
    """

    name = "reasoning_gym"
    env_config_cls = ReasoningGymEnvConfig
    config: ReasoningGymEnvConfig
    scores_thinking = True  # the scorer itself ignores the thinking
    check_settings: ClassVar[dict[str, Any]] = {"num_score_workers": 1}

    def __init__(self, config: ReasoningGymEnvConfig, *args: Any, **kwargs: Any) -> None:
        config.validate_config()
        super().__init__(config, *args, **kwargs)
        self.iter = 0
        self.curriculum = Curriculum(target_accuracy=config.curriculum_target_accuracy)
        self.curriculum_state: dict[str, Any] = {}
        self.eval_set: list[TaskItem] = []
        self.rollout_dump = RolloutDump(config, "reasoning_gym")

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymEnvConfig, APIServerConfig]:
        return default_configs(
            ReasoningGymEnvConfig,
            MODEL,
            group_size=8,
            total_steps=250,
            batch_size=1024,
            steps_per_eval=25,
            max_token_length=8192,
            inference_weight=4.0,
            min_batch_allocation=0.1,
            eval_handling=EvalHandlingEnum.NONE,
            wandb_name="reasoning_gym",
            seed=1918,
            complexity_mode="random",
            rollout_save_score_threshold=0.51,
        )

    async def setup(self) -> None:
        self.config.set_log_levels(logger)
        self.eval_set = await asyncio.to_thread(tasks.eval_items, self.config)
        names = tasks.task_names(self.config)
        logger.info("%d tasks, %d evaluation items", len(names), len(self.eval_set))

    async def get_next_item(self) -> TaskItem:
        """Return the next training item, whose question is not in the evaluation set."""
        iteration, self.iter = self.iter, self.iter + 1
        complexity = None
        if self.config.complexity_mode == "curriculum":
            task, _ = tasks.train_task_and_complexity(self.config, iteration)
            complexity = self.curriculum.complexity(task)
        # In a thread: some generators take seconds.
        return await asyncio.to_thread(tasks.train_item, self.config, iteration, complexity)

    def eval_items(self) -> Sequence[TaskItem]:
        return self.eval_set

    @property
    def eval_token_limit(self) -> int:
        return round(self.config.eval_budget_factor * self.config.max_token_length)

    def prompt(self, item: TaskItem) -> list[dict[str, str]]:
        return tasks.prompt_messages(item, self.config)

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def score_all(self, item: TaskItem, answers: Sequence[str]) -> list[Reward]:
        """Score each different answer once: the scorers of the tasks are deterministic."""
        different = list(dict.fromkeys(answers))
        scores = await super().score_all(item, different)
        score_of = dict(zip(different, scores, strict=True))
        return [score_of[answer] for answer in answers]

    async def score(self, item: TaskItem, answer: str) -> float:
        """Return the score of the task's scorer; 0 after a timeout."""
        return await self.score_pool.run(tasks.score_completion, answer, item, default=0.0)

    def note_group(
        self, item: TaskItem, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        if self.config.complexity_mode == "curriculum":
            accuracy = statistics.fmean(score >= CORRECT for score in scores)
            self.curriculum.record(item.task, accuracy)
        logger.debug("%s, complexity %s: scores %s", item.task, item.complexity, scores)
        details = {
            "task": item.task,
            "complexity": item.complexity,
            "gold_answer": item.entry["answer"],
        }
        self.rollout_dump.save(details, self.prompt(item), trajectories, scores)

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        return rank_by_length(
            scores,
            trajectories,
            max_tokens=self.config.max_token_length,
            free_fraction=FREE_LENGTH_FRACTION,
            full_score=CORRECT,
        )

    def check_gold_answer(self, item: TaskItem) -> str | None:
        """Return the package's answer after a thought; None if it has no answer."""
        answer = item.entry["answer"]
        return None if answer is None else f"<think>Done.</think><answer>{answer}</answer>"

    async def evaluate_item(self, item: TaskItem) -> dict[str, Any]:
        sample = await super().evaluate_item(item)
        return {
            **sample,
            "task": item.task,
            "question": item.question,
            "gold_answer": item.entry["answer"],
            "model_parsed": tasks.extract_answer(sample["messages"][-1]["content"]),
            "correct": sample["score"] >= CORRECT,
        }

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        scores = [sample["score"] for sample in samples]
        return {
            "eval/percent_correct": statistics.fmean(score >= CORRECT for score in scores),
            "eval/mean_score": statistics.fmean(scores),
        }

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        return {"train/percent_correct": statistics.fmean(score >= CORRECT for score in scores)}

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        metrics["train/score_timeouts"] = self.score_pool.num_timeouts
        metrics.update(self.curriculum.metrics())
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        own = {"iter": self.iter, "curriculum_state": self.curriculum.state()}
        super().save_checkpoint(step, {**(data or {}), **own})

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        self.curriculum = Curriculum(
            target_accuracy=self.config.curriculum_target_accuracy, **self.curriculum_state
        )

    async def close(self) -> None:
        self.rollout_dump.close()
        await super().close()

    def _shown(self, completion: str, *, is_cut: bool) -> str:
        return completion  # a truncated completion may contain its answer

    def _is_muted(self, trajectory: Trajectory) -> bool:
        is_cut = self.config.mask_too_long_completions and trajectory.is_truncated
        return is_cut or super()._is_muted(trajectory)


if __name__ == "__main__":
    ReasoningGymEnv.cli()
