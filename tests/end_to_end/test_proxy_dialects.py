"""Agents of the official clients in front of a real vLLM: exact tokens through either dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.end_to_end.conftest import EngineWithModel

pytestmark = pytest.mark.slow

# An untrained model calls no tools, so the engine is told what each turn must look like. Its
# logprobs are then those among the tokens the form allows, not those of a forward pass.
CALL = r'<tool_call>\{"name":  ?"f","arguments":\{"a" ?: ?[0-9]\}\}</tool_call>'
TURNS = [CALL, f"[a-z]{{1,3}}{CALL}", "<think>[a-z]{1,3}</think> ?[a-z]{1,6}"]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
MAX_TOKENS = 62

Sampled = tuple[list[int], list[int], list[float]]


async def run_anthropic_agent(agent: AgentSession) -> None:
    client = anthropic.AsyncAnthropic(base_url=agent.anthropic_base_url, api_key=agent.api_key)
    messages: list[Any] = [{"role": "user", "content": "Go"}]
    while True:
        async with client.messages.stream(
            model="claude",
            max_tokens=MAX_TOKENS,
            messages=messages,
            tools=[{"name": "f", "input_schema": PARAMETERS}],
            thinking={"type": "adaptive"},
        ) as events:
            reply: Any = await events.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            return
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"])}
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


async def run_responses_agent(agent: AgentSession) -> None:
    client = openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key)
    history: list[Any] = [{"role": "user", "content": "Go"}]
    tool: Any = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}
    while True:
        async with client.responses.stream(
            model="gpt-5",
            max_output_tokens=MAX_TOKENS,
            input=history,
            tools=[tool],
            reasoning={"effort": "low"},
        ) as events:
            response = await events.get_final_response()
        history += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return
        for call in calls:
            output = str(json.loads(call.arguments)["a"])
            history.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )


@pytest.fixture
async def manager(vllm_engine: EngineWithModel) -> AsyncIterator[ServerManager]:
    config = APIServerConfig(
        base_url=vllm_engine.base_url,
        server_type="vllm",
        model_name=vllm_engine.model_name,
        tokenizer_name=str(vllm_engine.folder),
    )
    manager = ServerManager([config])
    yield manager
    await manager.close()


def record_samples(manager: ServerManager) -> list[Sampled]:
    """Let the turns have their form, and return what the engine reports of each."""
    [server] = manager.servers
    sample: Callable[..., Awaitable[Any]] = server.tokens_and_logprobs_completion
    samples: list[Sampled] = []

    async def recorded(**kwargs: Any) -> Any:
        form = {"structured_outputs": {"regex": TURNS[len(samples)]}}
        answer = await sample(**kwargs, **form)
        samples.append((answer[0], answer[1][0], answer[2][0]))
        return answer

    server.tokens_and_logprobs_completion = recorded
    return samples


@pytest.mark.parametrize("run_agent", [run_anthropic_agent, run_responses_agent])
async def test_tool_loop_is_one_sequence_of_the_engines_own_tokens(
    run_agent: Callable[[AgentSession], Awaitable[None]],
    vllm_engine: EngineWithModel,
    manager: ServerManager,
) -> None:
    samples = record_samples(manager)

    async with AgentProxy(manager, vllm_engine.tokenizer) as proxy, proxy.session() as agent:
        await run_agent(agent)
        [node] = agent.nodes()

    assert len(samples) == len(TURNS)
    masks: list[int] = []
    logprobs: list[float] = []
    for prompt_ids, completion_ids, values in samples:
        num_new = len(prompt_ids) - len(masks)
        masks += [IGNORE_INDEX] * num_new + completion_ids
        logprobs += [MASKED_LOGPROB] * num_new + values
        assert node.tokens[: len(masks)] == prompt_ids + completion_ids
    assert (node.masked_tokens, node.logprobs) == (masks, logprobs)


async def test_required_tool_is_called_and_its_tokens_are_the_engines(
    vllm_engine: EngineWithModel, manager: ServerManager
) -> None:
    # An untrained model would call nothing: only the engine's form of the reply makes it. The form
    # lets a model think first, which this one never ends; of many replies some call at once.
    schema = {**PARAMETERS, "properties": {"a": {"type": "integer", "enum": [1, 2]}}}
    function = {"name": "f", "parameters": {**schema, "additionalProperties": False}}
    tool: Any = {"type": "function", "function": {**function, "strict": True}}
    messages: Any = [{"role": "user", "content": "Go"}]
    async with (
        AgentProxy(manager, vllm_engine.tokenizer) as proxy,
        proxy.session() as agent,
        openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client,
    ):
        answer = await client.chat.completions.with_raw_response.create(
            model="m",
            messages=messages,
            tools=[tool],
            tool_choice="required",
            max_tokens=128,
            parallel_tool_calls=False,
            n=24,
            seed=1,
        )
        choices = answer.parse().choices
        nodes = agent.nodes()

    assert "x-atropos-ignored" not in answer.headers
    calling = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert calling
    for choice in calling:
        [call] = choice.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "f"
        assert json.loads(call.function.arguments) in ({}, {"a": 1}, {"a": 2})
    texts = []
    for node in nodes:
        sampled = [token for token in node.masked_tokens if token != IGNORE_INDEX]
        texts.append(str(vllm_engine.tokenizer.decode(sampled)))
    begun = '<tool_call>{"name": "f", "arguments": {'
    assert [t for t in texts if not t.startswith((begun, "<think>"))] == []
