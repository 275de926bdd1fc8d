"""Torch engines in this process, one per module of tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import MAX_MODEL_LEN, EngineWithModel, save_spread_out_model


@dataclass(frozen=True)
class LocalEngine:
    """A torch engine that serves in a thread."""

    url: str
    """Without `/v1`."""
    state: Any
    """The `EngineState` of its routes."""
    http: httpx.Client

    @property
    def engine(self) -> Any:
        return self.state.engine

    @property
    def tokenizer(self) -> Any:
        """The one that the routes use."""
        return self.state.served.tokenizer

    def complete(self, prompt: Any, **options: Any) -> Any:
        """Return the answer to a text completion with the ids and logprobs of its tokens."""
        body = {"prompt": prompt, "return_token_ids": True, "logprobs": 0, **options}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def wait_until(condition: Callable[[], object], *, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


@contextmanager
def serve_locally(folder: Path, **options: Any) -> Iterator[LocalEngine]:
    """Serve the model of a folder under the name `tiny`."""
    import uvicorn

    from example_trainer.processes import find_free_port
    from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine
    from example_trainer.torch_engine.server import create_app

    state = load_engine(
        TorchEngineOptions(
            **{"model": str(folder), "served_model_name": "tiny", "device": "cpu",
               "max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 2**28, **options}
        )
    )  # fmt: skip
    port = find_free_port()
    app = create_app(state, has_update_routes=True)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            yield LocalEngine(url, state, http)
    finally:
        server.should_exit = True
        thread.join()
        state.engine.close()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model whose distributions are far from uniform."""
    folder = tmp_path_factory.mktemp("tiny_model")
    save_spread_out_model(folder)
    return folder


@pytest.fixture(scope="module")
def torch_engine(model_folder: Path) -> Iterator[LocalEngine]:
    with serve_locally(model_folder) as local:
        yield local


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    """The served weights, with the attention of transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def vllm_engine(
    torch_engine: LocalEngine, model_folder: Path, model: Any, tokenizer: Any
) -> EngineWithModel:
    """The torch engine under the name of the fixture that tests of vLLM use."""
    return EngineWithModel(
        base_url=f"{torch_engine.url}/v1",
        model_name="tiny",
        folder=model_folder,
        tokenizer=tokenizer,
        model=model,
    )
