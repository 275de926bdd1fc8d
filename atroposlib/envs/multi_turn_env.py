"""`MultiTurnEnv`: an environment whose items are played as conversations.

    get_next_item ─► G x (start_conversation ─► play) ─► postprocess_histories ─► group

Evaluations play the same conversations on any server that answers chats.
"""

from __future__ import annotations

import logging
import statistics
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, Item
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn import Limits, Rollout, group_of_rollouts, parts_of, play
from atroposlib.envs.reward_parts import RewardWeights, check_weight_names, part_means
from atroposlib.envs.turn_policies import ChatPolicy, TokenPolicy
from atroposlib.envs.turn_rewards import Normalization, discounted_return
from atroposlib.utils.awaiting import all_results

__all__ = [
    "ChatMessage",
    "Conversation",
    "MultiTurnEnv",
    "MultiTurnEnvConfig",
    "Reply",
    "Turn",
]

logger = logging.getLogger(__name__)


class MultiTurnEnvConfig(BaseEnvConfig):
    """Limits of a conversation, and how the rewards of its turns become advantages.

    `max_token_length` is the limit of a whole conversation, not of one turn.
    """

    max_turns: int = Field(8, ge=1, description="Turns of the policy in one conversation.")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Tokens of one turn; None leaves what the conversation has left."
    )
    conversation_timeout_s: float | None = Field(
        None, gt=0, description="Seconds one conversation may take; None waits."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")
    reward_discount: float = Field(
        1.0, ge=0, le=1, description="Weight of the next turn's return in a turn's return."
    )
    reward_weights: RewardWeights = Field(
        default_factory=dict,
        description="Weights of the named parts of a reward, by name; a part without one counts 1.",
    )
    advantage_normalization: Normalization = Field(
        "returns",
        description="What is set in relation to the group: the turns' returns, their rewards "
        "before they are summed, or none of them.",
    )


class MultiTurnEnv(BaseEnv):
    """Write `start_conversation` and `get_next_item`; `eval_items` for evaluations.

    Attributes:
        rollouts_since_log: finished rollouts whose figures the next log carries.
    """

    env_config_cls = MultiTurnEnvConfig
    config: MultiTurnEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollouts_since_log: list[Rollout] = []

    @abstractmethod
    def start_conversation(self, item: Item) -> Conversation:
        """Return a new conversation about an item; called for each of the G rollouts."""

    def eval_items(self) -> Sequence[Item]:
        """Return the items `evaluate` plays; none by default."""
        return ()

    async def collect_trajectory(self, item: Item) -> tuple[Rollout, list[Item]]:
        """Play one conversation about an item on a server that gives token ids."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            policy = TokenPolicy(managed, self.tokenizer, temperature=self.config.temperature)
            rollout = await play(
                self.start_conversation(item),
                policy,
                limits=self.limits(),
                reward_weights=self.config.reward_weights,
            )
        return rollout, []

    async def postprocess_histories(self, trajectories: Sequence[Rollout]) -> Any:
        """Put the conversations about one item together; None when one has no turn.

        Args:
            trajectories: [G] from `collect_trajectory`, fewer when stragglers were left out.
        """
        if not all(rollout.sequences for rollout in trajectories):
            logger.warning(
                "item skipped: its first prompt leaves no room in max_token_length (%d)",
                self.config.max_token_length,
            )
            return None
        self._check_weights(trajectories)
        self.rollouts_since_log += trajectories
        # In a thread: long groups hold a million tokens.
        return await self._side_thread.run(
            group_of_rollouts,
            trajectories,
            discount=self.config.reward_discount,
            normalization=self.config.advantage_normalization,
            generation_params={"temperature": self.config.temperature},
            include_messages=self.config.include_messages,
        )

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Play every evaluation item once and log the mean return."""
        started_at = time.time()
        rollouts = await all_results(self.play_for_evaluation(i) for i in self.eval_items())
        if not rollouts:
            logger.info("no evaluation: eval_items gives none")
            return
        self._check_weights(rollouts)
        discount = self.config.reward_discount
        parts = [parts_of(rollout, discount=discount) for rollout in rollouts]
        metrics = {**part_means(parts, "eval"), **self.metrics_of(rollouts, "eval")}
        await self.evaluate_log(
            metrics=metrics,
            samples=[
                {
                    "messages": rollout.messages,
                    "score": self.score_of(rollout),
                    "rewards": rollout.rewards,
                    "outcome": rollout.outcome,
                    **({"reward_parts": of_rollout} if of_rollout else {}),
                }
                for rollout, of_rollout in zip(rollouts, parts, strict=True)
            ],
            start_time=started_at,
            end_time=time.time(),
            generation_parameters={"temperature": self.config.eval_temperature},
        )
        await self.wandb_log(metrics)

    async def play_for_evaluation(self, item: Item) -> Rollout:
        """Play one conversation on any server that answers chats."""
        policy = ChatPolicy(
            self.server, self.tokenizer, temperature=self.config.eval_temperature, split="eval"
        )
        return await play(
            self.start_conversation(item),
            policy,
            limits=self.limits(),
            reward_weights=self.config.reward_weights,
        )

    def _check_weights(self, rollouts: Sequence[Rollout]) -> None:
        given = [parts for rollout in rollouts for parts in rollout.reward_parts]
        owner = type(rollouts[0].conversation).__name__
        check_weight_names(self.config.reward_weights, given, f"{owner}.reply")

    def score_of(self, rollout: Rollout) -> float:
        """Return what an evaluated conversation is worth: its return unless overridden."""
        return discounted_return(rollout.rewards, discount=self.config.reward_discount)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        """Return the figures of finished rollouts; override it to add those of a game.

        Args:
            rollouts: since the last log, or of one evaluation; their `conversation` is the game.
            area: `train` or `eval`, for the names.
        """
        return rollout_metrics(rollouts, area, discount=self.config.reward_discount)

    def limits(self) -> Limits:
        """Return the limits of a conversation under the settings of this run and its trainer."""
        max_tokens = self.config.max_token_length
        if self.max_token_len > 0:
            max_tokens = min(max_tokens, self.max_token_len)
        return Limits(
            max_turns=self.config.max_turns,
            max_tokens=max_tokens,
            max_turn_tokens=self.config.max_turn_tokens,
            timeout_s=self.config.conversation_timeout_s,
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the figures of the conversations since the last log."""
        metrics = {} if wandb_metrics is None else wandb_metrics
        finished, self.rollouts_since_log = self.rollouts_since_log, []
        metrics.update(self.metrics_of(finished, "train"))
        await super().wandb_log(metrics)


def rollout_metrics(rollouts: Sequence[Rollout], area: str, *, discount: float) -> dict[str, float]:
    """Return mean return, mean number of turns and share of finished conversations."""
    if not rollouts:
        return {}
    returns = [discounted_return(rollout.rewards, discount=discount) for rollout in rollouts]
    return {
        f"{area}/mean_return": statistics.fmean(returns),
        f"{area}/mean_turns": statistics.fmean(len(rollout.rewards) for rollout in rollouts),
        f"{area}/fraction_done": statistics.fmean(r.outcome == "done" for r in rollouts),
    }
