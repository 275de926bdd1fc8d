"""Turns that clients write back in another way go on as what they mean, for every template.

    history as it was answered ─► perturbed anew for every request ─► dialect ─► one sequence

Clients of all kinds put other space around thoughts and texts, drop or repeat thinking, write
arguments in another order and insert texts where there is none.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.chat_rendering import INSERTED_TEXTS
from atroposlib.envs.server_handling.turn_recording import message_key
from tests.server_handling.conversation_plans import TEXTS, random_plan
from tests.server_handling.proxy.dialects.conversations import Turn
from tests.server_handling.proxy.dialects.test_token_continuity import (
    AGENT_TYPES,
    AgentType,
    AnthropicAgent,
    ChatAgent,
    assert_engines_own,
    family_of,
    post,
    session_of,
)
from tests.server_handling.random_conversations import TokenEngine
from tests.templates.make_tokenizers import FAMILIES

pytestmark = pytest.mark.slow

SPACES = ("", "\n", "\n\n", " ", "\r\n", "\n \n")
START, END = "<think>", "</think>"


def perturbed_text(text: str, chance: random.Random) -> str:
    """A reply's text as some client sends it back."""
    thought, end, said = text.rpartition(END)

    def spaced(part: str) -> str:
        return chance.choice(SPACES) + part.strip() + chance.choice(SPACES)

    if not text.strip():
        return chance.choice([text, *SPACES, *sorted(INSERTED_TEXTS)])
    if not end:
        return chance.choice([text, spaced(text)])
    thought = thought.strip().removeprefix(START)
    written = f"{START}{spaced(thought)}{END}"
    times = chance.choice([0, 1, 1, 1, 2])
    return chance.choice(SPACES).join([written] * times) + spaced(said)


def perturbed_arguments(arguments: str, chance: random.Random) -> str:
    entries = list(json.loads(arguments).items())
    chance.shuffle(entries)
    separators = chance.choice([(",", ":"), (", ", ": "), (" ,", " :  ")])
    is_ascii = chance.random() < 0.5
    return json.dumps(dict(entries), separators=separators, ensure_ascii=is_ascii)


def perturbed_chat(history: list[Any], chance: random.Random) -> list[Any]:
    for message in history:
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls") or []
        text = perturbed_text(message["content"] or "", chance)
        message["content"] = chance.choice([text, None]) if calls else text
        for call in calls:
            function = call["function"]
            function["arguments"] = perturbed_arguments(function["arguments"], chance)
    return history


def perturbed_items(history: list[Any], chance: random.Random) -> list[Any]:
    items: list[Any] = []
    for i, item in enumerate(history):
        kind = item.get("type", "message")
        if kind == "function_call":
            item["arguments"] = perturbed_arguments(item["arguments"], chance)
        elif kind == "message" and item["role"] == "assistant":
            part = item["content"][0]
            part["text"] = perturbed_text(part["text"], chance)
        elif kind == "reasoning":
            part = item["content"][0]
            part["text"] = chance.choice(SPACES) + part["text"] + chance.choice(SPACES)
            follows = history[i + 1] if i + 1 < len(history) else {}
            is_alone = follows.get("role") == "user" or not follows
            times = chance.choice([1, 2] if is_alone else [0, 1, 1, 2])
            items += [copy.deepcopy(item) for _ in range(times)]
            continue
        items.append(item)
    return items


def perturbed_blocks(history: list[Any], chance: random.Random) -> list[Any]:
    for message in history:
        if message["role"] != "assistant":
            continue
        blocks: list[Any] = []
        for block in message["content"]:
            times = 1
            if block["type"] == "text":
                block["text"] = perturbed_text(block["text"], chance)
            elif block["type"] == "tool_use":
                block["input"] = json.loads(perturbed_arguments(json.dumps(block["input"]), chance))
            elif block["type"] == "thinking":
                block["thinking"] = chance.choice(SPACES) + block["thinking"]
                times = chance.choice([0, 1, 1, 2])
            blocks += [copy.deepcopy(block) for _ in range(times)]
        message["content"] = blocks
    return history


def perturbed_body(agent: Any, chance: random.Random, *, streams: bool) -> dict[str, Any]:
    body: dict[str, Any] = copy.deepcopy(agent.body(streams=streams))
    if isinstance(agent, ChatAgent):
        return {**body, "messages": perturbed_chat(body["messages"], chance)}
    if isinstance(agent, AnthropicAgent):
        return {**body, "messages": perturbed_blocks(body["messages"], chance)}
    return {**body, "input": perturbed_items(body["input"], chance)}


async def play(name: str, agent_type: AgentType, seed: int) -> None:
    """Have one random conversation and check its one sequence against the engine's record."""
    chance = random.Random(f"perturbed-{name}-{agent_type.__name__}-{seed}")
    plan = random_plan(chance)
    engine = TokenEngine(family_of(name))
    session = session_of(engine)
    agent = agent_type(chance, plan)

    def results(call_ids: list[str]) -> Turn:
        calls = [{"id": call_id} for call_id in call_ids]
        follow_up = None if calls else chance.choice(TEXTS)
        return Turn(None, calls, [chance.choice(TEXTS) for _ in calls], follow_up)

    for step in plan.steps:
        engine.replies = step.replies[:1]
        body = perturbed_body(agent, chance, streams=chance.random() < 0.5)
        agent.go_on(await post(session, agent.dialect, body), results)
    (node,) = session.nodes
    assert_engines_own(node, engine)


async def mismatches_of(name: str, agent_type: AgentType, seeds: range) -> list[str]:
    wrong = []
    for seed in seeds:
        try:
            await play(name, agent_type, seed)
        except (AssertionError, ValueError) as error:
            wrong.append(f"{name} {agent_type.__name__} {seed}: {str(error)[:200]}")
    return wrong


@pytest.mark.parametrize("agent_type", AGENT_TYPES)
@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_perturbed_conversations_stay_one_sequence(name: str, agent_type: AgentType) -> None:
    assert await mismatches_of(name, agent_type, range(15)) == []


@pytest.mark.long
@pytest.mark.parametrize("agent_type", AGENT_TYPES)
@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_a_thousand_perturbed_conversations_stay_one_sequence(
    name: str, agent_type: AgentType
) -> None:
    assert await mismatches_of(name, agent_type, range(1000)) == []


words = st.text("ab \n", max_size=8)
thoughts = st.sampled_from(
    ["", "<think>\nhm\n</think>\n\n", "hm, <b> so\n</think>", "<think></think>"]
)
Key = Callable[[str], str]


@settings(max_examples=300)
@given(thoughts, words, st.integers(0, 10**6))
def test_kept_thoughts_with_other_space_mean_the_same(thought: str, said: str, seed: int) -> None:
    chance = random.Random(seed)
    text = thought + said

    spaced = thought.replace("\n", chance.choice(SPACES)) + chance.choice(SPACES) + said.strip()
    repeated = thought + thought + said if thought.startswith(START) else text

    meant = message_key({"role": "assistant", "content": text})
    assert message_key({"role": "assistant", "content": spaced}) == meant
    assert message_key({"role": "assistant", "content": repeated}) == meant


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("<think>a</think>x", "<think>b</think>x"),
        ("<think>a</think>x", "<think>a</think>y"),
        ("<think>a</think>", "a"),
        ("a b", "ab"),
        ("a\n\nb", "a b"),
    ],
)
def test_other_words_mean_something_else(first: str, other: str) -> None:
    keys = {message_key({"role": "assistant", "content": text}) for text in (first, other)}

    assert len(keys) == 2
