"""`SingleTurnEnv`: an environment whose items are one prompt each.

    get_next_item ─► prompt ─► G completions in one request ─► score of each ─► group

The author writes what is asked and what an answer is worth; evaluations ask and score alike.
"""

from __future__ import annotations

import logging
import statistics
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, Item, ScoredDataGroup
from atroposlib.envs.conversation import checked_chat, visible_text
from atroposlib.envs.env_hooks import settle
from atroposlib.envs.reward_parts import (
    Reward,
    RewardWeights,
    WeighedReward,
    check_weight_names,
    part_means,
    weigh,
)
from atroposlib.envs.single_turn import (
    Trajectory,
    ask,
    build_group,
    completion_budget,
    sample_trajectories,
)
from atroposlib.utils.awaiting import all_results

__all__ = ["SingleTurnEnv", "SingleTurnEnvConfig"]

logger = logging.getLogger(__name__)


class SingleTurnEnvConfig(BaseEnvConfig):
    """How completions are drawn. `max_token_length` holds for prompt and completion together."""

    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")
    mute_truncated: bool = Field(
        False, description="Keep completions that were cut from moving the policy."
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict,
        description="Weights of the named parts of a score, by name; a part without one counts 1.",
    )


class SingleTurnEnv(BaseEnv):
    """Write `get_next_item`, `prompt` and `score`; `eval_items` for evaluations.

    Attributes:
        scores_thinking: whether `score` reads the thinking as well.
        min_trained_tokens: shorter completions stay in their group but do not move the policy.
        prefill: how every completion begins; read by the policy, not trained.
        scores_since_log: what `score` returned since the last log, its parts weighed and summed.
    """

    scores_thinking: ClassVar[bool] = False
    min_trained_tokens: ClassVar[int] = 0
    prefill: str = ""
    env_config_cls = SingleTurnEnvConfig
    config: SingleTurnEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scores_since_log: list[float] = []

    @abstractmethod
    def prompt(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """Return the messages that pose an item."""

    @abstractmethod
    async def score(self, item: Item, answer: str) -> Reward:
        """Return what an answer is worth; what it raises fails the group.

        A mapping such as `{"answer": 1.0, "format": 0.2}` names the parts of the score: they are
        weighed by the setting `reward_weights` and summed, and each one is logged and shown.

        Args:
            item: what was asked.
            answer: the completion without its thinking, or with it where `scores_thinking`; empty
                when the completion was cut, for half an answer is none.
        """

    async def score_all(self, item: Item, answers: Sequence[str]) -> Sequence[Reward]:
        """Return the scores of all answers to an item; the default asks `score` for each.

        Override it where answers are looked at together.
        """
        return await all_results(self._checked_score(item, answer) for answer in answers)

    def sampling(self) -> dict[str, Any]:
        """Return how rollouts are sampled: what the engine takes."""
        return {"temperature": self.config.temperature}

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> Sequence[float]:
        """Return [G] scores as they are sent, for rules that look at lengths or at the group."""
        return scores

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return what is logged of the scores since the last log; there is at least one."""
        return {"train/mean_score": statistics.fmean(scores)}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the result of an evaluation from its records, at least one."""
        return {"eval/mean_score": statistics.fmean(sample["score"] for sample in samples)}

    def eval_items(self) -> Sequence[Item]:
        """Return the items `evaluate` asks; none by default."""
        return ()

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample G completions in one request and score them at the same time."""
        messages = self._checked_prompt(item)
        budget = self._budget(messages)
        if budget < 1:
            limit = self.config.max_token_length
            logger.warning(
                "item skipped: its prompt leaves no room in max_token_length (%d); raise the limit "
                "by %d or more",
                limit,
                1 - budget,
            )
            return None, []
        trajectories = await sample_trajectories(
            self.server,
            self.tokenizer,
            messages,
            group_size=self.config.group_size,
            max_tokens=budget,
            prefill=self.prefill,
            **self.sampling(),
        )
        answers = [self._shown(t.completion, is_cut=t.is_truncated) for t in trajectories]
        rewards = await self.weighed_scores(item, answers)
        check_weight_names(
            self.config.reward_weights, [reward.parts for reward in rewards], self._score_name
        )
        scores = [reward.total for reward in rewards]
        self.scores_since_log += scores
        group = build_group(
            messages,
            trajectories,
            self.group_scores(scores, trajectories),
            is_muted=[self._is_muted(trajectory) for trajectory in trajectories],
            generation_params=self.sampling(),
            include_messages=self.config.include_messages,
            reward_parts=[reward.parts for reward in rewards],
        )
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ask every evaluation item once and log the mean score."""
        started_at = time.time()
        samples = await all_results(self.evaluate_item(item) for item in self.eval_items())
        if not samples:
            logger.info("no evaluation: eval_items gives none")
            return
        parts = [sample.get("reward_parts", {}) for sample in samples]
        check_weight_names(self.config.reward_weights, parts, self._score_name)
        metrics = {**part_means(parts, "eval"), **self.evaluation_metrics(samples)}
        await self.evaluate_log(
            metrics=metrics,
            samples=samples,
            start_time=started_at,
            end_time=time.time(),
            generation_parameters={"temperature": self.config.eval_temperature},
        )
        await self.wandb_log(metrics)

    async def evaluate_item(self, item: Item) -> dict[str, Any]:
        """Wait for one answer to an evaluation item; returns its record."""
        messages = self._checked_prompt(item)
        [answer] = await ask(
            self.server,
            self.tokenizer,
            messages,
            prefill=self.prefill,
            n=1,
            max_tokens=self._budget(messages),
            temperature=self.config.eval_temperature,
            split="eval",
        )
        shown = self._shown(answer.completion, is_cut=answer.finish_reason == "length")
        [score] = await self.weighed_scores(item, [shown])
        return {
            "messages": [*messages, {"role": "assistant", "content": answer.completion}],
            "score": score.total,
            **({"reward_parts": score.parts} if score.parts else {}),
            "finish_reason": answer.finish_reason,
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add what the scores since the last log tell."""
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.scores_since_log:
            metrics.update(self.train_metrics(self.scores_since_log))
        self.scores_since_log = []
        await super().wandb_log(metrics)

    def _shown(self, completion: str, *, is_cut: bool) -> str:
        if is_cut:
            return ""
        return completion if self.scores_thinking else visible_text(completion)

    @property
    def _score_name(self) -> str:
        return f"{type(self).__name__}.score"

    async def _checked_score(self, item: Item, answer: str) -> Reward:
        score: Reward = await settle(self.score(item, answer))
        weigh(score, {}, f"{self._score_name} returned")  # raises as soon as one score is wrong
        return score

    async def weighed_scores(self, item: Item, answers: Sequence[str]) -> list[WeighedReward]:
        """Wait for `score_all` and sum the parts of each score by `reward_weights`."""
        weights = self.config.reward_weights
        rewards = await self.score_all(item, answers)
        return [weigh(reward, weights, f"{self._score_name} returned") for reward in rewards]

    def _checked_prompt(self, item: Item) -> Sequence[Mapping[str, Any]]:
        signature = "def prompt(self, item)"
        return checked_chat(self.prompt(item), f"{type(self).__name__}.prompt", signature=signature)

    def _is_muted(self, trajectory: Trajectory) -> bool:
        is_cut = self.config.mute_truncated and trajectory.is_truncated
        return is_cut or trajectory.num_completion_tokens < self.min_trained_tokens

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        limit = self.config.max_token_length
        return completion_budget(
            self.tokenizer, messages, max_token_length=limit, prefill=self.prefill
        )
