"""Server type `trl` in front of the server that `trl vllm-serve` starts, which is vLLM's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from tests.end_to_end.conftest import EngineWithModel
from tests.end_to_end.test_vllm_exact_tokens import TOLERANCE, worst_difference

pytestmark = pytest.mark.slow


@pytest.fixture
async def manager(vllm_engine: EngineWithModel) -> AsyncIterator[ServerManager]:
    config = APIServerConfig(
        base_url=vllm_engine.base_url.removesuffix("/v1"),
        server_type="trl",
        model_name=vllm_engine.model_name,
        tokenizer_name=str(vllm_engine.folder),
    )
    manager = ServerManager([config])
    yield manager
    await manager.close()


async def test_chat_text_tokens_and_prompt_logprobs_come_from_the_vllm_inside(
    vllm_engine: EngineWithModel, manager: ServerManager
) -> None:
    messages = [{"role": "user", "content": "What is 3 plus 1?"}]

    chat = await manager.chat_completion(messages=messages, n=2, max_tokens=5)
    text = await manager.completion(prompt="What is", max_tokens=5)
    rows = await manager.get_logprobs(prompt="What is", top_k=2)
    async with manager.managed_server() as session:
        await session.chat_completion(messages=messages, n=2, max_tokens=12)
        nodes = session.get_state()["nodes"]

    assert (len(chat.choices), len(text.choices)) == (2, 1)
    assert len(rows["prompt_topk_token_ids"]) == len(rows["prompt_tokens"])
    assert len(nodes) == 2
    assert all(worst_difference(vllm_engine.model, node) < TOLERANCE for node in nodes)
