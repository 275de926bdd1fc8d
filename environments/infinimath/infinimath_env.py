"""Infinimath: generated exercises in seven levels, harder as the policy improves.

    level -> exercise -> [system, user] <think> -> G completions -> right? thought? boxed? -> score
      └──────── one up when the last results are good ◄────────────────┘

Exercises come from the package mathgenerator if it is installed, else from built-in generators
(always with `--env.generator builtin`). Needs no data:

    python environments/infinimath/infinimath_env.py process --env.generator builtin \
        --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.infinimath import (
    MAX_LEVEL,
    Exercise,
    GeneratorKind,
    MathCurriculum,
    ProblemSource,
    WordProblems,
    first_boxed,
    has_thought,
    is_equal,
    read_answer,
)
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.utils.length_penalty import penalize_length

__all__ = ["InfiniteMathEnv", "InfiniteMathEnvConfig", "reward_of"]


class InfiniteMathEnvConfig(SingleTurnEnvConfig):
    """Settings of the curriculum, the rewards and the exercises."""

    starting_level: int = Field(1, ge=1, le=MAX_LEVEL, description="Level of the first exercise.")
    progress_threshold: float = Field(
        0.8, ge=0, le=1, description="Mean result at which the curriculum advances by one level."
    )
    min_evaluations: int = Field(5, ge=1, description="Number of latest results in that mean.")
    max_attempts_per_problem: int = Field(
        3, ge=1, description="Maximum number of groups of one exercise while no answer is right."
    )
    correct_reward: float = Field(1.0, description="Reward of a right answer.")
    incorrect_reward: float = Field(-1.0, description="Reward of a wrong answer.")
    think_block_bonus: float = Field(0.2, ge=0, description="Bonus for one closed thinking block.")
    boxed_answer_bonus: float = Field(
        0.2, ge=0, description="Bonus for a boxed answer after the thinking block."
    )
    apply_length_penalty: bool = Field(
        True, description="Whether groups of only right answers are ranked by length."
    )
    length_threshold_ratio: float = Field(
        0.5, ge=0, le=1, description="Fraction of max_token_length without a length penalty."
    )
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(0.9, gt=0, le=1, description="Nucleus of rollouts; 1 disables it.")
    generator: GeneratorKind = Field(
        "auto",
        description="Source of the exercises: mathgenerator, builtin, or auto for the former if "
        "it is installed.",
    )
    problem_seed: int = Field(0, description="Seed of the exercises.")
    word_problem_model_name: str = Field(
        "gpt-4.1-mini", description="Model that rewrites exercises as stories."
    )
    word_problem_openai_api_key: str | None = Field(
        default_factory=lambda: os.environ.get("OPENAI_API_KEY"),
        repr=False,
        description="API key of that model, by default from OPENAI_API_KEY; without a key, "
        "exercises are not rewritten.",
    )
    word_problem_openai_base_url: str | None = Field(
        None, description="Base URL of that model; None is OpenAI's own."
    )

    @model_validator(mode="after")
    def _right_answers_earn_most(self) -> InfiniteMathEnvConfig:
        if self.correct_reward <= self.best_wrong_reward:
            raise ValueError("correct_reward must exceed incorrect_reward with both bonuses")
        if self.apply_length_penalty and self.best_wrong_reward >= 0:
            raise ValueError(
                "with apply_length_penalty, incorrect_reward with both bonuses must be below 0: a "
                "right answer that fills max_token_length earns 0"
            )
        return self

    @property
    def best_wrong_reward(self) -> float:
        """Maximum reward of a wrong answer: with both bonuses."""
        return self.incorrect_reward + self.think_block_bonus + self.boxed_answer_bonus


CARD = EnvironmentCard(
    task="endless exercises in seven levels",
    turns="1",
    reward="right or wrong, and 0.2 each for a thought and a box",
    data="made on the spot",
    needs="core install; `pip install '.[infinimath]'` for more kinds of exercises",
    command="process --env.generator builtin --env.total_steps 4",
)

MODEL = "NousResearch/Nous-Hermes-2-Yi-34B"
EVALUATED = -1
"""Number of earlier attempts in items of an evaluation."""
SYSTEM_PROMPT = (
    "You are an expert in mathematics. Work through the problem inside <think> </think> tags, one "
    "step at a time, and check the result. Behind the closing tag give the answer once, as plainly "
    "as it can be written, in the form \\boxed{answer}."
)
NUM_EVAL_PROBLEMS = 10


def reward_of(completion: str, solution: str, config: InfiniteMathEnvConfig) -> float:
    """Return the reward of a completion, bonuses included; an empty one is wrong."""
    is_correct = is_equal(read_answer(completion), solution)
    reward = config.correct_reward if is_correct else config.incorrect_reward
    reward += config.think_block_bonus * has_thought(completion)
    is_boxed = "</think>" in completion and first_boxed(visible_text(completion)) is not None
    return reward + config.boxed_answer_bonus * is_boxed


def eval_problems(source: ProblemSource) -> dict[int, list[Exercise]]:
    """Return the evaluation exercises by level."""
    return {
        level: [source.make(level, f"evaluation {i}") for i in range(NUM_EVAL_PROBLEMS)]
        for level in range(1, MAX_LEVEL + 1)
    }


class InfiniteMathEnv(SingleTurnEnv):
    """Exercises at the level of the curriculum; an item is an exercise and its earlier attempts.

    Attributes:
        iter: exercises handed out so far; kept in checkpoints, as are the next two.
        curriculum_level: restored level.
        performance_history: restored results by level.
    """

    env_config_cls = InfiniteMathEnvConfig
    config: InfiniteMathEnvConfig
    scores_thinking = True
    prefill = "\n<think>\n"
    check_settings: ClassVar[dict[str, Any]] = {
        "generator": "builtin",
        "word_problem_openai_api_key": None,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.iter = 0
        self.curriculum_level = config.starting_level
        self.performance_history: dict[Any, list[int]] = {}
        self.curriculum = self._make_curriculum()
        self.results_since_log: dict[int, list[bool]] = defaultdict(list)
        self.eval_problems: dict[int, list[Exercise]] = {}
        self.word_problems = WordProblems(
            api_key=config.word_problem_openai_api_key,
            base_url=config.word_problem_openai_base_url,
            model_name=config.word_problem_model_name,
        )

    @classmethod
    def config_init(cls) -> tuple[InfiniteMathEnvConfig, APIServerConfig]:
        return default_configs(
            InfiniteMathEnvConfig,
            MODEL,
            group_size=8,
            max_num_workers=64,
            total_steps=10000,
            batch_size=1024,
            steps_per_eval=25,
            max_token_length=4096,
            min_evaluations=10,
            incorrect_reward=-0.5,
            length_threshold_ratio=0.6,
            wandb_name="infinite_math",
            data_path_to_save_groups="data/infinite_math_groups.jsonl",
        )

    async def setup(self) -> None:
        self.source = ProblemSource(self.config.generator, seed=self.config.problem_seed)
        # In a thread: importing mathgenerator takes seconds.
        self.eval_problems = await asyncio.to_thread(eval_problems, self.source)

    async def get_next_item(self) -> tuple[Exercise, int]:
        problem = self.source.make(self.curriculum.level, self.iter)
        self.iter += 1
        return problem, 0

    def eval_items(self) -> Sequence[tuple[Exercise, int]]:
        return [(problem, EVALUATED) for problem in self.eval_problems[self.curriculum.level]]

    def prompt(self, item: tuple[Exercise, int]) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": item[0].question},
        ]

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def collect_trajectories(
        self, item: tuple[Exercise, int]
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Roll out an exercise; an unsolved one may be attempted again."""
        problem, num_asked = await self._rewritten(item)
        group, backlog = await super().collect_trajectories((problem, num_asked))
        self.curriculum.advance()
        is_unsolved = group is not None and max(group["scores"]) <= self.config.best_wrong_reward
        if is_unsolved and num_asked + 1 < self.config.max_attempts_per_problem:
            backlog = [*backlog, (item[0], num_asked + 1)]
        return group, backlog

    async def evaluate_item(self, item: tuple[Exercise, int]) -> dict[str, Any]:
        record = await super().evaluate_item(await self._rewritten(item))
        return {**record, "level": item[0].level}

    async def score(self, item: tuple[Exercise, int], answer: str) -> float:
        problem, num_asked = item
        reward = reward_of(answer, problem.solution, self.config)
        is_correct = self._is_correct(reward)
        if num_asked != EVALUATED:
            self.results_since_log[problem.level].append(is_correct)
        self.curriculum.record(problem.level, is_correct=is_correct)
        return reward

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> Sequence[float]:
        if not self.config.apply_length_penalty or not all(map(self._is_correct, scores)):
            return scores
        return penalize_length(
            scores,
            [len(trajectory.tokens) for trajectory in trajectories],
            max_tokens=self.config.max_token_length,
            free_fraction=self.config.length_threshold_ratio,
        )

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        return {"train/percent_correct": statistics.fmean(map(self._is_correct, scores))}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        self.curriculum.advance()
        level = samples[0]["level"]
        right = [self._is_correct(sample["score"]) for sample in samples]
        return {
            f"eval/level_{level}_accuracy": statistics.fmean(right),
            "eval/current_level": self.curriculum.level,
            "eval/advanced_level": float(self.curriculum.level > level),
        }

    def is_correct(self, record: Mapping[str, Any]) -> bool:
        return self._is_correct(record["score"])

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        for level, results in self.results_since_log.items():
            metrics[f"train/level_{level}_correct"] = statistics.fmean(results)
            metrics[f"train/level_{level}_count"] = len(results)
        self.results_since_log.clear()
        metrics.update(self.curriculum.metrics())
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        own = {
            "iter": self.iter,
            "curriculum_level": self.curriculum.level,
            "performance_history": {str(k): v for k, v in self.curriculum.history.items()},
        }
        super().save_checkpoint(step, {**(data or {}), **own})

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        self.curriculum = self._make_curriculum()

    async def close(self) -> None:
        await self.word_problems.close()
        await super().close()

    def check_gold_answer(self, item: tuple[Exercise, int]) -> str:
        return f"I work it out.\n</think>\nThe answer is \\boxed{{{item[0].solution}}}."

    def _make_curriculum(self) -> MathCurriculum:
        return MathCurriculum(
            level=self.curriculum_level,
            progress_threshold=self.config.progress_threshold,
            min_evaluations=self.config.min_evaluations,
            history=self.performance_history,
        )

    def _is_correct(self, reward: float) -> bool:
        return reward > self.config.best_wrong_reward

    async def _rewritten(self, item: tuple[Exercise, int]) -> tuple[Exercise, int]:
        problem, num_asked = item
        story = await self.word_problems.rewrite(problem.question)
        return problem._replace(question=story), num_asked


if __name__ == "__main__":
    InfiniteMathEnv.cli()
