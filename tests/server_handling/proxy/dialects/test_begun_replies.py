"""A chat that ends with the assistant's text is continued exactly, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.server_handling.proxy.anthropic import ANTHROPIC
from atroposlib.envs.server_handling.proxy.exchange import Dialect, Exchange, RenderedPrompt
from atroposlib.envs.server_handling.proxy.openai_dialect import OPENAI
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.envs.server_handling.proxy.responses import RESPONSES
from tests.server_handling.conversation_plans import Reply
from tests.server_handling.proxy.dialects.scripted_session import tool_call
from tests.server_handling.proxy.dialects.test_token_continuity import (
    assert_engines_own,
    family_of,
    post,
    session_of,
)
from tests.server_handling.random_conversations import TOOLS, TokenEngine
from tests.templates.make_tokenizers import FAMILIES

NAMES = sorted(FAMILIES)
USER = {"role": "user", "content": "Where?"}
MORE = {"role": "user", "content": "And then?"}
BOTH = pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC], ids=["chat", "messages"])


def render(session: Any, messages: list[dict[str, Any]]) -> RenderedPrompt:
    return Exchange(session, {}, {}, {}, {}).render({"messages": messages})


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def text_of(body: Any) -> str:
    content = body["content"] if "content" in body else body["choices"][0]["message"]["content"]
    return content if isinstance(content, str) else str(content[0]["text"])


@BOTH
@pytest.mark.parametrize("name", NAMES)
async def test_begun_reply_is_continued_and_stays_one_sequence(name: str, dialect: Dialect) -> None:
    engine = TokenEngine(family_of(name))
    session = session_of(engine)
    texts = [("<think>hm</think>In ", "Rome"), ("Then ", "Oslo."), ("", "Riga.")]
    messages: list[dict[str, Any]] = []
    for begun, said in texts:
        messages.append(MORE if messages else USER)
        engine.replies = (Reply(f" {said}"),)
        asked = [*messages, assistant(begun.strip())] if begun else messages

        answer = await post(session, dialect, {"messages": asked, "max_tokens": 99})

        assert text_of(answer.body) == f" {said}"
        messages.append(assistant(f"{begun.strip()} {said}"))

    prompt = engine.tokenizer.decode(engine.prompts[0])
    opened = render(session_of(engine), [USER]).text
    assert (
        prompt.endswith(f"{opened}<think>hm</think>In") or prompt == f"{opened}<think>hm</think>In"
    )
    (node,) = session.nodes
    assert_engines_own(node, engine)


@BOTH
@pytest.mark.parametrize("name", NAMES)
async def test_reply_cut_by_a_limit_goes_on_from_its_own_tokens(
    name: str, dialect: Dialect
) -> None:
    engine = TokenEngine(family_of(name))
    session = session_of(engine)
    text = "one two three four"
    engine.replies = (Reply(text, cut=6, seed=5),)
    first = await post(session, dialect, {"messages": [USER], "max_tokens": 99})
    cut = text_of(first.body)
    engine.replies = (Reply(" five"),)

    await post(session, dialect, {"messages": [USER, assistant(cut.rstrip())], "max_tokens": 99})
    whole = assistant(f"{cut} five")
    await post(session, dialect, {"messages": [USER, whole, MORE], "max_tokens": 99})

    (node,) = session.nodes
    assert_engines_own(node, engine)
    assert engine.prompts[1] == engine.prompts[0] + engine.outputs[0][0]


@pytest.mark.parametrize("name", NAMES)
async def test_render_shows_what_is_sent(name: str) -> None:
    engine = TokenEngine(family_of(name), replies=(Reply("<think>a</think>b", seed=3),))
    session = session_of(engine)
    answer = await post(session, OPENAI, {"messages": [USER]})
    history = [USER, answer.body["choices"][0]["message"], MORE]
    for messages in ([USER], history, [*history, assistant("So ")]):
        rendered = render(session, messages)

        await post(session, OPENAI, {"messages": messages})

        assert rendered.token_ids == engine.prompts[-1]


async def test_call_that_the_prompt_begins_is_a_call() -> None:
    engine = TokenEngine(
        family_of("chatml"), replies=(Reply('rch", "arguments": {}}</tool_call>'),)
    )
    session = session_of(engine)
    begun = assistant('Look. <tool_call>{"name": "sea')

    answer = await post(session, OPENAI, {"messages": [USER, begun], "tools": TOOLS})

    message = answer.body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": "{}"}
    engine.replies = (Reply("Done."),)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
    await post(session, OPENAI, {"messages": [USER, message, result], "tools": TOOLS})
    (node,) = session.nodes
    assert_engines_own(node, engine)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (
            OPENAI,
            {"messages": [USER, {**assistant(""), "tool_calls": [tool_call("a", "f", "{}")]}]},
        ),
        (ANTHROPIC, {"messages": [USER, assistant("So ")]}),
        (
            ANTHROPIC,
            {"messages": [USER, assistant("So")], "thinking": {"type": "enabled"}},
        ),
        (RESPONSES, {"input": [USER, assistant("So")]}),
    ],
    ids=["calls", "space", "thinking", "responses"],
)
async def test_what_cannot_be_continued_is_refused(dialect: Dialect, body: Any) -> None:
    engine = TokenEngine(family_of("chatml"))

    with pytest.raises(ProxyRefusal) as caught:
        await post(session_of(engine), dialect, {"max_tokens": 9, **body})

    assert caught.value.status == 400
    assert engine.prompts == []
