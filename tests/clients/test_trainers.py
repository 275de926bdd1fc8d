"""Third-party trainers, as the docs print them: all is acknowledged and the environment ends."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from atroposlib.api.trainers.conformance import RULE_NAMES
from atroposlib.cli.trainer_check import CheckSettings, check
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


class SampledVocabularyEnv(SmallVocabularyEnv):
    """The same with logprobs, as from an engine that samples both tokens equally often."""

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        scored, backlog = await super().collect_trajectory(item)
        return {**scored, "inference_logprobs": [1.0, 1.0, 1.0, math.log(0.5)]}, backlog


class EngineStub(BaseHTTPRequestHandler):
    """Answers the requests with which weights are updated, as a vLLM does."""

    requests: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.path.partition("?")[0], body))
        self.send_response(400 if body == b"{}" else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


async def ended(env: SmallEnv, *command: str, **variables: str) -> str:
    """Run a trainer beside an environment until both have ended; return what it printed."""
    serving = asyncio.create_task(env.env_manager())
    training = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": str(PAGE.parents[1]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **variables,
        },
    )
    output, _ = await asyncio.wait_for(training.communicate(), 900)
    assert training.returncode == 0, output.decode()[-3000:]
    await asyncio.wait_for(serving, 120)
    return output.decode()


def save_trl_model(directory: Path) -> Path:
    """A tiny model with the tokens that TRL asks for."""
    from transformers import AutoTokenizer

    model = save_tiny_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token = "w0"
    tokenizer.save_pretrained(model)
    return model


def check_status(service: LiveService, *, num_steps: int) -> None:
    """Check that the run has its steps, and that no batch is leased."""
    left = httpx.get(f"{service.url}/status").json()
    assert left["current_step"] == num_steps
    assert left.get("leased_batches", 0) == 0


async def check_end(env: SmallEnv, service: LiveService, *, num_steps: int) -> None:
    """Check that the run has its steps, no batch is leased, and the environment was closed."""
    await asyncio.to_thread(check_status, service, num_steps=num_steps)
    assert env.curr_step == num_steps
    assert env.events == ["setup", "close"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trainer", ARGUMENTS)
@pytest.mark.long
async def test_trl_ends_with_all_acknowledged_and_the_environment_ended(
    trainer: str, tmp_path: Path, service: LiveService, make_env: Callable[..., Any]
) -> None:
    pytest.importorskip("trl.experimental.async_grpo.packing", exc_type=ImportError)
    model = save_trl_model(tmp_path / "model")
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


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_trls_asynchronous_trainer_takes_20_steps_and_updates_the_engine(
    tmp_path: Path, service: LiveService, make_env: Callable[..., Any]
) -> None:
    pytest.importorskip("trl.experimental.async_grpo.packing", exc_type=ImportError)
    model = save_trl_model(tmp_path / "model")
    (section,) = re.findall(
        r"\n### Asynchronous.*?\n(.*?)(?=\n##)", PAGE.read_text("utf-8"), re.DOTALL
    )
    block = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    service.start()
    engine = ThreadingHTTPServer(("127.0.0.1", 0), EngineStub)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    text = block.replace("http://localhost:8000", service.url)
    text = text.replace("http://localhost:9001", f"http://127.0.0.1:{engine.server_port}")
    text = text.replace("Qwen/Qwen2.5-1.5B-Instruct", str(model))
    program = tmp_path / "program.py"
    program.write_text(text, encoding="utf-8")
    env = make_env(
        SampledVocabularyEnv, rollout_server_url=service.url, group_size=8, total_steps=1000
    )

    try:
        output = await ended(env, str(program), TRL_EXPERIMENTAL_SILENCE="1")
    finally:
        await asyncio.to_thread(engine.shutdown)
        engine.server_close()

    await check_end(env, service, num_steps=NUM_STEPS)
    assert output.count("'loss'") == NUM_STEPS
    assert "'batch/samples_per_step': '32'" in output
    paths = [path for path, _ in EngineStub.requests]
    # Once to check the routes, then before the first step and after each of the 20.
    assert paths.count("/pause") == paths.count("/resume") == NUM_STEPS + 1
    assert paths.count("/collective_rpc") == NUM_STEPS + 2
    assert b"reload_weights" in EngineStub.requests[-3][1]
    assert (tmp_path / "trained" / "published" / "model.safetensors").exists()
    left = await asyncio.to_thread(lambda: httpx.get(f"{service.url}/status").json())
    assert left["policy_version"] == NUM_STEPS + 1


TRAINERS = {
    "atropos-grpo": "-m example_trainer.grpo --model {model} --atropos-url {{url}} "
    "--training-steps 8 --batch-size 2 --gradient-accumulation-steps 2 --seq-len 64 "
    "--weight-bridge-mode off --checkpoint-interval 0 --save-path {out}",
    "TRL": "{program} {{url}} {model} {out}",
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", TRAINERS)
async def test_trainers_keep_every_rule_of_the_check(
    trainer: str, tmp_path: Path, service: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a service that is busy, restarts, and ends a lease in the middle of the run."""
    pytest.importorskip("trl.experimental.async_grpo.packing", exc_type=ImportError)
    model = save_trl_model(tmp_path / "model")
    service.start()
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parents[1]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = TRAINERS[trainer].format(
        model=model, out=tmp_path / "out", program=PROGRAMS / "trl_async_grpo.py"
    )
    # TRL has one advantage per trajectory.
    without = ("advantages",) if trainer == "TRL" else ()

    checklist, _ = await check(
        CheckSettings(
            url=service.url,
            command=f"{sys.executable} {command}",
            port=0,
            rows=None,
            vocabulary=32,
            without=without,
            idle_s=120,
            limit_s=400,
        )
    )

    assert checklist.broken == {}
    assert {rule for rule in RULE_NAMES if checklist.result(rule) != "ok"} == {"rows", *without}
    await asyncio.to_thread(check_status, service, num_steps=8)


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
