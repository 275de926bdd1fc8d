"""A tool-using agent at the proxy in front of a real engine leaves the engine's own tokens."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.proxy import AgentProxy
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.scored_data import IGNORE_INDEX
from tests.end_to_end.conftest import EngineWithModel, RecordingServer
from tests.end_to_end.test_vllm_exact_tokens import TOLERANCE, assert_aligned, worst_difference

pytestmark = pytest.mark.slow

TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# An untrained model calls nothing by itself, so its first turns may only be calls.
ONE_CALL = r'<tool_call>\{"name": "f", ?"arguments": \{"a": [0-9]\}\}</tool_call>'


async def run_agent(client: openai.AsyncOpenAI) -> list[Any]:
    """Call the tool twice, then answer; return the messages."""
    messages: list[Any] = [{"role": "user", "content": "What is 3 plus 1?"}]
    for must_call in (True, True, False):
        bound = {"extra_body": {"structured_outputs": {"regex": ONE_CALL}}} if must_call else {}
        answer = await client.chat.completions.create(
            model="any",
            messages=messages,
            tools=[TOOL],
            max_tokens=80 if must_call else 12,
            temperature=1.0,
            **bound,  # type: ignore[arg-type]
        )
        message: Any = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            number = json.loads(call.function.arguments)["a"]
            result = {"role": "tool", "tool_call_id": call.id, "content": str(number + 1)}
            messages.append(result)
    return messages


async def test_three_turns_with_tools_are_the_engines_own_tokens(
    vllm_engine: EngineWithModel,
) -> None:
    config = APIServerConfig(
        base_url=vllm_engine.base_url,
        server_type="vllm",
        model_name=vllm_engine.model_name,
        tokenizer_name=str(vllm_engine.folder),
    )
    manager = ServerManager([config], server_class=RecordingServer)
    try:
        async with (
            AgentProxy(manager, vllm_engine.tokenizer) as proxy,
            proxy.session() as agent,
            openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client,
        ):
            messages = await run_agent(client)
            (node,) = agent.nodes()
    finally:
        await manager.close()

    assert [m["role"] for m in messages if isinstance(m, dict)] == ["user", "tool", "tool"]
    answers = manager.servers[0].answers
    prompt_ids, [last_ids], _, _ = answers[-1]
    assert node.tokens == [*prompt_ids, *last_ids]
    read_so_far: list[int] = []
    sampled: list[int] = []
    for ids, [completion], _, _ in answers:
        assert ids[: len(read_so_far)] == read_so_far
        read_so_far = [*ids, *completion]
        sampled += completion
    assert [mask for mask in node.masked_tokens if mask != IGNORE_INDEX] == sampled
    assert_aligned(node)
    # The grammar of the first two turns changed the distribution that their logprobs describe.
    free_turn = [IGNORE_INDEX] * len(prompt_ids) + last_ids
    unconstrained = node.model_copy(update={"masked_tokens": free_turn})
    assert worst_difference(vllm_engine.model, unconstrained) < TOLERANCE
