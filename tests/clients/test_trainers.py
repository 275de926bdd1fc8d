"""Third-party trainers, as the docs print them: all is acknowledged and the environment ends."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.installing import NotInstallableError, python_of
from tests.clients.running import PROGRAMS
from tests.envs import conftest as envs_conftest
from tests.envs.live_service import LiveService
from tests.envs.small_environment import SmallEnv
from tests.trainer.tiny import save_tiny_model

make_env, service = envs_conftest.make_env, envs_conftest.service

PREFERRED, REJECTED = 7, 8
PAGE = Path(__file__).parents[2] / "docs" / "other_trainers.md"
NUM_STEPS = 20
ARGUMENTS = {
    "TRL": "",
    # What Axolotl makes of the settings `rollout_func` and `reward_funcs`.
    "Axolotl": "from example_trainer.recipes.trl_grpo import service_reward\n"
    "arguments = {'rollout_func': rollout_func, 'reward_funcs': [service_reward]}\n",
}


class SmallVocabularyEnv(SmallEnv):
    """Groups that the tiny model can be trained on; half of the trajectories are better."""

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        scored, backlog = await super().collect_trajectory(item)
        token = PREFERRED if scored["scores"] % 2 else REJECTED
        return {
            "tokens": [1, 2, 3, token],
            "masks": [-100, -100, -100, token],
            "scores": scored["scores"] % 2,
        }, backlog


async def ended(env: SmallEnv, *command: str, **variables: str) -> str:
    """Run a trainer beside an environment until both have ended; return what it printed."""
    serving = asyncio.create_task(env.env_manager())
    training = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
    )
    output, _ = await asyncio.wait_for(training.communicate(), 900)
    assert training.returncode == 0, output.decode()[-3000:]
    await asyncio.wait_for(serving, 120)
    return output.decode()


async def check_end(env: SmallEnv, service: LiveService, *, num_steps: int) -> None:
    """Check that the run has its steps, no batch is leased, and the environment was closed."""
    left = await asyncio.to_thread(lambda: httpx.get(f"{service.url}/status").json())
    assert left["current_step"] == env.curr_step == num_steps
    assert left.get("leased_batches", 0) == 0
    assert env.events == ["setup", "close"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trainer", ARGUMENTS)
@pytest.mark.long
async def test_trl_ends_with_all_acknowledged_and_the_environment_ended(
    trainer: str, tmp_path: Path, service: LiveService, make_env: Callable[..., Any]
) -> None:
    pytest.importorskip("trl")
    from transformers import AutoTokenizer

    model = save_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token = "w0"
    tokenizer.save_pretrained(model)
    page = PAGE.read_text("utf-8")
    (section,) = re.findall(rf"\n## {trainer}\n(.*?)(?=\n## |\Z)", page, re.DOTALL)
    block = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    service.start()
    program = tmp_path / "program.py"
    text = block.replace("http://localhost:8000", service.url) + ARGUMENTS[trainer]
    program.write_text(text, encoding="utf-8")
    env = make_env(
        SmallVocabularyEnv, rollout_server_url=service.url, group_size=8, total_steps=1000
    )

    command = (str(PROGRAMS / "trl_grpo.py"), str(program), str(model), str(tmp_path / "out"))
    await ended(env, *command)

    await check_end(env, service, num_steps=NUM_STEPS)


@pytest.mark.clients
async def test_axolotls_dataset_ends_with_all_acknowledged_and_the_environment_ended(
    service: LiveService, make_env: Callable[..., Any]
) -> None:
    pytest.importorskip("torch")
    try:
        python = python_of("axolotl-plugin", limit_s=600)
    except NotInstallableError as error:
        pytest.skip(str(error))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    service.start()
    env = make_env(
        SmallVocabularyEnv, rollout_server_url=service.url, group_size=2, total_steps=1000
    )

    command = (str(PROGRAMS / "axolotl_dataset.py"), "http://localhost", str(service.port), "4")
    output = await ended(env, *command, PYTHONPATH=str(packages))

    assert output.splitlines()[-1].count('"tokens": [1, 2, 3, ') == 8
    await check_end(env, service, num_steps=2)
