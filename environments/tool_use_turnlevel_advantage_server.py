"""Tool use over several turns, with an advantage for each turn.

    turn rewards [G][T] -> z over the group, turn by turn ─┐
    outcomes [G]        -> z over the group, times lambda ─┴► advantage of each token of that turn

Subclasses of `BaseMTGRPOEnv` override prompts, checks and rewards. With a vLLM server on port 9004,
and without the hub:

    python environments/tool_use_turnlevel_advantage_server.py process --env.total_steps 4 \
        --env.dataset_path environments/data/tool_dialogues_sample \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.multi_turn_env import Rollout, token_advantages
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import deep_hermes_settings
from atroposlib.tasks.tool_dialogues import (
    DialogueConversation,
    Scenario,
    ToolDialogueConfig,
    ToolDialogueEnv,
    TurnCheck,
    conversation_of,
    shortened_scores,
)
from atroposlib.utils.local_records import read_splits

__all__ = [
    "BaseMTGRPOEnv",
    "MTGRPOEnvConfig",
    "MultiTurnToolUseTurnLevelAdvantageEnv",
    "mtgrpo_advantages",
]

CARD = EnvironmentCard(
    task="call tools and summarize their results, turn by turn",
    turns="2 to 3 call turns and the texts between them",
    reward="a turn: 0.5 well-formed, 0.5 right, -0.2 wrong, 1 a text; all right: 1 more",
    data="Hermes reasoning tool use from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/tool_dialogues_sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "tool_dialogues_sample"
LOCAL_FILE = Path("data") / "hermes_reasoning_tool_use_fixed.jsonl"
FAILED = -1.0


class MTGRPOEnvConfig(ToolDialogueConfig):
    """Settings of the turn rewards and of the advantages."""

    turn_level_advantage_lambda: float = Field(
        1.0, ge=0, description="Weight of the outcome in the advantage of each turn."
    )
    tool_execution_reward: float = Field(0.5, description="Reward of a turn of well-formed calls.")
    tool_match_reward: float = Field(0.5, description="Reward of a turn of the expected calls.")
    summary_reward: float = Field(1.0, description="Reward of a text where a text is expected.")
    validate_think_blocks: bool = Field(
        True, description="Whether a turn is wrong unless it begins with its only thinking block."
    )
    generate_all_gpt_turns: bool = Field(
        True, description="Whether the policy also writes the texts between calls."
    )
    max_gen_per_turn: int = Field(2048, ge=1, description="Maximum tokens of one turn.")
    scenario_category: Scenario = Field("all", description="Kind of the dialogues.")
    min_tool_call_turns: int = Field(
        1, ge=0, description="Minimum number of call turns of a dialogue."
    )
    min_successful_turns: int = Field(
        1, ge=0, description="Minimum number of right turns; with fewer, a dialogue scores -1."
    )
    use_parallel_requests: bool = Field(
        True, description="Whether the dialogues of a group are played concurrently."
    )


def standardized(values: Sequence[float]) -> list[float]:
    """Subtract the mean, and divide by the population standard deviation unless it is 0."""
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / (deviation or 1.0) for value in values]


def mtgrpo_advantages(
    turn_rewards: Sequence[Sequence[float]], outcomes: Sequence[float], *, outcome_weight: float
) -> list[list[float]]:
    """Return [G][T] advantages: each turn against the same turn of the group, plus the outcome.

    Args:
        turn_rewards: [G][T]; a rollout that ended early is left out of later turns.
        outcomes: [G].
        outcome_weight: weight of the standardized outcome in every turn.

    Example:
        turn_rewards  [1, 1] [1, 0]     by turn  [0, 1] [0, -1]
        outcomes      1      0          z        1      -1
        outcome_weight 1                         [1, 2] [-1, -2]

    Differs from MT-GRPO: mean and deviation of a turn are over the rollouts that reached it.
    """
    by_outcome = [outcome_weight * value for value in standardized(outcomes)]
    advantages = [[value] * len(row) for value, row in zip(by_outcome, turn_rewards, strict=True)]
    for turn in range(max(map(len, turn_rewards))):
        reached = [i for i, row in enumerate(turn_rewards) if len(row) > turn]
        values = standardized([turn_rewards[i][turn] for i in reached])
        for i, value in zip(reached, values, strict=True):
            advantages[i][turn] += value
    return advantages


class BaseMTGRPOEnv(ToolDialogueEnv):
    """Dialogues with an advantage for each turn."""

    name = "base_mtgrpo"
    hub_dataset = "interstellarninja/hermes_reasoning_tool_use"
    test_fraction = 0.02
    env_config_cls = MTGRPOEnvConfig
    config: MTGRPOEnvConfig  # type: ignore[assignment]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def compute_turn_reward(self, check: TurnCheck) -> float:
        config = self.config
        if not check.is_call_turn:
            return config.summary_reward if check.is_match else 0.0
        executed = config.tool_execution_reward * check.is_well_formed
        matched = config.tool_match_reward if check.is_match else config.wrong_call_penalty
        return executed + matched

    def compute_outcome_reward(self, conversation: DialogueConversation) -> float:
        """Return the outcome of a dialogue: 1.0 if all its turns are right, else 0.0."""
        return float(conversation.is_complete)

    def turn_rewards(self, conversation: DialogueConversation, *, num_turns: int) -> list[float]:
        """Return the reward of each turn; a turn that a limit cut is wrong."""
        expected = conversation.dialogue.expected_calls_by_turn[len(conversation.checks) :]
        cut = [TurnCheck(bool(calls), is_well_formed=False, is_match=False) for calls in expected]
        checks = [*conversation.checks, *cut][:num_turns]
        return [self.compute_turn_reward(check) for check in checks]

    def score_of(self, rollout: Rollout) -> float:
        conversation = conversation_of(rollout)
        num_right = sum(check.is_match for check in conversation.checks)
        if not rollout.rewards or num_right < self.config.min_successful_turns:
            return FAILED
        return statistics.fmean(rollout.rewards) + self.compute_outcome_reward(conversation)

    async def setup(self) -> None:
        self.min_call_turns = self.config.min_tool_call_turns
        await super().setup()

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        is_default = self.config.dataset_path is None and self.config.dataset_name is None
        if is_default and LOCAL_FILE.is_file():
            return read_splits(
                LOCAL_FILE,
                self.columns,
                shuffle_seed=self.config.dataset_seed,
                test_fraction=self.test_fraction,
            )
        return super()._read()

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        if self.config.use_parallel_requests:
            return await super().collect_trajectories(item)
        return [(await self.collect_trajectory(item))[0] for _ in range(self.config.group_size)], []

    async def postprocess_histories(self, trajectories: Sequence[Rollout]) -> Any:
        """Return the group with the advantages of its turns; None if no score is above 0."""
        group = await super().postprocess_histories(trajectories)
        if group is None:
            return None
        # In a thread: long groups hold a million tokens.
        return await self._side_thread.run(self._with_advantages, group, trajectories)

    def _with_advantages(
        self, group: ScoredDataGroup, trajectories: Sequence[Rollout]
    ) -> ScoredDataGroup | None:
        scores = [self.score_of(rollout) for rollout in trajectories]
        if max(scores) <= 0:
            return None
        by_turn = mtgrpo_advantages(
            [rollout.rewards for rollout in trajectories],
            [self.compute_outcome_reward(conversation_of(r)) for r in trajectories],
            outcome_weight=self.config.turn_level_advantage_lambda,
        )
        # One row per sequence of the group; a rollout may have several.
        rows = [
            (score, token_advantages(sequence.masks, sequence.spans, advantages))
            for rollout, score, advantages in zip(trajectories, scores, by_turn, strict=True)
            for sequence in rollout.sequences
        ]
        group["advantages"] = [advantages for _, advantages in rows]
        lengths = [len(tokens) for tokens in group["tokens"]]
        limit = self.config.max_token_length
        group["scores"] = shortened_scores([s for s, _ in rows], lengths, max_tokens=limit)
        return group


class MultiTurnToolUseTurnLevelAdvantageEnv(BaseMTGRPOEnv):
    """The published settings."""

    name = "multiturn_tool_use_turnlevel_advantage"

    @classmethod
    def config_init(cls) -> tuple[MTGRPOEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            MTGRPOEnvConfig,
            server={},
            group_size=16,
            total_steps=2000,
            steps_per_eval=20,
            max_token_length=65536,
            max_tool_call_turns_cap=3,
            min_tool_call_turns=2,
            use_parallel_requests=False,
        )


if __name__ == "__main__":
    MultiTurnToolUseTurnLevelAdvantageEnv.cli()
