"""Settings of environments that play dialogues with tools, and their rule about lengths."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from atroposlib.envs.multi_turn_env import MultiTurnEnvConfig
from atroposlib.utils.length_penalty import length_factor
from environments.shared.hub_items import HubItemsConfig
from environments.shared.tool_dialogues import Scenario

__all__ = ["ToolDialogueConfig", "shortened_scores"]

FREE_LENGTH_FRACTION = 0.5
FULL_SCORE = 0.99
"""A group loses by length when all its scores are above."""


class ToolDialogueConfig(HubItemsConfig, MultiTurnEnvConfig):
    """Which dialogues are played, and how the policy must write."""

    max_tool_call_turns_cap: int = Field(2, ge=1, description="Call turns of one dialogue.")
    validate_think_blocks: bool = Field(
        False, description="Take a turn for wrong unless it begins with its one thought."
    )
    generate_all_gpt_turns: bool = Field(
        False,
        description="Let the policy also write the texts between calls, which else are shown as "
        "they stand in the data.",
    )
    max_gen_per_turn: int = Field(1024, ge=1, description="Tokens of one turn.")
    wrong_call_penalty: float = Field(
        -0.2, le=0, description="Added where a turn is not the expected one."
    )
    skip_completed: bool = Field(
        True, description="Leave out dialogues that completed_dataset_id has."
    )
    completed_dataset_id: str | None = Field(
        None,
        description="File, or data set of the hub, with the column conversations: what was already "
        "worked on.",
    )
    scenario_category: Scenario = Field(
        "multiturn",
        description="Dialogues with one call turn; calls that depend on each other; a call for "
        "each of several requests; requests no tool helps with; all with a call.",
    )
    add_dynamic_few_shot: bool = Field(
        True, description="Show a training dialogue, never the one that is played, as an example."
    )
    temperature: float = Field(0.8, ge=0, description="Sampling temperature of rollouts.")


def shortened_scores(
    scores: Sequence[float], lengths: Sequence[int], *, max_tokens: int
) -> list[float]:
    """Return the scores of a group; one in which all are full loses by length.

    Args:
        scores: [G].
        lengths: [G] tokens, prompt included.
        max_tokens: the length that loses 1; half of it is free.
    """
    if min(scores) <= FULL_SCORE:
        return list(scores)
    factors = (
        length_factor(length, max_tokens=max_tokens, free_fraction=FREE_LENGTH_FRACTION)
        for length in lengths
    )
    return [score - (1.0 - factor) for score, factor in zip(scores, factors, strict=True)]
