"""Reasoning gym: procedural tasks with their own scorers, one turn, a score in [0, 1].

    task and question -> [system, user] -> G completions -> <answer> -> the task's scorer

Needs no download. Run it with `serve`, `process` or `evaluate`, for example:

    python environments/reasoning_gym_environment/reasoning_gym_environment.py process --help
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, EvalHandlingEnum, Item, ScoredDataGroup
from atroposlib.envs.single_turn_env import (
    Trajectory,
    ask,
    build_group,
    completion_budget,
    sample_trajectories,
)
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.reasoning_gym import tasks
from atroposlib.tasks.reasoning_gym.config import ReasoningGymEnvConfig
from atroposlib.tasks.reasoning_gym.curriculum import Curriculum
from atroposlib.tasks.reasoning_gym.rollout_dump import RolloutDump
from atroposlib.tasks.reasoning_gym.tasks import TaskItem
from atroposlib.utils.length_penalty import length_factor
from atroposlib.utils.score_pool import ScorePool

__all__ = ["ReasoningGymEnv", "ReasoningGymEnvConfig", "group_scores"]

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
CORRECT = 0.5
"""Score from which a completion counts as correct in accuracies."""
FREE_LENGTH_FRACTION = 0.75


def group_scores(
    scores: Sequence[float], lengths: Sequence[int], *, max_token_length: int
) -> list[float]:
    """Return the scores of a group; in one where all are correct, long completions lose.

    Args:
        scores: [G] in [0, 1].
        lengths: [G] tokens of each trajectory, prompt included.
        max_token_length: the length at which nothing is left; three quarters of it are free.
    """
    if any(score < CORRECT for score in scores):
        return list(scores)
    return [
        score
        * length_factor(length, max_tokens=max_token_length, free_fraction=FREE_LENGTH_FRACTION)
        for score, length in zip(scores, lengths, strict=True)
    ]


class ReasoningGymEnv(BaseEnv):
    """Tasks of the reasoning-gym package.

    Attributes:
        iter: training items handed out so far; kept in checkpoints.
        curriculum_state: complexities of the tasks; kept in checkpoints.
    """

    name = "reasoning_gym"
    env_config_cls = ReasoningGymEnvConfig
    config: ReasoningGymEnvConfig
    check_settings: ClassVar[dict[str, Any]] = {"num_score_workers": 1}

    def __init__(
        self,
        config: ReasoningGymEnvConfig,
        server_configs: Any,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        config.validate_config()
        super().__init__(config, server_configs, slurm, testing)
        self.iter = 0
        self.curriculum = Curriculum(target_accuracy=config.curriculum_target_accuracy)
        self.curriculum_state: dict[str, Any] = {}
        self.eval_set: list[TaskItem] = []
        self.percent_correct_buffer: list[float] = []
        self.eval_metrics: list[tuple[str, float]] = []
        self.rollout_dump = RolloutDump(config)
        self.score_pool = ScorePool(
            num_workers=config.num_score_workers, timeout_s=config.score_timeout_s
        )

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymEnvConfig, APIServerConfig]:
        """Return the published settings of this environment."""
        env_config = ReasoningGymEnvConfig(
            tokenizer_name=MODEL,
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
        server_config = APIServerConfig(
            model_name=MODEL,
            base_url="http://localhost:9004/v1",
            api_key="x",
            server_type="vllm",
        )
        return env_config, server_config

    async def setup(self) -> None:
        """Make the evaluation set, which also checks the names and parameters of the tasks."""
        if self.config.suppress_base_env_logs:
            logging.getLogger("atroposlib.envs.base").setLevel(logging.WARNING)
        if self.config.debug_logging:
            logger.setLevel(logging.DEBUG)
        self.eval_set = await asyncio.to_thread(tasks.eval_items, self.config)
        names = tasks.task_names(self.config)
        logger.info("%d tasks, %d evaluation items", len(names), len(self.eval_set))

    async def get_next_item(self) -> TaskItem:
        """Make the next training item; it never repeats a question of the evaluation set."""
        iteration, self.iter = self.iter, self.iter + 1
        complexity = None
        if self.config.complexity_mode == "curriculum":
            task, _ = tasks.train_task_and_complexity(self.config, iteration)
            complexity = self.curriculum.complexity(task)
        # Some generators search for seconds; rollouts go on meanwhile.
        return await asyncio.to_thread(tasks.train_item, self.config, iteration, complexity)

    async def collect_trajectories(
        self, item: TaskItem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Wait for one group of completions of an item and its scores."""
        messages = tasks.prompt_messages(item, self.config)
        limit = self.config.max_token_length
        budget = completion_budget(self.tokenizer, messages, max_token_length=limit)
        if budget < 1:
            logger.warning("an item of %s leaves no room in max_token_length; skipped", item.task)
            return None, []
        trajectories = await sample_trajectories(
            self.server,
            self.tokenizer,
            messages,
            group_size=self.config.group_size,
            max_tokens=budget,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
        )
        return await self.score(item, messages, trajectories), []

    async def score(
        self,
        item: TaskItem,
        messages: Sequence[Mapping[str, str]],
        trajectories: Sequence[Trajectory],
    ) -> ScoredDataGroup:
        """Turn trajectories into a group; truncated ones are muted when the settings say so."""
        raw = await asyncio.gather(*(self._check(t.completion, item) for t in trajectories))
        correct = [float(score >= CORRECT) for score in raw]
        self.percent_correct_buffer += correct
        if self.config.complexity_mode == "curriculum":
            self.curriculum.record(item.task, statistics.fmean(correct))
        logger.debug("%s, complexity %s: scores %s", item.task, item.complexity, raw)
        self.rollout_dump.save(item, messages, trajectories, raw)
        return build_group(
            messages,
            trajectories,
            group_scores(
                raw,
                [len(trajectory.tokens) for trajectory in trajectories],
                max_token_length=self.config.max_token_length,
            ),
            is_muted=[
                self.config.mask_too_long_completions and trajectory.is_truncated
                for trajectory in trajectories
            ],
            generation_params={"temperature": self.config.temperature, "top_p": self.config.top_p},
            include_messages=self.config.include_messages,
        )

    def check_gold_answer(self, item: TaskItem) -> str | None:
        """Return the package's answer after a thought; None where it names no answer."""
        answer = item.entry["answer"]
        return None if answer is None else f"<think>Done.</think><answer>{answer}</answer>"

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Measure the score and the accuracy on the evaluation set."""
        start_time = time.time()
        samples = await asyncio.gather(*(self.evaluate_item(item) for item in self.eval_set))
        metrics = {
            "eval/percent_correct": statistics.fmean(s["score"] >= CORRECT for s in samples),
            "eval/mean_score": statistics.fmean(s["score"] for s in samples),
        }
        self.eval_metrics += metrics.items()
        accuracy = metrics["eval/percent_correct"]
        logger.info("eval/percent_correct: %.4f of %d items", accuracy, len(samples))
        await self.evaluate_log(
            metrics=metrics,
            samples=samples,
            start_time=start_time,
            end_time=time.time(),
            generation_parameters={"temperature": self.config.eval_temperature},
        )

    async def evaluate_item(self, item: TaskItem) -> dict[str, Any]:
        """Wait for one answer to an evaluation item; returns its record."""
        messages = tasks.prompt_messages(item, self.config)
        limit = round(self.config.eval_budget_factor * self.config.max_token_length)
        [answer] = await ask(
            self.server,
            self.tokenizer,
            messages,
            n=1,
            max_tokens=completion_budget(self.tokenizer, messages, max_token_length=limit),
            temperature=self.config.eval_temperature,
            split="eval",
        )
        completion = answer.completion
        score = await self._check(completion, item)
        return {
            "messages": [*messages, {"role": "assistant", "content": completion}],
            "task": item.task,
            "question": item.question,
            "gold_answer": item.entry["answer"],
            "model_parsed": tasks.extract_answer(completion),
            "score": score,
            "correct": score >= CORRECT,
            "finish_reason": answer.finish_reason,
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the accuracy since the last log, finished evaluations and the curriculum."""
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.percent_correct_buffer:
            metrics["train/percent_correct"] = statistics.fmean(self.percent_correct_buffer)
        metrics["train/score_timeouts"] = self.score_pool.num_timeouts
        metrics.update(self.eval_metrics)
        metrics.update(self.curriculum.metrics())
        self.percent_correct_buffer, self.eval_metrics = [], []
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Keep the position in the items and the curriculum."""
        own = {"iter": self.iter, "curriculum_state": self.curriculum.state()}
        super().save_checkpoint(step, {**(data or {}), **own})

    def load_checkpoint(self) -> None:
        """Restore the position in the items and the curriculum."""
        super().load_checkpoint()
        self.curriculum = Curriculum(
            target_accuracy=self.config.curriculum_target_accuracy, **self.curriculum_state
        )

    async def close(self) -> None:
        """End the scoring processes and close the files of saved rollouts."""
        self.score_pool.close()
        self.rollout_dump.close()
        await super().close()

    async def _check(self, completion: str, item: TaskItem) -> float:
        return await self.score_pool.run(tasks.score_completion, completion, item, default=0.0)


if __name__ == "__main__":
    ReasoningGymEnv.cli()
