"""Stopping a serving environment: what is running may finish, what is finished is delivered."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.envs.live_service import LiveService, ScriptedTrainer, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MakeEnv = Callable[..., Any]


async def test_stopped_environment_lets_rollouts_finish_and_delivers_them(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(
        rollout_server_url=service.url, max_num_workers=2, rollout_grace_s=10, num_score_workers=1
    )
    are_running, may_finish = asyncio.Event(), asyncio.Event()

    async def wait_for_the_end(_: int) -> None:
        are_running.set()
        await may_finish.wait()

    env.before_rollout = wait_for_the_end
    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(are_running.wait(), 60)
        await until(lambda: len(env.workers) == 2)

        serving.cancel()
        await asyncio.sleep(0.05)
        may_finish.set()
        await asyncio.wait({serving}, timeout=10)
        queue = await trainer.client.status()

    assert serving.cancelled()
    assert env.num_cancelled == 0
    assert env.num_items == 2  # nothing new was started
    assert queue["queue_size"] == 2
    assert env.events == ["setup", "close"]


async def test_environment_stopped_twice_does_not_wait(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, rollout_grace_s=3600)
    are_running = asyncio.Event()

    async def hang(_: int) -> None:
        are_running.set()
        await asyncio.Event().wait()

    env.before_rollout = hang
    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(are_running.wait(), 60)

        serving.cancel()
        await asyncio.sleep(0.05)
        assert not serving.done()
        serving.cancel()
        await asyncio.wait({serving}, timeout=5)

    assert serving.cancelled()
    assert env.num_cancelled > 0
    assert env.events == ["setup", "close"]
    assert env.workers == set()


SCRIPT = """
import asyncio
from atroposlib.envs import base
from atroposlib.envs.running import run_foreground
from tests.envs.conftest import CharTokenizers
from tests.envs.small_environment import SERVERS, SmallEnv, small_config

base.AutoTokenizer = CharTokenizers

class SlowEnv(SmallEnv):
    async def collect_trajectory(self, item):
        print("rolling out", flush=True)
        await asyncio.sleep(0.5)
        return await super().collect_trajectory(item)

    async def close(self):
        print("closed", flush=True)

config = small_config(rollout_server_url={url!r}, rollout_grace_s=10.0, max_num_workers=2)
run_foreground(SlowEnv(config, SERVERS).env_manager)
"""


async def test_sigterm_delivers_what_runs_closes_and_disconnects(
    service: LiveService, tmp_path: Path
) -> None:
    service.start()
    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        process = subprocess.Popen(  # noqa: ASYNC220 - starts at once
            [sys.executable, "-c", SCRIPT.format(url=service.url)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)

        process.send_signal(signal.SIGTERM)
        rest, _ = await asyncio.to_thread(process.communicate, timeout=60)
        queue = await trainer.client.status()
        own = await trainer.client.status_env(0)

    assert line == "rolling out\n"
    assert rest.endswith("closed\n")
    assert process.returncode == 128 + signal.SIGTERM
    assert queue["queue_size"] == 2  # both workers had a group in the making
    assert own["env_weight"] < 0.02  # a disconnected environment has no share


async def test_boundaries_crossed_while_the_service_had_forgotten_us_still_count(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, steps_per_eval=5)
    saved: list[int] = []
    env.save_checkpoint = saved.append
    registration = {
        "num_steps": 1000,
        "save_checkpoint_interval": 5,
        "checkpoint_dir": str(tmp_path),
    }
    serving = asyncio.create_task(env.env_manager())
    try:
        async with ScriptedTrainer(service.url, **registration) as trainer:
            await trainer.register()
            await trainer.train(2)
            await until(lambda: env.curr_step == 2)
        service.stop()
        service.start()
        async with ScriptedTrainer(service.url, **registration, starting_step=7) as trainer:
            await trainer.register()
            await until(lambda: env.curr_step >= 7)  # 8 where a batch was ready at once
            await until(lambda: env.num_evaluations)
    finally:
        serving.cancel()
        await asyncio.wait({serving})

    assert env.num_evaluations == 1
    assert saved == [5]


async def test_shrunk_groups_are_delivered_and_counted(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(
        rollout_server_url=service.url,
        group_size=4,
        straggler_policy="SHRINK",
        straggler_timeout_s=0.05,
        metrics_path="metrics.jsonl",
    )

    lagging: set[int] = set()

    async def lag(item: int) -> None:
        if item <= 2 and item not in lagging:
            lagging.add(item)
            await asyncio.Event().wait()

    env.before_rollout = lag
    serving = asyncio.create_task(env.env_manager())
    try:
        async with ScriptedTrainer(service.url, num_steps=1000, batch_size=4) as trainer:
            await trainer.register()
            await asyncio.wait_for(trainer.train(6), 60)
            await env.wandb_log({})
    finally:
        serving.cancel()
        await asyncio.wait({serving})

    sizes = [len(group["tokens"]) for group in trainer.groups]
    assert sorted(sizes) == [2, 2, 4, 4, 4, 4, 4]
    assert env.straggler_counts == {"left_out": 4}
    assert "stragglers/left_out" in (tmp_path / "metrics.jsonl").read_text()


def double(number: int) -> int:
    return 2 * number


async def test_score_pool_is_made_when_used_counted_and_closed(make_env: MakeEnv) -> None:
    env = make_env(num_score_workers=0)
    await env._close_score_pool()
    metrics: dict[str, Any] = {}
    await env.wandb_log(metrics)
    assert "score_pool/calls" not in metrics

    assert await env.score_pool.run(double, 4) == 8

    await env.wandb_log(metrics)
    assert metrics["score_pool/calls"] == 1
    await env._close_score_pool()
