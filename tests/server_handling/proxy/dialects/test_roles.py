"""Every text that a client sends is in the prompt, whatever its role and the template."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from atroposlib.envs.server_handling.chat_rendering import check_texts, render_messages
from atroposlib.envs.server_handling.proxy.openai_dialect import OPENAI
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.envs.server_handling.proxy.responses import RESPONSES
from atroposlib.errors import PromptError
from tests.server_handling.conversation_plans import Reply
from tests.server_handling.proxy.dialects.test_token_continuity import (
    family_of,
    post,
    session_of,
)
from tests.server_handling.random_conversations import TOOLS, TokenEngine
from tests.templates.make_tokenizers import FAMILIES

NAMES = sorted(FAMILIES)
RULE = {"role": "developer", "content": "Answer in rhymes."}
USER = {"role": "user", "content": "Hello"}


def engine_of(name: str) -> TokenEngine:
    return TokenEngine(family_of(name), replies=(Reply("ok"),))


def prompt_of(engine: TokenEngine) -> str:
    return str(engine.tokenizer.decode(engine.prompts[-1]))


def knowing_developer(name: str) -> Any:
    """A tokenizer whose template names the role."""
    tokenizer = copy.copy(family_of(name).tokenizer)
    tokenizer.chat_template = "{#- developer -#}" + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("name", NAMES)
async def test_developer_is_the_system_where_the_template_does_not_know_it(name: str) -> None:
    prompts = []
    for role in ("developer", "system"):
        engine = engine_of(name)
        await post(session_of(engine), OPENAI, {"messages": [{**RULE, "role": role}, USER]})
        prompts.append(prompt_of(engine))

    assert prompts[0] == prompts[1]
    assert RULE["content"] in prompts[0]


@pytest.mark.parametrize("name", NAMES)
async def test_developer_and_system_are_both_in_the_prompt(name: str) -> None:
    engine = engine_of(name)
    system = {"role": "system", "content": "Be kind."}

    await post(session_of(engine), OPENAI, {"messages": [system, RULE, USER]})

    assert "Be kind.\n\nAnswer in rhymes." in prompt_of(engine)


def test_developer_stays_where_the_template_knows_it() -> None:
    text = render_messages(knowing_developer("chatml"), [RULE, USER])

    assert text.startswith("<|im_start|>developer\nAnswer in rhymes.")


@pytest.mark.parametrize("name", NAMES)
async def test_every_text_of_a_conversation_is_in_the_prompt(name: str) -> None:
    engine = engine_of(name)
    call = {"name": "search", "arguments": '{"query": "cats & dogs"}'}
    messages = [
        {"role": "system", "content": "  first rule\n"},
        {"role": "user", "content": [{"type": "text", "text": "second <b> & "}]},
        {
            "role": "assistant",
            "content": "<think>third</think>fourth",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"fifth": "\\"cats\\""}\n'},
        {"role": "user", "content": "sixth"},
        {"role": "assistant", "content": "seventh \\n 日本"},
        {"role": "user", "content": "eighth"},
    ]

    await post(session_of(engine), OPENAI, {"messages": messages, "tools": TOOLS})

    prompt = prompt_of(engine)
    shown = ["first rule", "second <b> &", "third", "fourth", "cats & dogs", "fifth", "sixth"]
    assert [text for text in shown if text not in prompt] == []
    assert "seventh \\n 日本" in prompt
    assert "eighth" in prompt


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["system", "tool", "user"])
async def test_template_that_leaves_a_role_out_is_refused(name: str, role: str) -> None:
    engine = engine_of(name)
    tokenizer = copy.copy(engine.tokenizer)
    tokenizer.chat_template = (
        "{%- set messages = messages | rejectattr('role', 'equalto', '"
        + role
        + "') | list -%}"
        + tokenizer.chat_template
    )
    engine.tokenizer = tokenizer
    other = "user" if role != "user" else "system"
    messages = [{"role": role, "content": "Mind the gap."}, {"role": other, "content": "Go."}]

    with pytest.raises(ProxyRefusal, match=rf"messages\[0\].*{role}.*Mind the gap") as caught:
        await post(session_of(engine), OPENAI, {"messages": messages})

    assert (caught.value.status, caught.value.code) == (400, "render_failed")
    assert engine.prompts == []


@pytest.mark.parametrize("role", ["function", "ipython", "Environment", ""])
async def test_unknown_role_is_400_by_name(role: str) -> None:
    engine = engine_of("chatml")

    with pytest.raises(ProxyRefusal) as caught:
        await post(session_of(engine), OPENAI, {"messages": [USER, {**USER, "role": role}]})

    assert (caught.value.status, caught.value.param) == (400, "messages[1].role")
    assert f"got {role!r}" in str(caught.value)
    assert engine.prompts == []


@pytest.mark.parametrize("name", NAMES)
async def test_responses_shows_developer_messages_too(name: str) -> None:
    engine = engine_of(name)

    await post(session_of(engine), RESPONSES, {"input": [RULE, USER]})

    assert RULE["content"] in prompt_of(engine)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (" a\n", "[user]a"),
        ('say "x"\n', '{"content": "say \\"x\\"\\n"}'),
        ("日", '"\\u65e5"'),
        ("<b>", '"\\u003cb\\u003e"'),
        ('{"a": 1}', '{"content": {"a":1}}'),
        ("one  two", "one two"),
        ("", ""),
    ],
)
def test_text_may_stand_in_another_form(text: str, prompt: str) -> None:
    check_texts(prompt, [{"role": "tool", "content": text}])


def test_missing_text_is_named() -> None:
    with pytest.raises(PromptError, match=r"messages\[1\].*'tool'.*'lost'"):
        check_texts(
            "[user]kept", [{"role": "user", "content": "kept"}, {"role": "tool", "content": "lost"}]
        )
