"""Tool use over several turns: calls along a recorded dialogue, scored as a whole.

    request -> calls -> recorded tool results -> calls -> ... -> fraction of right turns

A dialogue ends at the first wrong turn. Every turn of the policy is trained on. With a vLLM server
on port 9004, and without the hub:

    python environments/tool_use_multiturn_server.py process --env.total_steps 4 \
        --env.dataset_path environments/data/tool_dialogues_sample \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import deep_hermes_settings
from atroposlib.tasks.tool_dialogues import (
    DialogueConversation,
    ToolDialogueConfig,
    ToolDialogueEnv,
    TurnCheck,
    shortened_scores,
)

__all__ = ["MultiTurnEnvConfig", "MultiTurnToolCallingEnv", "score", "score_refusal"]

CARD = EnvironmentCard(
    task="call tools along a dialogue, with what they answered",
    turns="1 to 2 call turns, more by configuration",
    reward="share of right turns, +0.5 when all are, -0.2 at the first wrong; -1 if none is left",
    data="ToolACE sequential from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/tool_dialogues_sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "tool_dialogues_sample"
ALL_RIGHT = 0.5
FAILED = -1.0
MIN_RIGHT_OF_SEVERAL = 2
REGRET = re.compile(r"\b(?:sorry|apolog\w+|unfortunately|regret)\b", re.IGNORECASE)
QUESTION = re.compile(r"\?|\b(?:please (?:tell|give|provide|share)|let me know)\b", re.IGNORECASE)


class MultiTurnEnvConfig(ToolDialogueConfig):
    """Settings of the environment: those of `ToolDialogueConfig`."""


def score(
    checks: Sequence[TurnCheck],
    *,
    num_expected: int,
    wrong_call_penalty: float,
    min_right_calls: int,
) -> float:
    """Return the score of a dialogue.

    Args:
        checks: checks of the turns played; the first wrong turn is the last one.
        num_expected: number of turns of the whole dialogue.
        wrong_call_penalty: added to the score of an incomplete dialogue.
        min_right_calls: minimum number of right call turns; with fewer, the score is `FAILED`.
    """
    num_right = sum(check.is_match for check in checks)
    num_right_calls = sum(check.is_match and check.is_call_turn for check in checks)
    is_complete = num_right == num_expected
    earned = num_right / num_expected + (ALL_RIGHT if is_complete else wrong_call_penalty)
    return earned if earned > 0 and num_right_calls >= min_right_calls else FAILED


def score_refusal(answer: str, check: TurnCheck | None, *, wrong_call_penalty: float) -> float:
    """Return the score of a refusal, for a request that no tool can answer; at most 1.2."""
    if check is None or not check.is_match:
        return wrong_call_penalty
    return 1.0 + 0.1 * bool(REGRET.search(answer)) + 0.1 * bool(QUESTION.search(answer))


class MultiTurnToolCallingEnv(ToolDialogueEnv):
    """Dialogues with one score each."""

    name = "multiturn_tool_use"
    hub_dataset = "interstellarninja/toolace_hermes_sequential_tool_use"
    test_fraction = 0.05
    env_config_cls = MultiTurnEnvConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def config_init(cls) -> tuple[MultiTurnEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            MultiTurnEnvConfig,
            server={},
            group_size=8,
            total_steps=2000,
            steps_per_eval=10**12,
            max_token_length=65536,
        )

    async def setup(self) -> None:
        """Read the dialogues; groups of equal scores are kept for refusals."""
        if self.config.scenario_category == "relevance":
            self.config.ensure_scores_are_not_same = False
        await super().setup()

    def turn_rewards(self, conversation: DialogueConversation, *, num_turns: int) -> list[float]:
        checks, penalty = conversation.checks, self.config.wrong_call_penalty
        if self.config.scenario_category == "relevance":
            check = checks[0] if checks else None
            earned = score_refusal(conversation.latest, check, wrong_call_penalty=penalty)
        else:
            dialogue = conversation.dialogue
            is_several = self.config.scenario_category == "multiturn"
            min_right_calls = min(MIN_RIGHT_OF_SEVERAL, dialogue.num_call_turns) * is_several
            earned = score(
                checks,
                num_expected=len(dialogue.expected_calls_by_turn),
                wrong_call_penalty=penalty,
                min_right_calls=min_right_calls,
            )
        return [0.0] * (num_turns - 1) + [earned]

    async def postprocess_histories(self, trajectories: Sequence[Rollout]) -> Any:
        """Return the group without advantages; full scores are reduced by length."""
        group = await super().postprocess_histories(trajectories)
        if group is None:
            return None
        del group["advantages"]
        lengths = [len(tokens) for tokens in group["tokens"]]
        limit = self.config.max_token_length
        group["scores"] = shortened_scores(group["scores"], lengths, max_tokens=limit)
        return group


if __name__ == "__main__":
    MultiTurnToolCallingEnv.cli()
