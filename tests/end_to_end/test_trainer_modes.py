"""The trainer on a real engine in each weight bridge mode: restarts, a kill and `--resume`."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.config import TrainingConfig
from example_trainer.demo.settings import DemoPaths, DemoSettings, demo_plan, environment_settings
from example_trainer.launch.stack import common_variables, environment_sections, write_yaml
from example_trainer.processes import ManagedProcess, find_free_port, wait_until_ready
from example_trainer.trainers import train
from tests.api.soak.service_process import Replica
from tests.end_to_end.conftest import (
    MAX_MODEL_LEN,
    OPENAI_DOOR,
    START_TIMEOUT_S,
    save_spread_out_model,
    serve_with_vllm,
    vllm_environment,
)
from tests.trainer.kill_supervisor import seeded_groups

pytestmark = pytest.mark.slow

ENGINE_ARGUMENTS = "--max-num-seqs 64 --enforce-eager"
STEPS = 12
KILLED_AFTER = 6
RESTART_INTERVAL = 4
LIMIT_S = 600.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica(tmp_path, "sqlite", run="modes")
    replica.start()
    yield replica
    replica.stop()


@pytest.fixture
def engine_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of an engine the trainer launches, less those the trainer has to set."""
    pytest.importorskip("vllm")
    for name, value in vllm_environment().items():
        monkeypatch.setenv(name, value)
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name)


def started_on(log: Path) -> list[str]:
    """The models that engines were started on, as vLLM logs its arguments."""
    marker = "'model': '"
    return [
        line.split(marker, 1)[1].split("'", 1)[0]
        for line in log.read_text(errors="replace").splitlines()
        if "non-default args" in line
    ]


def to_earlier_layout(checkpoint: Path) -> None:
    """Put the trainer's state where earlier versions wrote it."""
    for path in (checkpoint / "trainer").iterdir():
        path.rename(checkpoint / path.name)
    (checkpoint / "trainer").rmdir()


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("engine_variables")
@pytest.mark.long
def test_default_checkpoints_are_what_an_engine_restarts_on(
    tmp_path: Path, service: Replica
) -> None:
    save_spread_out_model(tmp_path / "model")
    config = TrainingConfig(
        model_name=str(tmp_path / "model"),
        device="cpu",
        weight_bridge_mode="none",
        vllm_restart_interval=1,
        checkpoint_interval=2,
        training_steps=3,
        batch_size=2,
        gradient_accumulation_steps=2,
        seq_len=64,
        optimizer="adamw",
        max_model_len=MAX_MODEL_LEN,
        vllm_args=ENGINE_ARGUMENTS,
        vllm_port=find_free_port(),
        atropos_url=service.url,
        save_path=str(tmp_path / "saves"),
        log_dir=str(tmp_path / "logs"),
    )
    httpx.post(f"{service.url}/scored_data_list", json=seeded_groups(3)).raise_for_status()

    final = train(config)

    assert started_on(tmp_path / "logs" / "vllm.log") == [
        config.model_name,
        str(tmp_path / "saves" / "engine_weights"),
        str(tmp_path / "saves" / "step_2"),
    ]
    assert (final / "model.safetensors").is_file()
    assert (tmp_path / "saves" / "step_2" / "trainer" / "trainer_state.safetensors").is_file()


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny model after its warm-up, which leaves it something to learn."""
    from example_trainer.demo.student import make_student, teach_student
    from example_trainer.demo.task import held_out_problems

    folder = tmp_path_factory.mktemp("student")
    settings = DemoSettings()
    env = environment_settings(settings)
    made = make_student(env, shape=settings.shape, seed=0, folder=folder / "model")
    teach_student(
        made,
        env,
        measured=held_out_problems(env)[:256],
        settings=settings.warm_up,
        seed=0,
        on_check=lambda step, loss, accuracy: None,
    )
    return folder / "model"


class ModeRun:
    """One run of all parts in one mode, whose trainer can be killed and started again."""

    def __init__(self, folder: Path, model: Path, mode: str, service: Replica) -> None:
        self.mode = mode
        self.model = model
        self.saves = folder / "saves"
        self.logs = folder / "logs"
        self.port = find_free_port()
        self.uses_lora = mode.startswith("lora")
        self._folder = folder
        self._service = service
        # Groups whose scores are all equal are sent too: without them the mean stays near a half.
        sections: dict[str, dict[str, Any]] = {"env": {"ensure_scores_are_not_same": False}}
        if self.uses_lora:
            sections["openai"] = {"model_name": "training_adapter"}
        self._settings = replace(
            DemoSettings(),
            steps=STEPS,
            groups_per_step=24,
            group_size=8,
            max_tokens=64,
            environment_sections=sections,
        )

    def trainer(self, *more: str) -> ManagedProcess:
        """The trainer's process, not started yet."""
        settings = self._settings
        flags: Mapping[str, Any] = {
            "model": self.model,
            "device": "cpu",
            "lr": 4e-4 if not self.uses_lora else 2e-3,
            "weight-decay": 0.0,
            "optimizer": "adamw",
            "training-steps": STEPS,
            "batch-size": settings.sequences_per_pass,
            "gradient-accumulation-steps": settings.sequences_per_step
            // settings.sequences_per_pass,
            "seq-len": settings.max_tokens,
            "pad-multiple": 8,
            "weight-bridge-mode": self.mode,
            "vllm-restart-interval": RESTART_INTERVAL if "restart" in self._restarts else 1,
            "checkpoint-interval": RESTART_INTERVAL,
            "vllm-port": self.port,
            "vllm-args": ENGINE_ARGUMENTS,
            "max-model-len": settings.max_tokens,
            "lora-dropout": 0.0,
            "save-path": self.saves,
            "log-dir": self.logs,
            "atropos-url": self._service.url,
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        return ManagedProcess(
            "trainer",
            [sys.executable, "-m", "example_trainer.grpo", *arguments, *more],
            log_path=self.logs / "trainer.log",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def _restarts(self) -> str:
        return "restart" if self.mode in ("none", "lora_restart") else ""

    def environment(self) -> ManagedProcess:
        """The demo's environment, not started yet."""
        plan = demo_plan(
            self._settings, DemoPaths(self._folder), model=str(self.model), on_gpu=False
        )
        (environment,) = plan.environments
        sections = environment_sections(
            plan,
            environment,
            engine_url=f"http://127.0.0.1:{self.port}",
            service_url=self._service.url,
        )
        write_yaml(sections, environment.config)
        return ManagedProcess(
            "environment",
            [sys.executable, *environment.program, "serve", f"--config={environment.config}"],
            log_path=self.logs / "environment.log",
            env=common_variables(plan, os.environ),
            cwd=plan.working_folder,
        )

    def engine(self) -> ManagedProcess:
        """A stock vLLM that takes adapters while it runs, not started yet."""
        command = [sys.executable, *OPENAI_DOOR, "--model", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--max-model-len", "64", "--enable-lora", "--max-lora-rank", "16"]
        return ManagedProcess(
            "vLLM",
            [*command, *ENGINE_ARGUMENTS.split()],
            log_path=self.logs / "vllm.log",
            env=vllm_environment(),
        )

    def is_engine_healthy(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self) -> list[dict[str, Any]]:
        path = self.saves / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(claim: Callable[[], bool], process: ManagedProcess) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not claim():
        assert process.is_alive(), process.log_tail(lines=60)
        assert time.monotonic() < deadline, process.log_tail(lines=60)
        time.sleep(0.1)


def require_engine_serves(checkpoint: Path, run: ModeRun, folder: Path) -> None:
    """Start a plain engine on a checkpoint as it is, and let it answer."""
    from transformers import AutoTokenizer

    folder.mkdir()
    more = ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"adapter={checkpoint}"]
    with serve_with_vllm(
        run.model if run.uses_lora else checkpoint,
        AutoTokenizer.from_pretrained(checkpoint),
        max_model_len=64,
        more=more if run.uses_lora else (),
    ) as engine:
        request = {
            "model": "adapter" if run.uses_lora else "tiny",
            "messages": [{"role": "user", "content": "4 - 1 - 7"}],
            "max_tokens": 8,
        }
        answer = httpx.post(f"{engine.base_url}/chat/completions", json=request, timeout=120.0)
    assert answer.status_code == 200, answer.text


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("engine_variables")
@pytest.mark.parametrize("mode", ["none", "in_place", "lora_only", "lora_restart"])
def test_mode_trains_over_restarts_and_a_kill(
    tmp_path: Path, student: Path, service: Replica, mode: str
) -> None:
    run = ModeRun(tmp_path, student, mode, service)
    with ExitStack() as stack:
        if mode == "lora_only":
            engine = stack.enter_context(run.engine())
            wait_until_ready(engine, run.is_engine_healthy, timeout_s=START_TIMEOUT_S)
        with run.trainer() as first:
            wait_for(run.is_engine_healthy, first)
            stack.enter_context(run.environment())
            wait_for(lambda: len(run.metrics()) >= KILLED_AFTER, first)
            os.kill(first.pid, signal.SIGKILL)
        if mode == "none":
            to_earlier_layout(run.saves / "step_4")
        second = stack.enter_context(run.trainer("--resume"))
        wait_for(lambda: not second.is_alive() or len(run.metrics()) >= STEPS, second)
        code = second.wait(timeout_s=LIMIT_S)

    assert code == 0, second.log_tail(lines=60)
    rewards = [line["train/reward_mean"] for line in run.metrics()]
    print(f"{mode}: rewards {[round(reward, 3) for reward in rewards]}")
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
    if not run.uses_lora:
        assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4])
    assert run.is_engine_healthy() is False
    log = (run.logs / "trainer.log").read_text()
    assert f"starting after step {RESTART_INTERVAL}" in log
    final = run.saves / ("final_adapter" if run.uses_lora else "final_model")
    assert list(final.glob("*.safetensors"))
    if mode != "none":  # there the trainer has started engines on checkpoints as they are
        require_engine_serves(run.saves / "step_8", run, tmp_path / "plain")
