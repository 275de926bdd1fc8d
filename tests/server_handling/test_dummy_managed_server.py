from __future__ import annotations

import pytest

from atroposlib.envs.server_handling.managed_server import (
    DummyManagedServer,
    ManagedServerAdapter,
)
from atroposlib.envs.server_handling.server_harness import (
    ServerHarness,
    create_chat_completion,
    create_completion,
)

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


@pytest.fixture
def harness() -> ServerHarness:
    harness = ServerHarness()
    harness.set_desired_response(MESSAGES, create_chat_completion(["a", "b"], n=2))
    harness.set_desired_completion("p", create_completion("c", finish_reason="length"))
    return harness


async def test_answers_are_the_servers_and_tokens_are_placeholders(harness: ServerHarness) -> None:
    session = DummyManagedServer(harness)

    chat = await session.chat_completion(messages=MESSAGES, n=2)
    await session.completion(prompt="p")
    nodes = session.get_state()["nodes"]

    assert [choice.message.content for choice in chat.choices] == ["a", "b"]
    assert [node.full_text for node in nodes] == [
        "system:be kind\n\nuser:hi\n\nassistant:a",
        "system:be kind\n\nuser:hi\n\nassistant:b",
        "pc",
    ]
    for node in nodes:
        assert node.tokens == list(range(128))
        assert node.masked_tokens == [-100, *range(1, 128)]
        assert node.logprobs == [-0.5] * 128
    assert nodes[2].metadata == {"finish_reason": "length", "dummy_tokens": True}


async def test_message_without_content_leaves_its_place_empty(harness: ServerHarness) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [MESSAGES[1], {"role": "assistant", "tool_calls": [call]}]
    harness.response_map = {"": create_chat_completion("a")}
    harness.conv_to_dictkey = lambda _: ""  # type: ignore[method-assign]
    session = DummyManagedServer(harness)

    await session.chat_completion(messages=messages)

    assert session.current_nodes[0].full_text == "user:hi\n\nassistant:\n\nassistant:a"


async def test_messages_may_be_objects_of_the_client(harness: ServerHarness) -> None:
    harness.response_map = {"": create_chat_completion(["a", "b"])}
    harness.conv_to_dictkey = lambda _: ""  # type: ignore[method-assign]
    session = DummyManagedServer(harness)
    first = await session.chat_completion(messages=MESSAGES)

    parts = [{"type": "text", "text": "and"}, {"type": "text", "text": " now?"}]
    said = [first.choices[0].message, {"role": "user", "content": parts}]
    await session.chat_completion(messages=[MESSAGES[1], *said])

    assert session.current_nodes[-1].full_text == (
        "user:hi\n\nassistant:a\n\nuser:and now?\n\nassistant:a"
    )


async def test_reset_empties_and_state_of_before_stays(harness: ServerHarness) -> None:
    session = DummyManagedServer(harness)
    await session.completion(prompt="p")
    before = session.get_state()

    session.reset()

    assert session.get_state() == {"nodes": []}
    assert len(before["nodes"]) == 1


async def test_tree_state_is_keyed_by_text(harness: ServerHarness) -> None:
    session = DummyManagedServer(harness, track_tree=True)
    await session.completion(prompt="p")

    assert list(session.get_state()["sequences"]) == ["pc"]


async def test_prompt_logprobs_do_not_exist(harness: ServerHarness) -> None:
    with pytest.raises(NotImplementedError, match="get_logprobs"):
        await DummyManagedServer(harness).get_logprobs(prompt="p")


async def test_adapter_has_the_shape_of_an_openai_client(harness: ServerHarness) -> None:
    client = ManagedServerAdapter(DummyManagedServer(harness), "http://a/v1")

    chat = await client.chat.completions.create(messages=MESSAGES)
    text = await client.completions.create(prompt="p")

    assert client.base_url == "http://a/v1"
    assert chat.choices[0].message.content == "a"
    assert text.choices[0].text == "c"
    with pytest.raises(NotImplementedError):
        await client.post("/x", body={}, cast_to=dict)
    with pytest.raises(NotImplementedError):
        client.copy(timeout=3)
