"""Whole conversations through tracked sessions hold the engine's own tokens, for every template."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.managed_server import ManagedServer
from tests.server_handling.conversation_plans import (
    TEXTS,
    THINKING,
    WAYS_BACK,
    Plan,
    Reply,
    Step,
    random_plan,
)
from tests.server_handling.random_conversations import Agent, Family
from tests.templates.make_tokenizers import FAMILIES, FOLDER, load_tokenizer, save_tokenizer

pytestmark = pytest.mark.slow

NAMES = sorted(FAMILIES)
OTHER_ENDS = ("<|eom_id|>", "<|endoftext|>")

texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts)


@cache
def family_of(name: str) -> Family:
    """Load a tokenizer once for all tests."""
    family, tokenizer = FAMILIES[name], load_tokenizer(name)
    ends = [family.specials[0], *(end for end in OTHER_ENDS if end in family.specials)]
    ids = tuple(tokenizer.convert_tokens_to_ids(ends))
    return Family(name, tokenizer, family.tool_parser, ids)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    arguments = st.dictionaries(texts, values, max_size=3).map(json_of)
    calls = st.tuples(st.sampled_from(["search", "get_time"]), arguments)
    return Reply(
        text=draw(st.sampled_from(THINKING)) + draw(texts),
        calls=tuple(draw(st.lists(calls, max_size=3))),
        is_broken=draw(st.booleans()),
        cut=draw(st.one_of(st.none(), st.integers(0, 30))),
        end=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    step = st.builds(
        Step,
        user=texts,
        replies=st.lists(replies(), min_size=1, max_size=3).map(tuple),
        follow=st.integers(0, 2),
        way_back=st.sampled_from(WAYS_BACK),
        path=st.sampled_from(["on", "on", "on", "again", "edit", "back"]),
        result=texts,
    )
    steps = draw(st.lists(step, min_size=1, max_size=5).map(tuple))
    return Plan(steps, system=draw(st.one_of(st.none(), texts)), has_tools=draw(st.booleans()))


def json_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


async def mismatches_of(name: str, num_conversations: int) -> list[str]:
    """Return what is wrong with each of some random conversations that is not as it must be."""
    wrong = []
    for seed in range(num_conversations):
        plan = random_plan(random.Random(f"{name}-{seed}"))
        try:
            await Agent(family_of(name), plan, track_tree=seed % 2 == 1).play()
        except AssertionError as error:
            wrong.append(f"{name} {seed}: {error}")
    return wrong


@pytest.mark.parametrize("name", NAMES)
async def test_random_conversations_hold_the_engines_tokens(name: str) -> None:
    assert await mismatches_of(name, 60) == []


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
async def test_a_thousand_random_conversations_hold_the_engines_tokens(name: str) -> None:
    assert await mismatches_of(name, 1000) == []


@pytest.mark.parametrize("name", NAMES)
@given(plan=plans(), track_tree=st.booleans())
@settings(max_examples=20)
async def test_any_conversation_holds_the_engines_tokens(
    name: str, plan: Plan, track_tree: bool
) -> None:
    await Agent(family_of(name), plan, track_tree=track_tree).play()


@pytest.mark.parametrize("name", NAMES)
async def test_empty_reply_is_told_from_a_thought_with_nothing_behind_it(name: str) -> None:
    # The first turn makes the prompt one that the template would have written differently.
    replies = (Reply("because</think>"), Reply(""))
    steps = (Step("", (Reply(""),)), Step("", replies, follow=1), Step("", (Reply(""),)))

    await Agent(family_of(name), Plan(steps), track_tree=False).play()


@pytest.mark.parametrize("name", NAMES)
async def test_three_turns_with_tools_are_one_sequence(name: str) -> None:
    call = ("search", '{"query": "cats"}')
    steps = (
        Step("find cats", (Reply("<think>\nwhy\n</think>\n\n", (call, call)),), way_back="no ids"),
        Step("", (Reply("because</think>\nThree cats. "),), way_back="no thinking"),
        Step("thanks", (Reply("10"),)),
    )
    agent = Agent(family_of(name), Plan(steps, system="Be kind."), track_tree=False)

    await agent.play()

    (node,) = agent.session.get_state()["nodes"]
    assert node.tokens == agent.expected[-1].tokens
    trained = [
        token for token, mask in zip(node.tokens, node.masked_tokens, strict=True) if mask != -100
    ]
    assert trained == [token for outputs in agent.engine.outputs for token in outputs[0]]
    assert "template" in node.metadata["extended_by_tokens"]  # thinking came back left out


@pytest.mark.parametrize("name", NAMES)
def test_shipped_tokenizer_is_what_the_script_makes(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name

    save_tokenizer(FAMILIES[name], folder)

    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert folder.joinpath(file).read_text("utf-8") == (FOLDER / name / file).read_text("utf-8")
        assert (FOLDER / name / file).stat().st_size < 60_000


SPACED_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] | trim }} </s>{% endif %}{% endfor %}"
)


class RepeatingEngine:
    """Samples the same ids for every prompt."""

    config = SimpleNamespace(model_name="m")

    def __init__(self, reply: list[int]) -> None:
        self.reply = reply

    async def tokens_and_logprobs_completion(self, *, input_ids: list[int], **_: Any) -> Any:
        return input_ids, [self.reply], [[-0.5] * len(self.reply)], ["stop"]


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize("ends", [["</s>"], ["<s>", "</s>"]])
async def test_end_after_a_space_of_the_template_is_there_once(
    ends: list[str], is_restored: bool
) -> None:
    tokenizer = load_tokenizer("mistral")
    tokenizer.chat_template = SPACED_TEMPLATE
    ids = tokenizer.encode("yes", add_special_tokens=False)
    engine = RepeatingEngine([*ids, *tokenizer.convert_tokens_to_ids(ends)])
    session = ManagedServer(engine, tokenizer)
    first = await session.completion(prompt="[INST] a [/INST]")
    if is_restored:  # as by a turn journal, in another process
        nodes, session = session.get_state()["nodes"], ManagedServer(engine, tokenizer)
        session.current_nodes += nodes

    await session.completion(prompt=f"[INST] a [/INST]{first.choices[0].text} </s>[INST] b [/INST]")

    (node,) = session.get_state()["nodes"]
    end = "".join(ends)
    assert tokenizer.decode(node.tokens) == f"<s>[INST] a [/INST]yes{end}[INST] b [/INST]yes{end}"


async def test_end_after_a_space_of_the_template_is_there_once_in_a_chat() -> None:
    tokenizer = load_tokenizer("mistral")
    tokenizer.chat_template = SPACED_TEMPLATE
    ids = tokenizer.encode("yes", add_special_tokens=False)
    session = ManagedServer(
        RepeatingEngine([*ids, tokenizer.bos_token_id, tokenizer.eos_token_id]), tokenizer
    )
    messages: list[Any] = [{"role": "user", "content": "a"}]
    answer = await session.chat_completion(messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    messages.append({"role": "user", "content": "b"})

    await session.chat_completion(messages=messages)

    (node,) = session.get_state()["nodes"]
    assert " </s>" not in tokenizer.decode(node.tokens)
