"""SGLang's real server on the CPU: its ids and logprobs against a forward pass of the same weights.

Set up and run by `tests/engines/sglang_stage.sh`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_baseline import VersionedTokens
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ContextOverflowError
from tests.end_to_end.conftest import MAX_MODEL_LEN, EngineWithModel, save_spread_out_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

TOLERANCE = 1e-3
START_TIMEOUT_S = 300.0
PYTHON_NAME = "ATROPOS_SGLANG_PYTHON"
LAUNCHER = Path(__file__).with_name("sglang_cpu_launch.py")


def _command(python: str, folder: Path, port: int) -> list[str]:
    command = [python, str(LAUNCHER), "--model-path", str(folder), "--served-model-name", "tiny"]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--attention-backend", "torch_native"]
    command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-radix-cache"]
    command += ["--disable-overlap-schedule", "--mem-fraction-static", "0.1"]
    return [*command, "--max-total-tokens", "4096", "--context-length", str(MAX_MODEL_LEN)]


@pytest.fixture(scope="session")
def sglang_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWithModel]:
    python = os.environ.get(PYTHON_NAME)
    if not python:
        pytest.skip("SGLang has no environment here; run tests/engines/sglang_stage.sh")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from example_trainer.processes import ManagedProcess, find_free_port, wait_until_ready

    folder = tmp_path_factory.mktemp("sglang_model")
    save_spread_out_model(folder)
    port = find_free_port()
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "OMP_NUM_THREADS": "1",
    }
    engine = ManagedProcess(
        "SGLang", _command(python, folder, port), log_path=folder / "sglang.log", env=environment
    )

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
            tokenizer=AutoTokenizer.from_pretrained(folder),
            model=AutoModelForCausalLM.from_pretrained(folder).eval(),
        )


@pytest.fixture
async def manager(sglang_engine: EngineWithModel) -> AsyncIterator[ServerManager]:
    config = APIServerConfig(
        base_url=sglang_engine.base_url,
        server_type="sglang",
        model_name=sglang_engine.model_name,
        tokenizer_name=str(sglang_engine.folder),
        timeout=120,
    )
    manager = ServerManager([config])
    yield manager
    await manager.close()


def forward_logprobs(model: Any, ids: list[int]) -> Any:
    """Return (L, V) log-probabilities of what follows each token."""
    import torch

    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
async def test_ids_and_logprobs_are_those_of_the_model(
    temperature: float, sglang_engine: EngineWithModel, manager: ServerManager
) -> None:
    answer = await manager.tokens_and_logprobs_completion(
        prompt="What is 3 plus", n=4, max_tokens=12, temperature=temperature
    )

    prompt_ids, rows, logprobs, reasons = answer
    assert prompt_ids == sglang_engine.tokenizer.encode("What is 3 plus")
    assert len(rows) == len(reasons) == 4
    for row, values in zip(rows, logprobs, strict=True):
        expected = forward_logprobs(sglang_engine.model, [*prompt_ids, *row])
        for t, (token, value) in enumerate(zip(row, values, strict=True)):
            assert abs(float(expected[len(prompt_ids) + t - 1, token]) - value) < TOLERANCE


async def test_three_turns_stay_one_sequence_of_the_engines_tokens(
    sglang_engine: EngineWithModel, manager: ServerManager
) -> None:
    async with manager.managed_server() as session:
        messages = [{"role": "user", "content": "What is 3 plus 1?"}]
        for _ in range(3):
            chat = await session.chat_completion(messages=messages, max_tokens=15)
            reply = chat.choices[0].message.content
            messages += [{"role": "assistant", "content": reply}]
            messages += [{"role": "user", "content": "and 2?"}]
        nodes = session.get_state()["nodes"]

    assert len(nodes) == 1
    expected = forward_logprobs(sglang_engine.model, nodes[0].tokens)
    sampled = [t for t, token in enumerate(nodes[0].masked_tokens) if token != -100]
    assert len(sampled) >= 3
    for t in sampled:
        difference = float(expected[t - 1, nodes[0].tokens[t]]) - nodes[0].logprobs[t]
        assert abs(difference) < TOLERANCE


@pytest.mark.parametrize("top_k", [0, 1, 5])
async def test_teacher_candidates_are_the_models_likeliest(
    top_k: int, sglang_engine: EngineWithModel, manager: ServerManager
) -> None:
    rows = await manager.get_logprobs(prompt="What is 3 plus 1?", top_k=top_k)

    ids = rows["prompt_tokens"]
    expected = forward_logprobs(sglang_engine.model, ids)
    assert rows["prompt_topk_token_ids"][0] == []
    for t in range(1, len(ids)):
        candidates = rows["prompt_topk_token_ids"][t]
        likeliest = expected[t - 1].topk(top_k).indices.tolist()
        assert candidates[0] == ids[t]
        assert set(candidates) == {ids[t], *likeliest}
        for token, value in zip(candidates, rows["prompt_topk_logprobs"][t], strict=True):
            assert abs(float(expected[t - 1, token]) - value) < TOLERANCE


async def test_version_of_the_weights_comes_with_the_tokens(
    sglang_engine: EngineWithModel, manager: ServerManager
) -> None:
    root = sglang_engine.base_url.removesuffix("/v1")
    body = {"model_path": str(sglang_engine.folder), "weight_version": "7"}
    async with httpx.AsyncClient(timeout=60) as client:
        updated = await client.post(f"{root}/update_weights_from_disk", json=body)

    answer = await manager.tokens_and_logprobs_completion(prompt="What", n=2, max_tokens=3)

    assert updated.json()["success"]
    assert isinstance(answer, VersionedTokens)
    assert answer.weight_versions == ["7", "7"]


async def test_prompt_over_the_context_is_typed(manager: ServerManager) -> None:
    with pytest.raises(ContextOverflowError) as caught:
        await manager.tokens_and_logprobs_completion(
            input_ids=[5] * (MAX_MODEL_LEN + 44), max_tokens=1
        )

    assert caught.value.prompt_tokens == MAX_MODEL_LEN + 44
    assert caught.value.context_tokens == MAX_MODEL_LEN
