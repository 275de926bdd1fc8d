"""A small environment whose rollouts are scripted, for tests of the base class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

SERVERS = [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1", api_key="x")]


class SmallEnv(BaseEnv):
    """Items are numbers; trajectory i of an item scores i."""

    name = "small"
    status_interval_s = 0.02
    retry_interval_s = 0.01
    shutdown_grace_s = 1.0
    empty_rollout_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_items = 0
        self.most_items: int | None = None
        self.num_evaluations = 0
        self.num_cancelled = 0
        self.events: list[str] = []
        self.before_rollout: Callable[[int], Any] | None = None
        self.positions: dict[int, int] = {}

    async def setup(self) -> None:
        self.events.append("setup")

    async def get_next_item(self) -> Any:
        if self.most_items is not None and self.num_items >= self.most_items:
            return None
        self.num_items += 1
        return self.num_items

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        position = self.positions[item] = self.positions.get(item, -1) + 1
        try:
            await asyncio.sleep(0.001)
            if self.before_rollout is not None:
                await self.before_rollout(item)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        score = float(position % self.config.group_size)
        return {"tokens": [65, 66, 67], "masks": [-100, 66, 67], "scores": score}, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.num_evaluations += 1

    async def close(self) -> None:
        self.events.append("close")


def small_config(**settings: Any) -> BaseEnvConfig:
    return BaseEnvConfig(
        **{
            "group_size": 2,
            "use_wandb": False,
            "total_steps": -1,
            "steps_per_eval": 0,
            "max_num_workers": 4,
            "tokenizer_name": "characters",
            "rollout_grace_s": 0.0,
            **settings,
        }
    )
