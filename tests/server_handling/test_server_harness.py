from __future__ import annotations

import pytest

from atroposlib.envs.server_handling.server_harness import (
    ServerHarness,
    create_chat_completion,
    create_completion,
)
from atroposlib.envs.server_handling.server_manager import ServerManager

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


def test_answers_are_built_with_fixed_heads() -> None:
    chat = create_chat_completion(["a", "b"], n=2, finish_reason=["stop", "length"])
    text = create_completion("a", n=3)

    assert (chat.id, chat.created, chat.model, chat.usage) == ("test_id", 0, "test_model", None)
    assert [(c.index, c.message.role, c.message.content) for c in chat.choices] == [
        (0, "assistant", "a"),
        (1, "assistant", "b"),
    ]
    assert [choice.finish_reason for choice in chat.choices] == ["stop", "length"]
    assert [choice.text for choice in text.choices] == ["a", "a", "a"]


async def test_set_answers_come_back_by_key() -> None:
    harness = ServerHarness()
    chat, text = create_chat_completion("x"), create_completion("y")
    harness.set_desired_response(MESSAGES, chat)
    harness.set_desired_completion("p", text)
    harness.set_tokens_and_logprobs_response("p", [1], [[2]], [[-0.5]], ["stop"])

    assert (
        harness.conv_to_dictkey(MESSAGES) == "role:system\ncontent:be kind\nrole:user\ncontent:hi"
    )
    assert await harness.chat_completion(messages=MESSAGES, n=4, split="eval") is chat
    assert await harness.completion(prompt="p", max_tokens=3) is text
    answer = await harness.tokens_and_logprobs_completion(prompt="p", input_ids=[1])
    assert answer == ([1], [[2]], [[-0.5]], ["stop"])


async def test_unknown_key_is_an_error_that_names_it() -> None:
    harness = ServerHarness()

    with pytest.raises(KeyError, match="role:user"):
        await harness.chat_completion(messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(KeyError, match=r"has no preset answer.*unknown prompt"):
        await harness.completion(prompt="unknown prompt")
    with pytest.raises(KeyError, match="unknown prompt"):
        await harness.tokens_and_logprobs_completion(prompt="unknown prompt")


async def test_testing_manager_routes_to_a_working_harness() -> None:
    manager = ServerManager([], testing=True)
    harness = manager.servers[0]
    answer = create_chat_completion("x")
    harness.set_desired_response(MESSAGES, answer)

    assert await manager.chat_completion(messages=MESSAGES) is answer
    await manager.update_weight(0.5)
    assert await harness.wandb_metrics({"a": 1}, "server_0") == {"a": 1}
    async with manager.dedicated_server() as server:
        assert server is harness
    await manager.close()


def test_prompt_logprobs_exist_only_once_assigned() -> None:
    assert not hasattr(ServerHarness(), "get_logprobs")
