"""Methods of the loop that some environments override, and parts they reach into (4.2, 10)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from tests.contract.scored_groups import take
from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until
from tests.envs.small_environment import SmallEnv, small_config

MakeEnv = Callable[..., Any]


class OwnWorkers(SmallEnv):
    """Starts its rollouts itself, and does in one what others do in three hooks."""

    async def add_train_workers(self) -> None:
        while len(self.workers) < self.max_num_workers:
            item = await self.get_next_item()
            item_uuid = str(uuid.uuid4())
            self.running_items[item_uuid] = {
                "item": item,
                "worker": None,
                "start_time": time.time(),
            }
            worker = asyncio.create_task(self.handle_env(item_uuid))
            self.running_items[item_uuid]["worker"] = worker
            self.workers.add(worker)
            worker.add_done_callback(self.workers.discard)

    async def handle_env(self, item_uuid: str) -> Any:
        item = self.running_items[item_uuid]["item"]
        group, _ = await self.collect_trajectories(item)
        self.running_items.pop(item_uuid, None)
        await self.handle_send_to_api(group, item)
        await self.cleanup()
        return group


async def test_environment_with_workers_of_its_own_serves_to_the_end(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(OwnWorkers, rollout_server_url=service.url)

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert len(trainer.groups) == 6
    assert env.workers == set()


class WithoutService(SmallEnv):
    """Replaces every method that asks the service, without calling those of the base class."""

    async def register_env(self) -> None:
        self.env_id = 0
        self.sent: list[Any] = []

    async def get_server_info(self) -> None:
        self.config.batch_size, self.max_token_len = 4, 1000

    async def get_status(self) -> None:
        self.status_dict = {"current_step": len(self.sent), "queue_size": 0, "env_weight": 1.0}

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        self.sent.append(scored_data)


async def test_environment_that_registers_in_its_own_way_starts_rollouts(
    make_env: MakeEnv,
) -> None:
    env = make_env(WithoutService, total_steps=3, steps_per_eval=0)

    await asyncio.wait_for(env.env_manager(), 60)

    assert len(env.sent) >= 3


class CallingSuper(SmallEnv):
    """Overrides what it may and hands on to the base class each time."""

    async def env_manager(self) -> None:
        self.events.append("env_manager")
        await super().env_manager()

    async def register_env(self) -> None:
        await super().register_env()
        self.events.append(f"registered {self.env_id}")

    async def get_server_info(self) -> None:
        await super().get_server_info()
        self.events.append(f"batch {self.config.batch_size}")

    async def env_step_checks(self) -> None:
        if self.curr_step != self.status_dict["current_step"]:  # type: ignore[index]
            self.events.append("step")
        await super().env_step_checks()

    async def add_train_workers(self) -> None:
        self.max_token_len = 32
        await super().add_train_workers()

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        return {**super().perf_stats(metrics_dict), "own/tokens": 5}

    async def handle_send_to_api(self, scored_data: Any, *args: Any, **flags: Any) -> None:
        scored_data["generation_params"] = {"temperature": 0.7}
        await super().handle_send_to_api(scored_data, *args, **flags)


async def test_overrides_that_call_super_take_part(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    service.start()
    env = make_env(CallingSuper, rollout_server_url=service.url, metrics_path="m.jsonl")

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 60)
        await asyncio.wait_for(serving, 60)

    assert env.events[:4] == ["env_manager", "setup", "registered 0", "batch 4"]
    assert "step" in env.events
    assert trainer.groups[0]["generation_params"] == {"temperature": 0.7}
    first = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    assert first["small_0_own/tokens"] == 5


def test_cli_override_ends_in_the_base_class(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_env()
    reached: list[str] = []

    class Own(SmallEnv):
        @classmethod
        def cli(cls) -> Any:
            reached.append("before")
            super().cli()
            reached.append("after")

    monkeypatch.setattr(sys, "argv", ["own.py", "serve", "--help"])
    with pytest.raises(SystemExit) as ended:
        Own.cli()

    assert ended.value.code == 0
    assert reached == ["before"]
    assert "--env.group_size" in capsys.readouterr().out


async def test_servers_may_be_used_one_by_one(make_env: MakeEnv) -> None:
    env = make_env()
    [server] = env.server.servers

    metrics = await server.wandb_metrics({}, "judge")
    env.server.tool_parser = "hermes"
    env.server.servers[0].chat_completion = take

    assert (server.config.model_name, server.config.base_url) == ("m", "http://127.0.0.1:9/v1")
    assert isinstance(metrics, dict)
    async with env.server.dedicated_server() as dedicated:
        assert dedicated.config.model_name == "m"


@pytest.mark.parametrize(
    "name",
    "apply_chat_template encode decode batch_decode eos_token_id".split(),  # noqa: SIM905
)
def test_tokenizer_members_exist(make_env: MakeEnv, name: str) -> None:
    assert getattr(make_env().tokenizer, name) is not None


def test_client_of_the_first_server_reads_the_environment_for_what_is_not_set(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    make_env()

    official = SmallEnv(small_config(), [APIServerConfig(model_name="m")]).client
    local = SmallEnv(small_config(), [APIServerConfig(base_url="http://10.0.0.1/v1")]).client

    assert str(official.base_url) == "https://api.openai.com/v1/"
    assert official.api_key == "of the environment"  # pragma: allowlist secret
    assert str(local.base_url) == "http://10.0.0.1/v1/"
    # The key is not shown to a server of one's own.
    assert local.api_key != "of the environment"  # pragma: allowlist secret


def test_process_mode_is_absent_outside_of_process(make_env: MakeEnv) -> None:
    assert not hasattr(make_env(), "process_mode")


async def test_evaluation_split_and_wandb_while_evaluating(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    class Evaluated(SmallEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            reply = await self.server.chat_completion(messages=[], split="eval")
            await self.wandb_log({"eval/reply": reply})

    env = make_env(Evaluated, metrics_path="m.jsonl")
    asked: list[dict[str, Any]] = []

    async def chat_completion(**request: Any) -> str:
        asked.append(request)
        return "yes"

    env.server.chat_completion = chat_completion

    await env._run_evaluate()

    assert asked == [{"messages": [], "split": "eval"}]
    assert json.loads((tmp_path / "m.jsonl").read_text())["eval/reply"] == "yes"


async def test_load_checkpoint_override_gets_the_step_of_the_run(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    class Restoring(SmallEnv):
        def load_checkpoint(self) -> None:
            super().load_checkpoint()
            self.events.append(f"load at {self.curr_step}")

        def save_checkpoint(self, step: int, data: Any = None) -> None:
            super().save_checkpoint(step, {"num_items": self.num_items})

    service.start()
    env = make_env(Restoring, rollout_server_url=service.url)

    async with ScriptedTrainer(
        service.url, starting_step=3, checkpoint_dir=str(tmp_path), num_steps=1000
    ) as trainer:
        await trainer.register()
        await env.register_env()
        await env.service_session.leave(timeout_s=1)
    env.save_checkpoint(5)

    assert env.events == ["load at 3"]
    assert (tmp_path / "env_checkpoints" / "small_0" / "step-5.json").exists()
