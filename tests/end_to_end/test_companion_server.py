"""The companion server with a real vLLM: exact tokens by `/generate`, wrong requests survived."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from tests.end_to_end.conftest import MAX_MODEL_LEN, EngineWithModel, serve_spread_out_model
from tests.end_to_end.test_vllm_exact_tokens import (
    TOLERANCE,
    assert_aligned,
    forward_logprobs,
    worst_difference,
)

pytestmark = pytest.mark.slow

DOOR = Path(__file__).parents[2] / "example_trainer" / "vllm_api_server.py"


@pytest.mark.long
def test_route_answers_with_vllms_own_types_over_any_engine(monkeypatch):
    pytest.importorskip("vllm")
    from fastapi.testclient import TestClient

    from example_trainer import vllm_api_server

    class Engine:
        async def generate(self, prompt, sampling_params, request_id):
            choice = SimpleNamespace(
                text=" world",
                finish_reason="stop",
                token_ids=[2],
                logprobs=[{2: SimpleNamespace(logprob=-0.25)}],
            )
            yield SimpleNamespace(prompt=prompt, prompt_token_ids=[1], outputs=[choice])

    monkeypatch.setattr(vllm_api_server, "engine", Engine())
    body = {"prompt": "hello", "max_tokens": 1, "temperature": 0.0, "logprobs": 1}

    answer = TestClient(vllm_api_server.app).post("/generate", json=body)

    assert answer.status_code == 200
    assert answer.json() == {
        "text": [" world"],
        "prompt": "hello",
        "finish_reasons": ["stop"],
        "logprobs": [[[{"2": -0.25}]]],
        "token_ids": [[2]],
        "prompt_token_ids": [1],
    }


@pytest.fixture(scope="module")
def companion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWithModel]:
    folder = tmp_path_factory.mktemp("companion_model")
    with serve_spread_out_model(folder, door=[str(DOOR)]) as engine:
        yield engine


@pytest.fixture
async def manager(companion: EngineWithModel) -> AsyncIterator[ServerManager]:
    config = APIServerConfig(
        base_url=companion.base_url,
        server_type="vllm",
        model_name=companion.model_name,
        tokenizer_name=str(companion.folder),
        health_check=False,
    )
    manager = ServerManager([config])
    yield manager
    await manager.close()


@pytest.mark.long
async def test_environments_get_exact_tokens_and_logprobs(companion, manager):
    async with manager.managed_server() as managed:
        answer = await managed.chat_completion(
            messages=[{"role": "user", "content": "What is 3 plus 1?"}], n=3, max_tokens=12
        )
        nodes = managed.get_state()["nodes"]

    assert len(answer.choices) == len(nodes) == 3
    for node in nodes:
        assert_aligned(node)
        assert worst_difference(companion.model, node) < TOLERANCE


@pytest.mark.long
async def test_prompt_logprobs_come_back(companion, manager):
    ids = companion.tokenizer.encode("What is 3 plus 1?")

    found = await manager.get_logprobs(input_ids=ids, top_k=1)

    expected = forward_logprobs(companion.model, ids)
    assert found["prompt_topk_token_ids"][0] == []
    for t, (choices, logprobs) in enumerate(
        zip(found["prompt_topk_token_ids"][1:], found["prompt_topk_logprobs"][1:], strict=True)
    ):
        assert logprobs == pytest.approx([expected[t][c] for c in choices], abs=TOLERANCE)


def post(companion: EngineWithModel, path: str, body: Any) -> httpx.Response:
    address = companion.base_url.removesuffix("/v1")
    return httpx.post(f"{address}{path}", json=body, timeout=60.0)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": {"prompt_token_ids": [1] * (MAX_MODEL_LEN + 5)}},
        {"prompt": {"prompt_token_ids": [10**9]}},
        {"prompt": "x", "top_k": "5"},
        {"prompt": "x", "seed": 1.5},
        {"prompt": "x", "stop_token_ids": ["a"]},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "logprobs": 10**6},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        {"prompt": "x", "no_such_parameter": 1},
    ],
    ids=lambda body: ",".join(body),
)
@pytest.mark.long
def test_wrong_request_is_refused_and_the_engine_lives_on(companion, body):
    refused = post(companion, "/generate", body)
    good = post(companion, "/generate", {"prompt": "x", "max_tokens": 2, "ignore_eos": True})

    assert refused.status_code == 400, refused.text
    assert refused.json()["detail"]
    assert good.status_code == 200


@pytest.mark.long
def test_paused_engine_writes_once_it_is_resumed(companion):
    post(companion, "/bridge/pause", None)
    address = companion.base_url.removesuffix("/v1")
    try:
        assert httpx.get(f"{address}/bridge/is_paused").json() == {"paused": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/generate", json={"prompt": "x", "max_tokens": 2}, timeout=2.0)
    finally:
        post(companion, "/bridge/resume", None)

    assert post(companion, "/generate", {"prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.mark.long
def test_adapters_need_the_engines_flag(companion, tmp_path):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    answer = post(companion, "/lora/load", {"adapter_path": str(tmp_path)})

    assert answer.status_code == 400
    assert "--enable-lora" in answer.json()["detail"]
