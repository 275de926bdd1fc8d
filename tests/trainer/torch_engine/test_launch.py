"""The torch engine as trainer, `atropos-train` and the demo launch and update it."""

from __future__ import annotations

import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from example_trainer.demo.settings import DemoPaths, demo_plan, settings_for
from example_trainer.engine import EngineControl
from example_trainer.launch import preflight
from example_trainer.launch.stack import engine_arguments, engine_variables, trainer_arguments
from example_trainer.processes import ManagedProcess, find_free_port, wait_until_ready
from example_trainer.vllm_manager import check_vllm_health, vllm_command
from example_trainer.weight_sync import make_weight_sync
from tests.trainer.scripted_vllm import ScriptedVllm
from tests.trainer.tiny import tiny_config
from tests.trainer.torch_engine.conftest import wait_until

pytestmark = pytest.mark.slow


def test_command_starts_the_torch_engine_on_the_device_of_the_trainer(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, engine="torch", vllm_port=9123, vllm_args="--max-num-seqs 8")

    command = vllm_command(config, "saves/step_3")

    assert command[1:3] == ["-m", "example_trainer.torch_engine"]
    assert command[command.index("--device") + 1] == "cpu"
    assert command[command.index("--dtype") + 1] == "float32"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert command[-2:] == ["--max-num-seqs", "8"]


def test_adapters_are_refused_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="engine=torch serves no adapters"):
        tiny_config(tmp_path, engine="torch", weight_bridge_mode="lora_only")


@pytest.mark.parametrize(
    ("info", "sent"),
    [
        ({"vllm_config": {}}, {}),
        ({"torch_engine": {"takes_weight_version": True}}, {"weight_version": "5"}),
    ],
)
def test_only_an_engine_that_takes_a_version_receives_one(
    tmp_path: Path, info: dict[str, Any], sent: dict[str, str]
) -> None:
    with ScriptedVllm({"/server_info": (200, info)}) as engine:
        control = EngineControl(f"http://127.0.0.1:{engine.port}")
        control.reload_weights(tmp_path, pause_mode="none", version=5)
        control.close()

    [body] = [body for path, _, body in engine.requests if path == "/collective_rpc"]
    assert body["kwargs"] == {"weights_path": str(tmp_path), **sent}


@pytest.mark.parametrize(
    ("given", "installed", "expected"),
    [
        (None, True, "vllm"),
        (None, False, "torch"),
        ("vllm", False, "vllm"),
        ("torch", True, "torch"),
    ],
)
def test_torch_is_chosen_if_vllm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, given: Any, installed: bool, expected: str
) -> None:
    monkeypatch.setattr(preflight, "_is_installed", lambda package: installed)

    chosen = preflight.choose_engine(given)

    assert chosen.kind == expected
    assert bool(chosen.note) is (given is None and not installed)


def test_demo_with_torch_passes_no_flag_of_vllm() -> None:
    from example_trainer.torch_engine.__main__ import _parser

    settings = settings_for("full", engine="torch")
    plan = demo_plan(settings, DemoPaths(Path()), model="some/model", on_gpu=False)

    arguments = engine_arguments(plan, port=1111)
    trainer = trainer_arguments(
        plan, DemoPaths(Path()), engine_url="http://127.0.0.1:1111", service_url="http://s"
    )

    assert arguments[:2] == ["-m", "example_trainer.torch_engine"]
    parsed = _parser().parse_args(arguments[2:])
    assert (parsed.host, parsed.device, parsed.weight_version) == ("127.0.0.1", "cpu", "0")
    assert "--engine=torch" in trainer
    assert not any(name.startswith("VLLM") for name in engine_variables(plan, {}))


def make_engine(model_folder: Path, port: int, *, log: Path) -> ManagedProcess:
    command = [sys.executable, "-m", "example_trainer.torch_engine", "--model", str(model_folder)]
    command += ["--port", str(port), "--device", "cpu", "--max-model-len", "256"]
    return ManagedProcess("engine", command, log_path=log)


def test_paused_engine_with_a_request_ends_with_a_signal(
    model_folder: Path, tmp_path: Path, free_port: int
) -> None:
    engine = make_engine(model_folder, free_port, log=tmp_path / "engine.log")
    engine.start()
    try:
        wait_until_ready(engine, lambda: check_vllm_health(free_port), timeout_s=120)
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{free_port}", timeout=20) as http,
            ThreadPoolExecutor(1) as pool,
        ):
            http.post("/pause", params={"mode": "keep"})
            held = pool.submit(http.post, "/v1/completions", json={"prompt": [9]})
            wait_until(lambda: re.search(r"num_requests_waiting.* 1", http.get("/metrics").text))
            os.kill(engine.pid, signal.SIGTERM)
            # Answered with an error, or disconnected; not kept until the client gives up.
            assert not isinstance(held.exception(), httpx.TimeoutException)
        wait_until(lambda: not engine.is_alive())
    finally:
        engine.stop()


def test_interrupted_command_ends_with_130_and_without_a_traceback(
    model_folder: Path, tmp_path: Path, free_port: int
) -> None:
    engine = make_engine(model_folder, free_port, log=tmp_path / "engine.log")
    with engine:
        wait_until_ready(engine, lambda: check_vllm_health(free_port), timeout_s=120)
        os.kill(engine.pid, signal.SIGINT)
        wait_until(lambda: not engine.is_alive())
        code = engine.returncode

    assert code == -signal.SIGINT  # how the guardian reports 130
    assert "Traceback" not in engine.log_path.read_text()


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_trainer_launches_and_updates_its_own_torch_engine(
    model_folder: Path, model: Any, tokenizer: Any, tmp_path: Path, mode: str
) -> None:
    import copy

    import torch

    port = find_free_port()
    config = tiny_config(
        tmp_path,
        model_name=str(model_folder),
        engine="torch",
        vllm_port=port,
        weight_bridge_mode=mode,
        max_model_len=256,
        log_dir=str(tmp_path),
    )
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(0.9)
    body = {"prompt": [9, 30, 31], "max_tokens": 8, "logprobs": 0, "return_token_ids": True}

    def choice() -> Any:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        return answer.json()["choices"][0]

    sync = make_weight_sync(config)
    assert sync is not None
    try:
        sync.check_before_load()
        sync.start(model, tokenizer, source=str(model_folder), step=2)
        before = choice()
        assert sync.returns_processed_logprobs()
        sync.before_step(sync_follows=True)
        sync.publish(trained, checkpoint=None, step=3)
        after = choice()
        sync.check_alive()
    finally:
        sync.close()

    for found, version, weights in ((before, "2", model), (after, "3", trained)):
        tokens = found["token_ids"]
        assert found["weight_versions"] == [{"version": version, "num_tokens": len(tokens)}]
        with torch.no_grad():
            logits = weights(torch.tensor([[9, 30, 31, *tokens]])).logits[0, 2:-1]
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert found["logprobs"]["token_logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert (tmp_path / "torch_engine.log").is_file()
