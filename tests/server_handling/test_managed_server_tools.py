"""Tracked sessions whose turns call tools: structured answers, raw text in the sequences."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.tool_formats import FunctionCall, registry
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.fakes import CharTokenizer, ScriptedEngine
from tests.server_handling.conftest import MakeServer
from tests.server_handling.tool_call_samples import HERMES_CALL, SEARCH, as_tool_calls

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]"]

USER: dict[str, Any] = {"role": "user", "content": "find cats"}
TOOLS = [SEARCH]


class MarkTokenizer(CharTokenizer):
    """Has the marks of tool calls as special tokens, ids 300 and up."""

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        for i, mark in enumerate(MARKS):
            text = text.replace(mark, chr(300 + i))
        return super().encode(text, add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        text = super().decode(token_ids, skip_special_tokens)
        for i, mark in enumerate(MARKS):
            text = text.replace(chr(300 + i), "" if skip_special_tokens else mark)
        return text


@pytest.fixture
def harness() -> ServerHarness:
    harness = ServerHarness()
    harness.tokenizer = CharTokenizer()  # type: ignore[attr-defined]
    harness.config = SimpleNamespace(model_name="test_model")
    return harness


@pytest.fixture
def managed(harness: ServerHarness) -> ManagedServer:
    return ManagedServer(harness, tool_parser="hermes")


def preset(
    harness: ServerHarness,
    managed: ManagedServer,
    messages: list[Any],
    *outputs: str,
    reason: str = "stop",
) -> None:
    """Answer a chat with these texts, each with its end-of-turn token unless cut by length."""
    prompt = managed._convert_messages_to_prompt(messages, TOOLS)
    end = [] if reason == "length" else [2]
    ids = [CharTokenizer().encode(text, add_special_tokens=False) + end for text in outputs]
    harness.set_tokens_and_logprobs_response(
        prompt=prompt,
        prompt_tokens=CharTokenizer().encode(prompt),
        output_tokens_list=ids,
        output_logprobs_list=[[-0.1] * len(row) for row in ids],
        finish_reasons=[reason] * len(outputs),
    )


def nodes_of(managed: ManagedServer) -> list[SequenceNode]:
    nodes: list[SequenceNode] = managed.get_state()["nodes"]
    return nodes


@pytest.mark.parametrize("tool_choice", [{}, {"tool_choice": "auto"}, {"tool_choice": {"x": 1}}])
async def test_call_is_structured_and_its_sequence_is_raw(
    tool_choice: dict[str, Any], harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, managed, [USER], HERMES_CALL)

    answer = await managed.chat_completion(messages=[USER], tools=TOOLS, **tool_choice)

    choice = answer.choices[0]
    calls: Any = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [type(call) for call in calls] == [dict]
    assert calls[0]["function"] == {"name": "search", "arguments": '{"query": "cats"}'}
    (node,) = nodes_of(managed)
    assert node.full_text.endswith(HERMES_CALL)
    assert node.metadata == {"finish_reason": "stop"}
    num_sampled = len(HERMES_CALL) + 1
    assert node.masked_tokens[-num_sampled:] == node.tokens[-num_sampled:]
    assert set(node.masked_tokens[:-num_sampled]) == {IGNORE_INDEX}
    assert set(node.logprobs[:-num_sampled]) == {MASKED_LOGPROB}
    assert set(node.logprobs[-num_sampled:]) == {-0.1}


async def test_answer_with_calls_can_be_dumped_without_warnings(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, managed, [USER], HERMES_CALL, "none needed")

    answer = await managed.chat_completion(messages=[USER], tools=TOOLS, n=2)

    assert isinstance(answer, ChatCompletion)
    first, second = answer.model_dump()["choices"]
    assert json.loads(answer.model_dump_json())["choices"] == [first, second]
    assert first["message"] == answer.choices[0].message.model_dump()
    assert first["message"]["tool_calls"][0]["function"]["name"] == "search"
    assert (second["message"]["content"], second["finish_reason"]) == ("none needed", "stop")


async def test_parallel_calls_and_the_text_before_them(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    text = f"Both.\n{HERMES_CALL}\n{HERMES_CALL.replace('search', 'get_time')}"
    preset(harness, managed, [USER], text)

    answer = await managed.chat_completion(messages=[USER], tools=TOOLS)

    calls: Any = answer.choices[0].message.tool_calls
    assert [call["function"]["name"] for call in calls] == ["search", "get_time"]
    assert answer.choices[0].message.content == "Both.\n"


async def test_choice_none_shows_the_tools_and_leaves_the_text(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, managed, [USER], HERMES_CALL)

    answer = await managed.chat_completion(messages=[USER], tools=TOOLS, tool_choice="none")

    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == (HERMES_CALL, None)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ('<tool_call>{"name": "sea', "length", "length"),
        (HERMES_CALL.removesuffix("</tool_call>"), "length", "tool_calls"),
        ("<tool_call>{broken}</tool_call>", "stop", "stop"),
    ],
)
async def test_finish_reason_is_the_engines_unless_calls_are_found(
    text: str, reason: str, expected: str, harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, managed, [USER], text, reason=reason)

    answer = await managed.chat_completion(messages=[USER], tools=TOOLS)

    assert answer.choices[0].finish_reason == expected
    assert nodes_of(managed)[0].full_text.endswith(text)


@pytest.mark.parametrize("keeps_tools", [True, False])
async def test_calls_in_messages_are_written_as_sampled(
    keeps_tools: bool, harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, managed, [USER], f"Look: {HERMES_CALL} ")
    answer = await managed.chat_completion(messages=[USER], tools=TOOLS)
    message = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": "x", "content": "three"}
    prompt = managed._convert_messages_to_prompt([USER, message, result])

    assert f"[assistant]Look: {HERMES_CALL} </s>\n[tool]three</s>\n[assistant]" in prompt
    preset(harness, managed, [USER, message, result], "Three cats.")
    if keeps_tools:
        answer = await managed.chat_completion(messages=[USER, message, result], tools=TOOLS)
        (node,) = nodes_of(managed)
        assert answer.choices[0].message.content == "Three cats."
        assert node.full_text.endswith("Three cats.")


async def test_follow_up_prompt_is_the_converted_messages_of_the_translator(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    preset(harness, managed, [USER], HERMES_CALL)
    answer = await managed.chat_completion(messages=[USER], tools=TOOLS)
    calls: Any = answer.choices[0].message.tool_calls
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "three"},
    ]
    translator = managed._get_translator()
    assert translator is not None
    converted = translator.convert_messages_for_template(messages)

    preset(harness, managed, converted, "Three.")
    answer = await managed.chat_completion(messages=messages, tools=TOOLS)

    assert answer.choices[0].message.content == "Three."
    assert len(nodes_of(managed)) == 1


async def test_unknown_parser_shows_tools_and_leaves_text(
    harness: ServerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    managed = ManagedServer(harness, tool_parser="unheard")
    preset(harness, managed, [USER], HERMES_CALL)

    for _ in range(2):
        answer = await managed.chat_completion(messages=[USER], tools=TOOLS)

    assert managed._tool_parser_name == "unheard"
    assert answer.choices[0].message.content == HERMES_CALL
    assert caplog.text.count("no tool-call format 'unheard'") == 1


async def test_without_a_tokenizer_there_is_no_translator(harness: ServerHarness) -> None:
    managed = ManagedServer(harness, tool_parser="hermes")
    managed.tokenizer = None

    assert managed._get_translator() is None


@pytest.mark.parametrize("name", ["hermes", "qwen", "llama3_json", "mistral", "qwen3_coder"])
async def test_tool_conversation_is_one_sequence_of_the_engines_tokens(
    name: str, make_server: MakeServer
) -> None:
    tool_format = registry.find(name)
    assert tool_format is not None
    call = FunctionCall(name="search", arguments='{"query": "</think> cats"}')
    replies = [f"<think>a</think>{tool_format.render([call] * num)}" for num in (1, 2)]
    if name == "llama3_json":  # these models write nothing before a call
        replies = [tool_format.render([call] * num) for num in (1, 2)]
    async with ScriptedEngine([*replies, "plain", "<tool_call>{"]) as engine:
        managed = ManagedServer(make_server(engine, VLLMServer), tool_parser=name)
        messages: list[Any] = [USER]
        num_calls = 0
        for _ in range(6):
            answer = await managed.chat_completion(messages=messages, tools=TOOLS)
            message = answer.choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            for made in message.get("tool_calls", []):
                assert json.loads(made["function"]["arguments"]) == {"query": "</think> cats"}
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": "ok"})
                num_calls += 1
            messages.append(USER)

        prompts = [r.body["prompt"] for r in engine.requests if isinstance(r.body["prompt"], list)]
        (node,) = managed.get_state()["nodes"]
        assert num_calls > 1
        assert node.tokens[: len(prompts[-1])] == prompts[-1]
        text = CharTokenizer().decode(node.tokens)
        assert "</s></s>" not in text
        sampled = [m for m in node.masked_tokens if m != IGNORE_INDEX]
        assert CharTokenizer().decode(sampled).count("</s>") == 6


class Replies:
    """An engine that samples the given texts, one per request."""

    def __init__(self, *texts: str) -> None:
        self.tokenizer = MarkTokenizer()
        self.config = SimpleNamespace(model_name="test_model")
        self.texts = list(texts)
        self.sequences: list[list[int]] = []

    async def tokens_and_logprobs_completion(self, *, input_ids: list[int], **_: Any) -> Any:
        ids = [*self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False), 2]
        self.sequences.append([*input_ids, *ids])
        return input_ids, [ids], [[-0.1] * len(ids)], ["stop"]


@pytest.mark.parametrize("name", ["hermes", "mistral"])
async def test_marks_that_are_special_tokens_are_kept(name: str) -> None:
    tool_format = registry.find(name)
    assert tool_format is not None
    text = tool_format.render([FunctionCall(name="search", arguments="{}")])
    engine = Replies(text, text, "done")
    managed = ManagedServer(engine, tool_parser=name)
    messages: list[Any] = [USER]

    for _ in range(3):
        answer = await managed.chat_completion(messages=messages, tools=TOOLS)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), USER]

    (node,) = nodes_of(managed)
    assert [message.get("content") for message in messages[1::2]] == [None, None, "done"]
    assert node.full_text.count(text) == 2
    assert node.tokens == engine.sequences[-1]
    for earlier, later in itertools.pairwise(engine.sequences):
        assert later[: len(earlier)] == earlier
    assert node.tokens.count(2) == node.full_text.count("</s>") + 1


async def test_calls_of_other_sessions_are_rendered(
    harness: ServerHarness, managed: ManagedServer
) -> None:
    calls = as_tool_calls([("search", {"query": "cats"})])

    prompt = managed._convert_messages_to_prompt(
        [USER, {"role": "assistant", "content": "Look.", "tool_calls": calls}]
    )

    assert prompt.endswith(f"[assistant]Look.\n{HERMES_CALL}</s>\n")
