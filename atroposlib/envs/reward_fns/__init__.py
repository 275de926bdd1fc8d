"""Reward functions by name: `registry.create("accuracy")`, or several in a `CombinedReward`."""

from __future__ import annotations

from atroposlib.envs.reward_fns import (  # noqa: F401 - importing registers them
    accuracy_reward,
    cascading_r1_math_reward,
    chandas_meter_reward,
    cosine_scaled_reward,
    crossword_format_reward,
    format_reward,
    r1_reward,
    reasoning_steps_reward,
    repetition_penalty_reward,
)
from atroposlib.envs.reward_fns.combined_reward import CombinedReward
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["CombinedReward", "RewardFunction", "registry"]
