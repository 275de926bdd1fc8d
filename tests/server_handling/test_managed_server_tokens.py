"""Tracked sessions over HTTP: what is recorded equals what the engine read and sampled."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.fakes import CharTokenizer, ScriptedEngine, logprob_of

MakeServer = Callable[..., VLLMServer]
REPLIES = ["ok", "<think>a</think>b", "", "a\n\nb ", "</think>", "x" * 30]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(REPLIES) as running:
        yield running


def sampled_of(engine: ScriptedEngine) -> list[list[int]]:
    """Return the prompt ids of every request but the search for the route."""
    return [request.body["prompt"] for request in engine.requests[1:]]


@pytest.mark.parametrize("template_bos", [False, True])
@pytest.mark.parametrize("strips_thinking", [False, True])
async def test_conversations_are_one_sequence_of_the_engines_tokens(
    template_bos: bool, strips_thinking: bool, engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, VLLMServer)
    tokenizer = CharTokenizer(template_bos=template_bos, strips_thinking=strips_thinking)
    chance = random.Random(0)

    for _ in range(20):
        engine.requests.clear()
        engine.requests.append(None)  # type: ignore[arg-type]  # stands for the route search
        managed = ManagedServer(server, tokenizer)
        if server._token_route is None:
            await managed.completion(prompt="x")
            managed.reset()
            del engine.requests[1:]
        messages: list[dict[str, Any]] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"turn {turn}"})
            answer = await managed.chat_completion(
                messages=messages, max_tokens=chance.choice([1, 3, 100])
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})

        (node,) = managed.get_state()["nodes"]
        prompts = sampled_of(engine)
        assert all(ids.count(1) == 1 and ids[0] == 1 for ids in prompts)
        assert node.tokens[: len(prompts[-1])] == prompts[-1]
        for earlier, later in itertools.pairwise(prompts):
            assert later[: len(earlier)] == earlier
        assert "</s></s>" not in tokenizer.decode(node.tokens)
        for token, mask, logprob in zip(
            node.tokens, node.masked_tokens, node.logprobs, strict=True
        ):
            assert (mask, logprob == MASKED_LOGPROB) in ((IGNORE_INDEX, True), (token, False))


async def test_second_turn_sends_the_first_turns_tokens_and_the_end_once(
    make_server: MakeServer,
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        managed = ManagedServer(make_server(engine, VLLMServer))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        await managed.chat_completion(messages=messages)
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "b"}]

        await managed.chat_completion(messages=messages)

        (node,) = managed.get_state()["nodes"]
        text = "<s>[user]a</s>\n[assistant]ok</s>\n[user]b</s>\n[assistant]ok</s>"
        assert CharTokenizer().decode(node.tokens) == text
        trained = [token for token in node.masked_tokens if token != IGNORE_INDEX]
        assert trained == [111, 107, 2, 111, 107, 2]
        kept = [value for value in node.logprobs if value != MASKED_LOGPROB]
        assert kept == [logprob_of(token, t) for t, token in enumerate([111, 107, 2])] * 2


async def test_thinking_dropped_on_purpose_starts_a_new_sequence(make_server: MakeServer) -> None:
    async with ScriptedEngine(["<think>a</think>b"]) as engine:
        server = make_server(engine, VLLMServer)
        managed = ManagedServer(
            server, CharTokenizer(strips_thinking=True), strip_think_blocks=True
        )
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        answer = await managed.chat_completion(messages=messages, max_tokens=99)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "b"},
        ]

        await managed.chat_completion(messages=messages, max_tokens=99)

        assert len(managed.get_state()["nodes"]) == 2


async def test_concurrent_branches_of_one_node_are_all_kept(make_server: MakeServer) -> None:
    async with ScriptedEngine(["ok"], delay_s=0.005) as engine:
        managed = ManagedServer(make_server(engine, VLLMServer))
        await managed.completion(prompt="a")

        await asyncio.gather(*(managed.completion(prompt="aok" + c) for c in "xyz"))

        texts = [node.full_text for node in managed.get_state()["nodes"]]
        assert sorted(texts) == ["aokxok", "aokyok", "aokzok"]
        for node in managed.get_state()["nodes"]:
            assert node.masked_tokens.count(IGNORE_INDEX) == 3  # bos, "a" and the added letter


async def test_chat_without_a_limit_runs_to_the_end_of_the_reply(make_server: MakeServer) -> None:
    async with ScriptedEngine(["x" * 500]) as engine:
        managed = ManagedServer(make_server(engine, VLLMServer))

        answer = await managed.chat_completion(messages=[{"role": "user", "content": "a"}])

        assert answer.choices[0].message.content == "x" * 500
        assert answer.choices[0].finish_reason == "stop"


async def test_failed_request_leaves_no_sequence(make_server: MakeServer) -> None:
    async with ScriptedEngine(["ok"], max_model_len=5) as engine:
        managed = ManagedServer(make_server(engine, VLLMServer))

        with pytest.raises(Exception, match="context"):
            await managed.completion(prompt="far too long", max_tokens=4)

        assert managed.get_state()["nodes"] == []
