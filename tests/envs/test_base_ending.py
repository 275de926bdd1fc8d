"""The end of a served run: what is logged last, and what becomes of an engine that has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_manager import EngineWatch, ServerManager
from atroposlib.errors import InferenceError
from tests.envs.live_service import LiveService, ScriptedTrainer, until
from tests.envs.small_environment import SERVERS, SmallEnv
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

MakeEnv = Callable[..., Any]


class MeasuredEnv(SmallEnv):
    """Logs what evaluations find as shipped environments do: with the next metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_metrics: dict[str, float] = {}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await super().evaluate()
        await asyncio.sleep(0.05)  # the step's metrics are not held up by it
        self.eval_metrics["eval/percent_correct"] = 0.25 * self.curr_step

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        found, self.eval_metrics = self.eval_metrics, {}
        await super().wandb_log({**(wandb_metrics or {}), **found})


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded_by_wandb(folder: Path) -> bytes:
    (run_file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return run_file.read_bytes()


async def serve_three_steps(env: Any, service: LiveService) -> None:
    async with ScriptedTrainer(service.url, num_steps=3, wandb_project="p") as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 120)
        await asyncio.wait_for(serving, 120)


async def test_final_evaluation_and_last_rollouts_reach_every_log(
    service: LiveService, make_env: MakeEnv, offline_wandb: Path, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    service.start()
    env = make_env(
        MeasuredEnv,
        rollout_server_url=service.url,
        steps_per_eval=3,
        min_items_sent_before_logging=1000,  # no step has as many
        metrics_path="metrics.jsonl",
        use_tensorboard=True,
        use_wandb=True,
    )

    await serve_three_steps(env, service)

    (record,) = records_of(tmp_path / "metrics.jsonl")
    assert record["step"] == 3
    assert record["small_0_eval/percent_correct"] == 0.75
    assert record["small_0_train/rollouts"]["rows"]
    assert record["small_0_train/completion_lengths"] == 2.0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Scalars("small_0_eval/percent_correct")
    assert (event.step, event.value) == (3, 0.75)
    # wandb's own service process writes the file, a moment after `finish` has returned.
    await until(lambda: b"small_0_eval/percent_correct" in recorded_by_wandb(tmp_path))


async def test_last_step_is_logged_once(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(
        MeasuredEnv,
        rollout_server_url=service.url,
        steps_per_eval=1,
        min_items_sent_before_logging=0,
        metrics_path="metrics.jsonl",
    )

    await serve_three_steps(env, service)

    records = records_of(tmp_path / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert steps[-1] == 3
    assert records[-1]["small_0_eval/percent_correct"] == 0.75


async def test_interrupted_run_logs_its_last_rollouts(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, metrics_path="metrics.jsonl")

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await until(lambda: env.rollouts_for_wandb)
        serving.cancel()
        await asyncio.wait({serving})

    assert serving.cancelled()
    (record,) = records_of(tmp_path / "metrics.jsonl")
    assert record["small_0_train/rollouts"]["rows"]


class EngineEnv(SmallEnv):
    """Asks the engine for every group, and for every evaluation."""

    async def ask(self) -> None:
        await self.server.chat_completion(messages=[{"role": "user", "content": "hi"}])

    async def collect_trajectories(self, item: int) -> Any:
        await self.ask()
        return await super().collect_trajectories(item)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await super().evaluate()
        await self.ask()


def let_ask(env: Any, engine: ScriptedEngine) -> None:
    """Give an environment its engine, and servers that look at it often."""
    env.server = ServerManager([SERVERS[0].model_copy(update={"base_url": engine.base_url})])
    for server in env.server.servers:
        server.health_poll_s = server.max_backoff_s = 0.01


@pytest.mark.parametrize("max_batches_offpolicy", [0, 1])
async def test_engine_that_left_before_the_last_step_ends_the_environment(
    service: LiveService, make_env: MakeEnv, max_batches_offpolicy: int
) -> None:
    service.start()
    env = make_env(
        EngineEnv,
        rollout_server_url=service.url,
        engine_timeout=0.5,
        # With 1 the queue is full at once: no request is under way that could notice.
        max_batches_offpolicy=max_batches_offpolicy,
    )

    async with ScriptedEngine(["ok"], model="m") as engine:
        let_ask(env, engine)
        async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
            await trainer.register()
            serving = asyncio.create_task(env.env_manager())
            await until(lambda: env.service_session and env.service_session.num_groups_sent >= 2)
            if max_batches_offpolicy:
                await until(lambda: not env.workers)
    # The engine is gone here, and the trainer asks for nothing any more.
    with pytest.raises(InferenceError, match=r"no inference server was up for 0\.5 s .*is not the"):
        await asyncio.wait_for(serving, 120)

    assert env.events == ["setup", "close"]


async def test_engine_that_comes_back_in_time_is_used_again(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(EngineEnv, rollout_server_url=service.url, engine_timeout=300)

    async with ScriptedEngine(["ok"], model="m") as engine:
        let_ask(env, engine)
        async with ScriptedTrainer(service.url, num_steps=4) as trainer:
            await trainer.register()
            serving = asyncio.create_task(env.env_manager())
            await asyncio.wait_for(trainer.train(1), 120)
            port = engine.port
            await engine.stop()
            await until(lambda: not env.server.servers[0].server_healthy)
            await engine.start(port)
            await asyncio.wait_for(trainer.train(4), 120)
            await asyncio.wait_for(serving, 120)

    assert env.curr_step == 4


async def test_final_evaluation_is_given_up_when_the_engine_left_with_the_trainer(
    service: LiveService, make_env: MakeEnv, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    service.start()
    env = make_env(
        EngineEnv, rollout_server_url=service.url, steps_per_eval=3, metrics_path="metrics.jsonl"
    )
    env.final_engine_timeout_s = 0.5

    async with ScriptedEngine(["ok"], model="m") as engine:
        let_ask(env, engine)
        is_gone = asyncio.Event()
        ask = env.ask

        async def ask_later() -> None:
            if env.num_evaluations:
                await is_gone.wait()
            await ask()

        env.ask = ask_later
        async with ScriptedTrainer(service.url, num_steps=3) as trainer:
            await trainer.register()
            serving = asyncio.create_task(env.env_manager())
            await asyncio.wait_for(trainer.train(3), 120)
            await until(lambda: env.num_evaluations)
    is_gone.set()
    await asyncio.wait_for(serving, 120)

    assert "the final evaluation is given up: no inference server was up for 0.5 s" in caplog.text
    assert env.failure_counts["final_evaluation"] == 1
    assert env.events == ["setup", "close"]
    assert records_of(tmp_path / "metrics.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize("command", ["process", "evaluate"])
async def test_engine_that_leaves_a_run_without_a_trainer_ends_it(
    make_env: MakeEnv, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "groups.jsonl"
    env = make_env(EngineEnv, engine_timeout=0.5, data_path_to_save_groups=str(path))
    env.process_mode = True
    env.n_groups_to_process, env.group_size_to_process = 1000, 2
    engine = ScriptedEngine(["ok"], model="m")
    await engine.start()
    let_ask(env, engine)
    ask, num_asked = env.ask, 0

    async def ask_until_it_leaves() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 5:
            await engine.stop()
        await ask()

    env.ask = ask_until_it_leaves

    async def evaluate() -> None:
        for _ in range(10):
            await env.ask()

    env.evaluate = evaluate
    running = env.process_manager() if command == "process" else env._run_evaluate()
    with pytest.raises(InferenceError, match=r"no inference server was up for 0\.5 s .*; start it"):
        await asyncio.wait_for(running, 120)

    assert env.events[-1] == "close"
    assert command == "evaluate" or len(records_of(path)) >= 1


async def test_watch_counts_from_when_a_server_was_last_up() -> None:
    now = 0.0
    async with ScriptedEngine(["ok"], model="m") as engine:
        server = OpenAIServer(SERVERS[0].model_copy(update={"base_url": engine.base_url}))
        watch = EngineWatch([server], now=lambda: now)
        looks = []

        async def look(at: float) -> None:
            nonlocal now
            now = at
            await watch.look()
            looks.append(watch.away_s)

        await look(5.0)  # it has not answered yet: `startup_timeout` is for that
        server.health.has_answered = True
        await look(10.0)
        port = engine.port
        await engine.stop()
        await look(14.0)
        await look(17.0)
        await engine.start(port)
        await look(20.0)
        await engine.stop()
        await look(21.0)
        await server.close()

    assert looks == [0.0, 0.0, 4.0, 7.0, 0.0, 1.0]
