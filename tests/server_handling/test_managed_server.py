"""Tracked sessions in front of a harness whose tokens are code points."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.server_harness import ServerHarness

USER: dict[str, Any] = {"role": "user", "content": "Hello"}


class CodePointTokenizer:
    """Encodes to bos (1) and code points; decoding drops control characters always."""

    eos_token_id, bos_token_id = 2, 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in tokens if token > 31)

    def apply_chat_template(
        self, messages: Any, tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        text = "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages)
        return text + "<assistant>" * add_generation_prompt


@pytest.fixture
def harness() -> ServerHarness:
    harness = ServerHarness()
    harness.tokenizer = CodePointTokenizer()  # type: ignore[attr-defined]
    harness.config = SimpleNamespace(model_name="test_model")
    return harness


@pytest.fixture
def managed(harness: ServerHarness) -> ManagedServer:
    return ManagedServer(harness)


def preset(
    harness: ServerHarness,
    prompt: str,
    *outputs: str,
    reasons: list[Any] | None = None,
    prompt_tokens: list[int] | None = None,
) -> None:
    """Answer `prompt` with these texts, every token at logprob -0.1."""
    encode = CodePointTokenizer().encode
    ids = [encode(output, add_special_tokens=False) for output in outputs]
    harness.set_tokens_and_logprobs_response(
        prompt=prompt,
        prompt_tokens=encode(prompt) if prompt_tokens is None else prompt_tokens,
        output_tokens_list=ids,
        output_logprobs_list=[[-0.1] * len(row) for row in ids],
        finish_reasons=reasons or ["stop"] * len(outputs),
    )


def nodes_of(managed: ManagedServer) -> list[SequenceNode]:
    nodes: list[SequenceNode] = managed.get_state()["nodes"]
    return nodes


async def test_completion_is_tracked_with_masks_and_logprobs(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, "Hello", " World")

    answer = await managed.completion(prompt="Hello")

    assert answer.choices[0].text == " World"
    assert answer.choices[0].finish_reason == "stop"
    (node,) = nodes_of(managed)
    assert node.full_text == "Hello World"
    assert node.tokens == [1, *map(ord, "Hello World")]
    assert node.masked_tokens == [-100] * 6 + [ord(c) for c in " World"]
    assert node.logprobs == [1.0] * 6 + [-0.1] * 6
    assert node.metadata == {"finish_reason": "stop"}


async def test_chat_is_tracked_behind_its_rendered_prompt(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    prompt = managed._convert_messages_to_prompt([USER])
    preset(harness, prompt, "Hi there")

    answer = await managed.chat_completion(messages=[USER], max_tokens=9)

    assert prompt == "<user>Hello</user><assistant>"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hi there"
    assert (answer.model, answer.usage) == ("test_model", None)
    (node,) = nodes_of(managed)
    assert node.masked_tokens[: len(prompt) + 1] == [-100] * (len(prompt) + 1)


class UserDefinedServer:
    """A server of a user, which reads a limit as a number; keeps the options it received."""

    config = SimpleNamespace(model_name="test_model")
    tokenizer = CodePointTokenizer()

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[Any, ...]:
        self.options = kwargs
        num_tokens = min(2, kwargs.get("max_tokens", 512))
        return kwargs["input_ids"], [[72] * num_tokens], [[-0.1] * num_tokens], ["stop"]


async def test_user_defined_server_gets_no_limit_that_the_caller_did_not_give() -> None:
    server = UserDefinedServer()
    managed = ManagedServer(server)

    answer = await managed.chat_completion(messages=[USER], temperature=0.5, split="eval")

    assert answer.choices[0].message.content == "HH"
    assert server.options.keys() == {"prompt", "input_ids", "model", "temperature", "split"}


async def test_prompt_equal_to_a_text_continues_it(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, "Hello", " World")
    preset(harness, "Hello World", "!")
    await managed.completion(prompt="Hello")

    await managed.completion(prompt="Hello World")

    (node,) = nodes_of(managed)
    assert node.full_text == "Hello World!"
    assert node.tokens == [1, *map(ord, "Hello World!")]
    # Earlier turns stay trainable in completions as in chats.
    assert node.masked_tokens == [-100] * 6 + [ord(c) for c in " World!"]


async def test_several_completions_become_several_nodes(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, "Hello", " World", " There", " Friend")

    answer = await managed.completion(prompt="Hello", n=3)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [node.full_text for node in nodes_of(managed)]
    assert texts == ["Hello World", "Hello There", "Hello Friend"]
    assert all(
        node.tokens.index(1) == 0 and node.tokens.count(1) == 1 for node in nodes_of(managed)
    )


async def test_added_text_is_encoded_without_a_new_bos(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, "Hello", " World")
    await managed.completion(prompt="Hello")
    first = managed.current_nodes[0]
    sent: dict[str, Any] = {}
    preset(harness, "Hello World!", " How")
    call = harness.tokens_and_logprobs_completion

    async def recording(**kwargs: Any) -> Any:
        sent.update(kwargs)
        return await call(**kwargs)

    harness.tokens_and_logprobs_completion = recording  # type: ignore[method-assign]
    await managed.completion(prompt="Hello World!", n=1, temperature=0.5, split="eval")

    assert sent == {
        "prompt": "Hello World!",
        "input_ids": [*first.tokens, ord("!")],
        "model": "test_model",
        "n": 1,
        "temperature": 0.5,
        "split": "eval",
    }
    (node,) = nodes_of(managed)
    assert node.tokens == [*first.tokens, ord("!"), *map(ord, " How")]


async def test_branches_continue_in_place_and_new_prompts_append(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    first_turn = [USER]
    preset(
        harness,
        managed._convert_messages_to_prompt(first_turn),
        *[f"Response{i}" for i in range(8)],
    )
    first = await managed.chat_completion(messages=first_turn, n=8)
    assert len(nodes_of(managed)) == 8

    conversations = []
    for i, choice in enumerate(first.choices):
        messages: list[dict[str, Any]] = [
            USER,
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": "go on"},
        ]
        preset(harness, managed._convert_messages_to_prompt(messages), f"Continued{i}")
        # The text of a node ends with the reply, the template closes the turn behind it.
        await managed.chat_completion(messages=messages)
        conversations.append([*messages, {"role": "assistant", "content": f"Continued{i}"}])
    assert len(nodes_of(managed)) == 8
    for i, node in enumerate(nodes_of(managed)):
        assert f"Response{i}" in node.full_text
        assert f"Continued{i}" in node.full_text

    system: dict[str, Any] = {"role": "system", "content": "Helpful"}
    for i, conversation in enumerate(conversations):
        messages = [system, *conversation, {"role": "user", "content": "more"}]
        preset(harness, managed._convert_messages_to_prompt(messages), f"More{i}")
        await managed.chat_completion(messages=messages)

    nodes = nodes_of(managed)
    assert len(nodes) == 16
    for i, node in enumerate(nodes[8:]):
        for part in ("Helpful", f"Response{i}", f"Continued{i}", f"More{i}"):
            assert part in node.full_text
    assert all("Helpful" not in node.full_text for node in nodes[:8])


async def test_later_completions_of_a_continued_node_are_appended(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, "A", "b")
    preset(harness, "Ab", "c", "d")
    await managed.completion(prompt="A")

    await managed.completion(prompt="Ab", n=2)

    assert [node.full_text for node in nodes_of(managed)] == ["Abc", "Abd"]
    assert [node.masked_tokens for node in nodes_of(managed)] == [
        [-100, -100, ord("b"), ord("c")],
        [-100, -100, ord("b"), ord("d")],
    ]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ({"type": "length"}, "length"),
        (None, "stop"),
        ("tool_calls", "stop"),
        ("odd", "stop"),
    ],
)
async def test_finish_reasons_are_mapped_to_what_the_types_know(
    reason: Any, expected: str, harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, "A", "b", reasons=[reason])

    answer = await managed.completion(prompt="A")

    assert answer.choices[0].finish_reason == expected
    assert nodes_of(managed)[0].metadata == {"finish_reason": expected}


async def test_state_is_the_callers_own_and_reset_empties(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, "A", "b")
    await managed.completion(prompt="A")
    state = managed.get_state()

    managed.reset()

    assert len(state["nodes"]) == 1
    assert nodes_of(managed) == []


async def test_tools_without_a_parser_are_dropped(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, managed._convert_messages_to_prompt([USER]), "<tool_call>{}</tool_call>")

    answer = await managed.chat_completion(messages=[USER], tools=[{}], tool_choice="auto")

    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == "<tool_call>{}</tool_call>"
    assert answer.choices[0].finish_reason == "stop"


async def test_prompt_logprobs_are_passed_through(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    seen: list[dict[str, Any]] = []
    rows = {"prompt_tokens": [1], "prompt_topk_token_ids": [[1]], "prompt_topk_logprobs": [[-0.1]]}

    async def get_logprobs(**kwargs: Any) -> dict[str, Any]:
        seen.append(kwargs)
        return rows

    harness.get_logprobs = get_logprobs  # type: ignore[attr-defined]
    assert await managed.get_logprobs(prompt="Hello", n=1) == rows
    await managed.get_logprobs(messages=[USER], top_k=1)
    await managed.get_logprobs(input_ids=[10, 20, 30], top_k=1)

    assert seen == [
        {"prompt": "Hello", "n": 1},
        {"prompt": "<user>Hello</user><assistant>", "top_k": 1},
        {"input_ids": [10, 20, 30], "top_k": 1},
    ]


async def test_server_without_prompt_logprobs_is_named(managed: ManagedServer) -> None:
    with pytest.raises(NotImplementedError, match="does not implement get_logprobs"):
        await managed.get_logprobs(prompt="Hello")


async def test_tree_mode_keeps_every_sequence_by_its_text(harness: ServerHarness) -> None:
    managed = ManagedServer(harness, track_tree=True)
    preset(harness, "A", "b", "c")
    preset(harness, "Ab", "d")
    await managed.completion(prompt="A", n=2)

    await managed.completion(prompt="Ab")

    state = managed.get_state()
    assert list(state["sequences"]) == ["Ab", "Ac", "Abd"]
    assert state["sequences"]["Abd"].masked_tokens == [-100, -100, ord("b"), ord("d")]
    assert state["tree"] == state["sequences"]
    managed.reset()
    assert managed.get_state() == {"sequences": {}, "tree": {}}


async def test_tokenizer_is_the_argument_then_the_servers(harness: ServerHarness) -> None:
    own = CodePointTokenizer()

    assert ManagedServer(harness, own).tokenizer is own
    assert ManagedServer(harness).tokenizer is harness.tokenizer  # type: ignore[attr-defined]


async def test_without_any_tokenizer_texts_are_sent_and_read_as_code_points(
    harness: ServerHarness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(name: str) -> Any:
        raise OSError(f"{name} is not a model")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    harness.tokenizer = None  # type: ignore[attr-defined]
    managed = ManagedServer(harness)
    preset(harness, "user: Hello", "ok\n")

    answer = await managed.chat_completion(messages=[USER])

    assert "no tokenizer for 'test_model'" in caplog.text
    assert answer.choices[0].message.content == "ok"


async def test_requests_are_logged_when_asked(
    harness: ServerHarness,
    managed: ManagedServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    preset(harness, "A", "b")
    await managed.completion(prompt="A")
    assert "request to" not in caplog.text

    monkeypatch.setenv("ATROPOS_DEBUG_REQUESTS", "1")
    await managed.completion(prompt="A")

    assert "request to test_model" in caplog.text
