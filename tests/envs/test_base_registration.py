"""Registering with the real service: names, weights, limits, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until, until

MakeEnv = Callable[..., Any]


async def test_register_negative_weight_never_updates_the_servers(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, inference_weight=-1)
    updates: list[float] = []
    env.server.update_weight = updates.append

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert updates == []


async def test_register_group_larger_than_batch_names_both(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, group_size=8)

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        with pytest.raises(ValueError, match="group_size is 8 but the trainer's batch_size is 4"):
            await env.env_manager()


async def test_register_without_any_number_of_steps_says_what_to_set(
    service: LiveService, make_env: MakeEnv
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)

    async with ScriptedTrainer(service.url, num_steps=-1) as trainer:
        await trainer.register()
        with pytest.raises(ValueError, match=r"set --env\.total_steps"):
            await env.env_manager()


async def test_register_late_restores_the_checkpoint(
    service: LiveService, make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    folder = tmp_path / "env_checkpoints" / "small_4"
    folder.mkdir(parents=True)
    (folder / "step-5.json").write_text('{"num_items": 40, "unheard_of": 1}')
    env = make_env(rollout_server_url=service.url)

    async with ScriptedTrainer(
        service.url, starting_step=6, checkpoint_dir=str(tmp_path), num_steps=1000
    ) as trainer:
        await trainer.register()
        await serve_until(env, until(lambda: env.num_items > 40))

    assert "unheard_of" in caplog.text


@pytest.mark.parametrize(
    ("wandb_name", "class_name", "expected"),
    [("mine", "small", "mine_0"), (None, "small", "small_0"), (None, None, "SmallEnv_0")],
)
async def test_register_name_falls_back(
    service: LiveService,
    make_env: MakeEnv,
    wandb_name: str | None,
    class_name: str | None,
    expected: str,
) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url, wandb_name=wandb_name)
    env.name = class_name

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await env.register_env()
        await env.service_session.leave(timeout_s=1)

    assert env.wandb_prepend == expected
