"""Demands on tool calls reach the engine as a form of the reply, or are named as ignored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from atroposlib.envs.server_handling.proxy.app import AgentProxy, AgentSession
from atroposlib.envs.server_handling.proxy.exchange import IGNORED_HEADER, demand_of, structural_tag
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.envs.server_handling.sglang_server import tokens_body
from atroposlib.envs.server_handling.tool_formats import FunctionCall, registry
from tests.server_handling.proxy.engine import RecordingEngine, manager_of

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMES = ("search", "open")


def chat_tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


CHAT_TOOLS: Any = [chat_tool(name) for name in NAMES]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES
]
MESSAGES_TOOLS: Any = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
HI: Any = [{"role": "user", "content": "Hi"}]


@dataclass
class ConstrainingEngine(RecordingEngine):
    """An engine that takes forms of replies."""

    takes_structural_tags: bool = True

    def form(self) -> dict[str, Any]:
        text = self.calls[-1].options["extra_body"]["structured_outputs"]["structural_tag"]
        form: dict[str, Any] = json.loads(text)["format"]
        return form


@pytest.fixture
def engine() -> RecordingEngine:
    return ConstrainingEngine([CALL])


@pytest.fixture
async def clients(agent: AgentSession) -> AsyncIterator[Any]:
    chat = openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)
    messages = anthropic.AsyncAnthropic(
        base_url=agent.anthropic_base_url, api_key=agent.api_key, max_retries=0
    )
    yield chat, messages
    await chat.close()
    await messages.close()


CHOICES: dict[str, tuple[Any, Any, Any]] = {
    "required": ("required", "required", {"type": "any"}),
    "one tool": (
        {"type": "function", "function": {"name": "search"}},
        {"type": "function", "name": "search"},
        {"type": "tool", "name": "search"},
    ),
    "one call": (None, None, {"type": "auto", "disable_parallel_tool_use": True}),
}


async def ask_all(clients: Any, kind: str) -> list[Any]:
    """Ask through every dialect; return the raw responses."""
    client, claude = clients
    chat, responses, messages = CHOICES[kind]
    single: dict[str, Any] = {"parallel_tool_calls": False} if kind == "one call" else {}
    with_choice = {"tool_choice": chat} if chat else {}
    with_response_choice = {"tool_choice": responses} if responses else {}
    return [
        await client.chat.completions.with_raw_response.create(
            model="m", messages=HI, tools=CHAT_TOOLS, **with_choice, **single
        ),
        await client.responses.with_raw_response.create(
            model="m", input="Hi", tools=RESPONSES_TOOLS, **with_response_choice, **single
        ),
        await claude.messages.with_raw_response.create(
            model="m", max_tokens=99, messages=HI, tools=MESSAGES_TOOLS, tool_choice=messages
        ),
    ]


@pytest.mark.parametrize("kind", list(CHOICES))
async def test_demand_of_every_dialect_is_the_form_of_the_reply(
    engine: ConstrainingEngine, clients: Any, kind: str
) -> None:
    answers = await ask_all(clients, kind)

    forms = [
        call.options["extra_body"]["structured_outputs"]["structural_tag"] for call in engine.calls
    ]
    assert len(forms) == 3
    assert len(set(forms)) == 1
    assert [IGNORED_HEADER.lower() in answer.headers for answer in answers] == [False] * 3
    calls = engine.form()["elements"][0]
    required = kind != "one call"
    assert calls["type"] == ("tags_with_separator" if required else "triggered_tags")
    begins = [tag["begin"] for tag in calls["tags"]]
    assert len(begins) == (1 if kind == "one tool" else 2)
    assert calls["stop_after_first"] is (kind == "one call")


@pytest.mark.parametrize("kind", list(CHOICES))
async def test_demand_that_the_engine_cannot_meet_is_named(
    engine: ConstrainingEngine, clients: Any, kind: str
) -> None:
    engine.takes_structural_tags = False

    answers = await ask_all(clients, kind)

    single = kind == "one call"
    openai_name = "parallel_tool_calls" if single else "tool_choice"
    inner = "tool_choice.disable_parallel_tool_use" if single else "tool_choice"
    named = [answer.headers[IGNORED_HEADER] for answer in answers]
    assert named == [openai_name, openai_name, inner]
    assert not any("extra_body" in call.options for call in engine.calls)


async def test_other_fields_that_change_nothing_are_named_by_every_dialect(clients: Any) -> None:
    client, claude = clients

    answers = [
        await client.chat.completions.with_raw_response.create(
            model="m", messages=HI, user="me", store=False, reasoning_effort="low", verbosity="low"
        ),
        await client.responses.with_raw_response.create(
            model="m",
            input="Hi",
            reasoning={"effort": "low"},
            service_tier="flex",
            truncation="disabled",
            max_tool_calls=3,
            text={"verbosity": "low"},
        ),
        await claude.messages.with_raw_response.create(
            model="m",
            max_tokens=9,
            messages=HI,
            service_tier="standard_only",
            metadata={"user_id": "me"},
            thinking={"type": "enabled", "budget_tokens": 1024},
        ),
    ]

    assert [answer.headers[IGNORED_HEADER] for answer in answers] == [
        "reasoning_effort, verbosity",
        "max_tool_calls, reasoning.effort, service_tier, text.verbosity",
        "service_tier, thinking.budget_tokens",
    ]


PROVIDERS_TOOLS = [
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "computer_use",
    "computer_use_preview",
    "image_generation",
    "local_shell",
]


async def test_tools_that_a_provider_runs_are_named_and_left_out(
    engine: ConstrainingEngine, clients: Any
) -> None:
    client, _ = clients
    own = {"type": "function", "name": "local_shell", "parameters": SCHEMA, "strict": False}
    theirs = [{"type": kind} for kind in PROVIDERS_TOOLS]

    answer = await client.responses.with_raw_response.create(
        model="m", input="Hi", tools=[*theirs, own]
    )
    alone = await client.responses.with_raw_response.create(model="m", input="Hi", tools=theirs)

    names = ", ".join(sorted(f"tools.{kind}" for kind in PROVIDERS_TOOLS))
    assert [a.headers[IGNORED_HEADER] for a in (answer, alone)] == [names, names]
    first, second = (call.options["prompt"] for call in engine.calls)
    assert first.startswith("[tools]1<")
    assert "[tools]" not in second


@pytest.mark.parametrize("choice", [{"type": "web_search"}, "required"])
async def test_choice_of_a_tool_that_a_provider_runs_is_refused(
    engine: ConstrainingEngine, clients: Any, choice: Any
) -> None:
    client, _ = clients

    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(
            model="m", input="Hi", tools=[{"type": "web_search"}], tool_choice=choice
        )

    assert caught.value.param == "tool_choice"
    assert engine.calls == []


@pytest.mark.parametrize("is_required", [False, True])
async def test_strict_tools_are_named_unless_the_engine_is_held_to_them(
    engine: ConstrainingEngine, clients: Any, is_required: bool
) -> None:
    client, claude = clients
    openai_choice: Any = {"tool_choice": "required"} if is_required else {}
    choice: Any = {"tool_choice": {"type": "any"}} if is_required else {}

    answers = [
        await client.chat.completions.with_raw_response.create(
            model="m", messages=HI, tools=[chat_tool("search", strict=True)], **openai_choice
        ),
        await client.responses.with_raw_response.create(
            model="m", input="Hi", tools=[{**RESPONSES_TOOLS[0], "strict": True}], **openai_choice
        ),
        await claude.messages.with_raw_response.create(
            model="m",
            max_tokens=99,
            messages=HI,
            tools=[{**MESSAGES_TOOLS[0], "strict": True}],
            **choice,
        ),
    ]

    named = [answer.headers.get(IGNORED_HEADER) for answer in answers]
    assert named == [None if is_required else "tools.strict"] * 3
    if is_required:
        for call in engine.calls:
            text = call.options["extra_body"]["structured_outputs"]["structural_tag"]
            (tag,) = json.loads(text)["format"]["elements"][0]["tags"]
            assert tag["content"]["json_schema"] == SCHEMA


async def test_parts_of_fields_that_change_nothing_are_named_by_every_dialect(
    clients: Any,
) -> None:
    client, claude = clients
    quiet: Any = {"include_obfuscation": False}

    chat = await client.chat.completions.with_raw_response.create(
        model="m", messages=HI, stream=True, stream_options={"include_obfuscation": True}
    )
    responses = await client.responses.with_raw_response.create(
        model="m",
        input="Hi",
        reasoning={"effort": "low", "context": "all"},
        tools=[{**RESPONSES_TOOLS[0], "defer_loading": True}],
        extra_body={"stream_options": quiet},
    )
    messages = await claude.messages.with_raw_response.create(
        model="m",
        max_tokens=9,
        messages=HI,
        tools=[
            {
                **MESSAGES_TOOLS[0],
                "cache_control": {"type": "ephemeral"},
                "allowed_callers": ["direct"],
                "input_examples": [{"a": 1}],
            }
        ],
        extra_body={"output_config": {"task_budget": {"total": 1}}},
    )
    counted = await claude.messages.with_raw_response.count_tokens(
        model="m", messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}
    )

    assert [a.headers[IGNORED_HEADER] for a in (chat, responses, messages, counted)] == [
        "stream_options.include_obfuscation",
        "reasoning.context, reasoning.effort, tools.defer_loading",
        "output_config.task_budget, tools.input_examples",
        "thinking.budget_tokens",
    ]


async def test_form_follows_thinking_that_the_prompt_opened(
    engine: ConstrainingEngine, agent: AgentSession, clients: Any
) -> None:
    client, _ = clients
    opened: Any = [{"role": "user", "content": "x"}]
    tokenizer = engine.tokenizer
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *args, **kw: render(*args, **kw) + "<think>\n"

    await client.chat.completions.create(
        model="m", messages=opened, tools=CHAT_TOOLS, tool_choice="required"
    )

    form = engine.form()
    assert form["type"] == "sequence"
    assert form["elements"][0]["begin"] == ""


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", None),
        ({"type": "function", "function": {"name": "absent"}}, CHAT_TOOLS),
        ({"type": "function"}, CHAT_TOOLS),
        ("sometimes", CHAT_TOOLS),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required"}}, CHAT_TOOLS),
        (7, CHAT_TOOLS),
    ],
)
def test_choice_that_cannot_be_met_is_refused(choice: Any, tools: Any) -> None:
    with pytest.raises(ProxyRefusal, match="tool_choice") as caught:
        demand_of(choice, None, tools)

    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
@pytest.mark.parametrize("parallel", [None, True])
def test_nothing_is_demanded_by_defaults(choice: Any, parallel: Any) -> None:
    assert demand_of(choice, parallel, CHAT_TOOLS) is None
    assert demand_of(choice, parallel, None) is None


def test_allowed_tools_limit_what_may_be_called() -> None:
    chosen = [{"type": "function", "function": {"name": "open"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": chosen}}

    demand = demand_of(choice, None, CHAT_TOOLS)

    assert demand is not None
    assert (demand.names, demand.is_required, demand.is_single) == (("open",), False, False)


@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3_json"])
@pytest.mark.parametrize("strict", [True, False])
def test_form_describes_what_the_format_reads(name: str, strict: bool) -> None:
    tool_format = registry.find(name)
    assert tool_format is not None
    tools = [chat_tool(n, strict=strict) for n in NAMES]
    demand = demand_of("required", None, tools)
    assert demand is not None

    form = json.loads(str(structural_tag(demand, tools, tool_format, is_thinking=False)))

    calls = form["format"]["elements"][0]
    pieces = [f'{tag["begin"]}{{"a": 1}}{tag["end"]}' for tag in calls["tags"]]
    found = tool_format.find_calls(calls["separator"].join(pieces), 0, tools)
    assert [(call.name, call.arguments) for call in found] == [(n, '{"a": 1}') for n in NAMES]
    rendered = tool_format.render([FunctionCall(name="search", arguments='{"a": 1}')])
    assert rendered == pieces[0]
    schemas = [tag["content"]["json_schema"] for tag in calls["tags"]]
    assert schemas == [SCHEMA if strict else {"type": "object"}] * 2


@pytest.mark.parametrize("name", ["mistral", "qwen3_coder"])
def test_format_that_cannot_be_described_gives_no_form(name: str) -> None:
    tool_format = registry.find(name)
    demand = demand_of("required", None, CHAT_TOOLS)
    assert tool_format is not None
    assert demand is not None

    assert structural_tag(demand, CHAT_TOOLS, tool_format, is_thinking=False) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3_json"])
def test_grammar_of_the_engine_takes_what_is_demanded_and_nothing_else(name: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    tool_format = registry.find(name)
    assert tool_format is not None
    call = tool_format.render([FunctionCall(name="search", arguments='{"x": [1, "a"]}')])
    other = tool_format.render([FunctionCall(name="open", arguments='{"a": 3}')])
    both = f"{call}{tool_format.separator}{other}"
    thought = "<think>\nhm <tool_call>\n</think>\n\n"

    def accepted(choice: Any, parallel: Any, *, is_thinking: bool = False) -> list[bool]:
        demand = demand_of(choice, parallel, CHAT_TOOLS)
        assert demand is not None
        form = structural_tag(demand, CHAT_TOOLS, tool_format, is_thinking=is_thinking)
        assert form is not None
        grammar = xgrammar.Grammar.from_structural_tag(form)
        texts = [call, other, both, thought + call, "hello", f"hi {call}", f"hi {both}"]
        return [bool(accepts(grammar, text)) for text in texts]

    one = {"type": "function", "function": {"name": "search"}}
    assert accepted("required", None) == [True, True, True, True, False, False, False]
    assert accepted("required", False) == [True, True, False, True, False, False, False]
    assert accepted(one, None) == [True, False, False, True, False, False, False]
    assert accepted("required", None, is_thinking=True)[3:5] == [True, False]
    if tool_format.trigger is not None:
        assert accepted("auto", False) == [True, True, False, True, True, True, False]


def test_sglang_is_sent_forms_under_its_own_names() -> None:
    options = {"structured_outputs": {"structural_tag": "{}", "regex": None}, "max_tokens": 5}
    response_format = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}

    formed = tokens_body([1], options)["sampling_params"]
    shaped = tokens_body([1], {"response_format": response_format})["sampling_params"]

    assert formed == {"max_new_tokens": 5, "structural_tag": "{}"}
    assert {name: json.loads(text) for name, text in shaped.items()} == {"json_schema": SCHEMA}


async def test_defaults_change_nothing_for_the_engine() -> None:
    engine = ConstrainingEngine([CALL])
    async with AgentProxy(manager_of(engine), engine.tokenizer) as proxy, proxy.session() as agent:
        client = openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key)
        await client.chat.completions.create(
            model="m", messages=HI, tools=CHAT_TOOLS, parallel_tool_calls=True, tool_choice="auto"
        )
        await client.close()

    assert "extra_body" not in engine.calls[0].options
