"""What both mathematics environments share: problems, checking of answers, evaluation, figures."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.single_turn import Trajectory
from atroposlib.utils.awaiting import all_results
from atroposlib.utils.math_check import MathVerdict, check_math_answer
from environments.math_environment.config import MathConfig
from environments.math_environment.figures import TABLE_COLUMNS, MathFigures, eval_figures
from environments.math_environment.items import MathItem
from environments.math_environment.problems import SAMPLE, EvalSet, MathProblem, load_problems
from environments.math_environment.rules import concise_scores

__all__ = ["SolvingEnv"]

logger = logging.getLogger(__name__)


class SolvingEnv(BaseEnv):
    """Problems with an answer that can be checked.

    Attributes:
        iter: training problems handed out so far; kept in checkpoints.
        figures: what the next log carries.
        random: decides what happens with some probability only.
    """

    name = "math"
    config: MathConfig
    eval_sets: ClassVar[Sequence[EvalSet]] = ()
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.train: list[MathProblem] = []
        self.test: list[MathProblem] = []
        self.random = random.Random(0)
        self.figures = MathFigures(self.config.num_rollouts_to_keep)

    @abstractmethod
    async def answer_for_evaluation(self, problem: MathProblem) -> tuple[bool, dict[str, Any]]:
        """Wait for one answer; returns whether it is correct, and its record."""

    async def setup(self) -> None:
        """Load the problems."""
        eval_sets = self.eval_sets if self.config.run_evaluation else ()
        self.train, self.test = await asyncio.to_thread(
            load_problems, self.config.dataset_path, eval_sets
        )
        logger.info("%d training and %d test problems", len(self.train), len(self.test))

    async def get_next_item(self) -> MathItem:
        """Return the next training problem, from the start again after the last."""
        problem = self.train[self.iter % len(self.train)]
        self.iter += 1
        return MathItem(problem.question, problem.answer)

    async def check_answers(
        self, answers: Sequence[str], gold: str, *, skip_thinking: bool = True
    ) -> list[bool] | None:
        """Wait for the verdicts on answers, None when the gold answer cannot be read.

        One that takes too long to check is wrong.
        """
        late = MathVerdict(False, True, gold, "")
        verdicts = await all_results(
            self.score_pool.run(_check, answer, gold, skip_thinking, default=late)
            for answer in answers
        )
        if not all(verdict.is_gold_readable for verdict in verdicts):
            return None
        return [verdict.is_correct for verdict in verdicts]

    def is_muted(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """Return which trajectories must not move the policy."""
        return [self.config.mask_too_long_completions and t.is_truncated for t in trajectories]

    def maybe_concise_scores(self, trajectories: Sequence[Trajectory]) -> list[float] | None:
        """Return scores by length for correct trajectories, None when they teach nothing now."""
        if self.random.random() >= self.config.percent_length_penalty:
            return None
        return concise_scores([len(trajectory.tokens) for trajectory in trajectories])

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Answer each test problem once and log how many are right, by subset."""
        if not self.test:
            logger.info("no evaluation: run_evaluation is off")
            return
        started_at = time.time()
        answers = await all_results(self.answer_for_evaluation(problem) for problem in self.test)
        correct: defaultdict[str, list[bool]] = defaultdict(list)
        for problem, (is_correct, _) in zip(self.test, answers, strict=True):
            correct[problem.subset].append(is_correct)
        samples = [sample for _, sample in answers]
        await self.log_evaluation(correct, samples, started_at)
        await self.wandb_log(eval_figures(correct))

    async def log_evaluation(
        self,
        correct: Mapping[str, Sequence[bool]],
        samples: Sequence[Mapping[str, Any]],
        started_at: float,
    ) -> None:
        """Write the result of an evaluation to disk."""
        await self.evaluate_log(
            metrics=eval_figures(correct),
            samples=samples,
            start_time=started_at,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the figures and tables since the last log."""
        metrics = {} if wandb_metrics is None else wandb_metrics
        metrics.update(self.figures.take())
        metrics["train/iter"] = self.iter
        for name, rows in self.figures.take_tables().items():
            metrics[name] = self.run_log.table(TABLE_COLUMNS, rows)
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Keep the position in the training problems."""
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


def _check(answer: str, gold: str, skip_thinking: bool) -> MathVerdict:
    return check_math_answer(answer, gold, skip_thinking=skip_thinking)
