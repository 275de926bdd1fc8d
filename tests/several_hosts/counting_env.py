"""An environment whose groups have names, and which records those that the service took.

The name travels in `generation_params`, which the service and the trainer's journal keep as it is.
A line of the record is written once the service has acknowledged the group.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from tests.several_hosts.lines import append_line

__all__ = ["CountingEnv", "CountingEnvConfig"]


class CountingEnvConfig(SingleTurnEnvConfig):
    """Settings of the record."""

    record_path: str = Field(description="File of the names of the acknowledged groups.")
    think_s: float = Field(0.5, ge=0, description="Seconds that scoring takes.")


class CountingEnv(SingleTurnEnv):
    """Rewards letters of the first half of the alphabet."""

    name = "counting"
    env_config_cls = CountingEnvConfig
    config: CountingEnvConfig

    async def setup(self) -> None:
        self._numbers = count()

    async def get_next_item(self) -> int:
        return next(self._numbers)

    def prompt(self, item: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(item % 10)}]

    async def score(self, item: int, answer: str) -> float:
        raise NotImplementedError  # `score_all` replaces it

    async def score_all(self, item: int, answers: Sequence[str]) -> list[float]:
        await asyncio.sleep(self.config.think_s)
        # The index makes all scores of a group differ, so that no group is left out.
        return [sum(map(ord, text)) % 13 + 0.01 * i for i, text in enumerate(answers)]

    async def collect_trajectories(self, item: int) -> Any:
        group, backlog = await super().collect_trajectories(item)
        if group is not None:
            group["generation_params"]["name"] = f"{self.config.wandb_name}-{os.getpid()}-{item}"
        return group, backlog

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        refused = self.drop_counts["refused_by_service"] + self.drop_counts["not_encodable"]
        await super()._send_scored_data_to_api(scored_data)
        if self.drop_counts["refused_by_service"] + self.drop_counts["not_encodable"] > refused:
            return
        self._record(scored_data["generation_params"]["name"])

    def _record(self, name: str) -> None:
        append_line(Path(self.config.record_path), {"name": name, "time": time.monotonic()})


if __name__ == "__main__":
    CountingEnv.cli()
