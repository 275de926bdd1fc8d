"""Two runs with tickets consume the same groups in the same order, however long rollouts take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.api.settings import ApiSettings
from atroposlib.exporting.consumption import consumption_lines
from atroposlib.exporting.groups import find_run
from tests.envs.live_service import LiveService, ScriptedTrainer
from tests.envs.small_environment import SmallEnv

pytestmark = pytest.mark.slow

MakeEnv = Callable[..., Any]


class ScriptedAnswers(SmallEnv):
    """The tokens are a function of the item; every fifth item fails, every seventh has no group."""

    longest_s = 0.02

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        outcome, backlog = await super().collect_trajectory(item)
        await asyncio.sleep(self.longest_s * random.random())
        if item % 5 == 0:
            raise RuntimeError("scripted failure")
        if item % 7 == 0:
            return None, backlog
        tokens = [65 + item % 26, 66, 67]
        return outcome | {"tokens": tokens, "masks": [-100, *tokens[1:]]}, backlog


async def run_once(
    name: str, service: LiveService, make_env: MakeEnv, *, num_steps: int, num_envs: int
) -> list[dict[str, Any]]:
    """Serve the environments for one run; return what the trainer consumed."""
    random.seed()  # other delays in every run
    data_dir = Path("runs")
    service.start(
        ApiSettings(store="sqlite", data_dir=data_dir, run_name=name, ordered_envs=num_envs)
    )
    async with ScriptedTrainer(service.url, num_steps=num_steps, batch_size=8) as trainer:
        await trainer.register()
        serving = [
            asyncio.create_task(
                make_env(
                    ScriptedAnswers, rollout_server_url=service.url, wandb_name=env_name, **settings
                ).env_manager()
            )
            for env_name, settings in (
                ("math", {"max_num_workers": 5}),
                ("code", {"max_num_workers": 3, "inference_weight": 2.0}),
            )[:num_envs]
        ]
        await asyncio.wait_for(trainer.train(num_steps, pace_s=0.01), 120)
        await asyncio.wait_for(asyncio.gather(*serving), 120)
    service.stop()
    return list(consumption_lines(find_run(name, data_dir)))


def in_batches(lines: list[dict[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("batch", num_steps + 1) <= num_steps]


@pytest.mark.parametrize("num_envs", [1, 2])
async def test_two_runs_consume_the_same_groups_in_the_same_order(
    service: LiveService, make_env: MakeEnv, num_envs: int
) -> None:
    first, second = [
        await run_once(name, service, make_env, num_steps=6, num_envs=num_envs)
        for name in ("first", "second")
    ]

    consumed = in_batches(first, 6)
    assert consumed == in_batches(second, 6)
    assert len(consumed) == 6 * 4  # 8 sequences are four groups of two
    assert {line["env"] for line in consumed} == set(("math_0", "code_0")[:num_envs])
    for env in {line["env"] for line in consumed}:
        tickets = [line["ticket"] for line in consumed if line["env"] == env]
        assert tickets == sorted(tickets)
        # Item 5 fails and item 7 has no group; rollouts are numbered from 0, items from 1.
        assert not {4, 6} & set(tickets)


@pytest.mark.long
async def test_long_runs_with_slow_rollouts_consume_the_same_groups(
    service: LiveService, make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedAnswers, "longest_s", 0.3)

    first, second = [
        await run_once(name, service, make_env, num_steps=60, num_envs=2)
        for name in ("first", "second")
    ]

    assert in_batches(first, 60) == in_batches(second, 60)
