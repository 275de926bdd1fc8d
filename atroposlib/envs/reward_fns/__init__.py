"""Reward functions by name: `registry.create("accuracy")`, or several in a `CombinedReward`.

All modules of this folder are imported here and register their reward functions.
"""

from __future__ import annotations

import importlib
import pkgutil

from atroposlib.envs.reward_fns.combined_reward import CombinedReward
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["CombinedReward", "RewardFunction", "registry"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
