"""Which messages count as the same turn, and what a changed one does to the sequence."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.turn_recording import RecordedReply, message_key
from tests.server_handling.conversation_plans import Reply
from tests.server_handling.random_conversations import TOOLS, TokenEngine
from tests.server_handling.test_token_continuity import family_of

USER: dict[str, Any] = {"role": "user", "content": "find cats"}

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def call(arguments: Any, *, id_: str = "a", name: str = "search") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: Any = None, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


class ClientMessage:
    """A message as an object of a client."""

    def model_dump(self) -> dict[str, Any]:
        return assistant("Hi.") | {"refusal": None, "audio": None}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (assistant("Hi."), {"role": "assistant", "content": " Hi.\n"}),
        (assistant(None, call("{}")), assistant("", call("", id_="b"))),
        (assistant(None, call('{"a": 1, "b": [2.0]}')), assistant("", call('{"b":[2],"a":1.0}'))),
        (assistant(None, call({"a": "\u00e9"})), assistant(None, call('{"a": "\\u00e9"}'))),
        (assistant("Hi."), ClientMessage()),
        (USER, {**USER, "content": [{"type": "text", "text": "find "}, {"text": "cats"}]}),
        ({"role": "tool", "content": "3"}, {"role": "tool", "content": "3", "tool_call_id": "x"}),
    ],
)
def test_messages_that_mean_the_same_have_one_key(first: Any, second: Any) -> None:
    assert message_key(first) == message_key(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (USER, {**USER, "content": "find cats "}),
        (USER, {**USER, "role": "system"}),
        (USER, {**USER, "name": "Ann"}),
        (assistant("1"), assistant("10")),
        (assistant(None, call('{"a": 1}')), assistant(None, call('{"a": "1"}'))),
        (assistant(None, call('{"a": 1}')), assistant(None, call('{"a": true}'))),
        (assistant(None, call("{}")), assistant(None, call("{}"), call("{}"))),
        (assistant(None, call("{}")), assistant(None, call("{}", name="get_time"))),
        (assistant(None, call("{broken")), assistant(None, call("{}"))),
        (USER, {**USER, "content": [{"type": "image", "url": "a"}]}),
    ],
)
def test_messages_that_differ_have_two_keys(first: Any, second: Any) -> None:
    assert message_key(first) != message_key(second)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.booleans())
def test_any_spelling_of_arguments_is_the_same_call(arguments: Any, is_ascii: bool) -> None:
    backwards = dict(reversed(arguments.items()))
    spellings = [
        arguments,
        json.dumps(arguments, ensure_ascii=is_ascii),
        json.dumps(backwards, indent=2),
        json.dumps(arguments, separators=(",", ":"), sort_keys=True),
    ]

    assert len({message_key(assistant(None, call(one))) for one in spellings}) == 1


def test_reply_may_come_back_without_thinking_unless_that_counts() -> None:
    bare = message_key(assistant("ok"))

    for keeps_thinking in (False, True):
        reply = RecordedReply("why</think>ok", "why</think>ok", None, keeps_thinking=keeps_thinking)
        assert message_key(assistant("why</think>ok")) in reply.keys
        assert (bare in reply.keys) is not keeps_thinking


CALL_REPLY = Reply("Look: ", (("search", '{"query": "cats"}'),))


async def after_a_call(change: Any, **second: Any) -> tuple[TokenEngine, ManagedServer]:
    """Sample a call, send it back as `change` leaves it, and ask again."""
    engine = TokenEngine(family_of("qwen2_5"), (CALL_REPLY,))
    managed = ManagedServer(engine, tool_parser="qwen")
    answer = await managed.chat_completion(messages=[USER], tools=TOOLS)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    change(message)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    engine.replies = (Reply("Three."),)
    request = {"messages": [USER, message, result], "tools": TOOLS} | second
    await managed.chat_completion(**request)
    return engine, managed


def set_arguments(text: str) -> Any:
    return lambda message: message["tool_calls"][0]["function"].update(arguments=text)


@pytest.mark.parametrize(
    "change",
    [
        set_arguments('{"query":"cats"}'),
        lambda message: message.update(content=None),
        lambda message: message["tool_calls"][0].update(id="other"),
    ],
)
async def test_call_that_comes_back_in_other_words_goes_on(change: Any) -> None:
    engine, managed = await after_a_call(change)

    (node,) = managed.get_state()["nodes"]
    first = [*engine.prompts[0], *engine.outputs[0][0]]
    assert engine.prompts[1][: len(first)] == first
    assert node.tokens == [*engine.prompts[1], *engine.outputs[1][0]]


@pytest.mark.parametrize(
    ("change", "written"),
    [
        (set_arguments('{"query": "dogs"}'), '"query": "dogs"'),
        (lambda message: message.update(content="Hm."), "Hm.\n<tool_call>"),
        (lambda message: message["tool_calls"].append(call("{}")), '"arguments": {}}'),
    ],
)
async def test_changed_call_is_written_as_changed_and_starts_anew(
    change: Any, written: str
) -> None:
    engine, managed = await after_a_call(change)

    first, second = managed.get_state()["nodes"]
    assert written in engine.tokenizer.decode(engine.prompts[1])
    assert first.tokens == [*engine.prompts[0], *engine.outputs[0][0]]
    assert set(second.masked_tokens[: len(engine.prompts[1])]) == {-100}


async def test_changed_tools_start_anew() -> None:
    engine, managed = await after_a_call(lambda message: None, tools=TOOLS[:1])

    assert len(managed.get_state()["nodes"]) == 2
    assert "get_time" not in engine.tokenizer.decode(engine.prompts[1])


async def test_reply_that_begins_another_one_is_not_taken_for_it() -> None:
    engine = TokenEngine(family_of("chatml"), (Reply("1"),))
    managed = ManagedServer(engine)
    await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[USER, assistant("10"), USER])

    assert engine.tokenizer.decode(engine.prompts[1]).count("<|im_end|>") == 3
    assert len(managed.get_state()["nodes"]) == 2


async def test_session_goes_on_from_an_earlier_turn_by_its_tokens() -> None:
    engine = TokenEngine(family_of("chatml"), (Reply("cat" * 9, seed=5),))
    managed = ManagedServer(engine)
    messages = [USER, assistant("cat" * 9), USER]
    await managed.chat_completion(messages=[USER])
    await managed.chat_completion(messages=messages)

    await managed.chat_completion(messages=messages)

    first = [*engine.prompts[0], *engine.outputs[0][0]]
    assert engine.prompts[2] == engine.prompts[1]
    assert engine.prompts[2][: len(first)] == first
    one, other = managed.get_state()["nodes"]
    assert one.masked_tokens[: len(first)] == other.masked_tokens[: len(first)]
    assert one.logprobs[: len(first)] == other.logprobs[: len(first)]


@pytest.mark.parametrize("text", ["cat", " cat"])
async def test_end_behind_a_space_of_the_template_is_not_added_again(text: str) -> None:
    family = family_of("chatml")
    tokenizer = copy.deepcopy(family.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
        "{% else %} {{ m.content | trim }} <|im_end|>{% endif %}{% endfor %}"
    )
    engine = TokenEngine(replace(family, tokenizer=tokenizer), (Reply(text),))
    managed = ManagedServer(engine)
    await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[USER, assistant(text), USER])

    assert tokenizer.decode(engine.prompts[1]) == f"[find cats]{text}<|im_end|>[find cats]"
    assert len(managed.get_state()["nodes"]) == 1
