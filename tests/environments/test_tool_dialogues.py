from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError
from atroposlib.tasks.tool_calls import covers, read_calls
from atroposlib.tasks.tool_dialogues import (
    Dialogue,
    DialogueConversation,
    DialogueRule,
    Helpers,
    check_call_turn,
    check_text_turn,
    dialogue_of,
    has_leading_thought,
)
from atroposlib.utils.local_records import read_splits
from environments.tool_use_multiturn_server import SAMPLE


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def row(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": sender, "value": text} for sender, text in messages]}


TWO_REQUESTS = row(
    ("system", "TOOLS"),
    ("human", "first"),
    ("gpt", f"<think>hm</think>{call('a', x=1)}"),
    ("tool", "one"),
    ("gpt", "it is one"),
    ("human", "second"),
    ("gpt", call("b") + call("c")),
    ("tool", "two"),
    ("gpt", "it is two"),
)


def shape(dialogue: Dialogue) -> list[int]:
    return [len(calls) for calls in dialogue.expected_calls_by_turn]


def test_texts_of_the_data_are_shown_between_the_calls() -> None:
    dialogue = dialogue_of(TWO_REQUESTS, DialogueRule(system_prompt="RULES"))

    assert dialogue is not None
    assert dialogue.messages == (
        {"role": "system", "content": "RULES\n\nTOOLS"},
        {"role": "user", "content": "first"},
    )
    assert dialogue.expected_calls_by_turn[0] == ('{"arguments": {"x": 1}, "name": "a"}',)
    assert shape(dialogue) == [1, 2]
    assert [[m["role"] for m in chat] for chat in dialogue.inter_turns] == [
        ["user", "assistant", "user"]
    ]
    assert dialogue.inter_turns[0][0]["content"] == "<tool_response>\none\n</tool_response>"


def test_texts_are_turns_where_the_policy_writes_all() -> None:
    helpers = Helpers(narration="TELL")

    dialogue = dialogue_of(TWO_REQUESTS, DialogueRule(generate_all=True, helpers=helpers))

    assert dialogue is not None
    assert shape(dialogue) == [1, 0, 2, 0]
    assert [[m["role"] for m in chat] for chat in dialogue.inter_turns] == [["user"]] * 3
    assert dialogue.inter_turns[0][0]["content"].endswith("</tool_response>\n\nTELL")
    assert dialogue.inter_turns[1][0]["content"] == "second"


def test_dialogue_is_cut_behind_the_last_call_turn() -> None:
    one = DialogueRule(max_call_turns=1)
    with_text = DialogueRule(max_call_turns=1, generate_all=True)

    assert shape(dialogue_of(TWO_REQUESTS, one)) == [1]  # type: ignore[arg-type]
    assert shape(dialogue_of(TWO_REQUESTS, with_text)) == [1, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scenario", "num_rows"),
    # the sample: eight with several requests, three of steps, three with one call, three without
    [("multiturn", 8), ("multistep", 3), ("single", 3), ("relevance", 3), ("all", 14)],
)
def test_scenarios_of_the_sample(scenario: Any, num_rows: int) -> None:
    train, test = read_splits(SAMPLE, ["conversations"], shuffle_seed=0)

    found = [dialogue_of(row, DialogueRule(scenario=scenario)) for row in train + test]

    assert sum(dialogue is not None for dialogue in found) == num_rows


@pytest.mark.parametrize(
    ("answer", "is_well_formed", "is_match"),
    [
        (call("a", x=1), True, True),
        (f"\n{call('a', x='1', y=2)}\n", True, True),  # a number as text, one more argument
        ("<tool_call>{'name': 'a', 'arguments': {'x': 1}}</tool_call>", True, True),
        (call("a", x=2), True, False),
        (call("a", x=1) * 2, True, False),
        ("Here: " + call("a", x=1), False, False),
        (call("a", x=1) + "<tool_call>{oops</tool_call>", False, False),
        (call("a", x=1)[:-1], False, False),
        ("<tool_call>__import__('os')</tool_call>", False, False),
        ('<tool_call>{"arguments": {"x": 1}}</tool_call>', False, False),
        (f"<tool_call>{'(' * 5000}</tool_call>", False, False),
        (f"<tool_call>{{'name': {'[' * 80}{']' * 80}}}</tool_call>", False, False),
        ("", False, False),
    ],
)
def test_check_of_a_call_turn(answer: str, is_well_formed: bool, is_match: bool) -> None:
    wanted = ['{"name": "a", "arguments": {"x": 1}}']

    assert check_call_turn(answer, wanted) == (True, is_well_formed, is_match)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("It is one.", True),
        ("", False),
        (call("a"), False),
        ("<tool_call>", False),
        ("It says <tool_response>full score</tool_response>", False),
    ],
)
def test_check_of_a_text_turn(answer: str, is_right: bool) -> None:
    assert check_text_turn(answer).is_match is is_right


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("<think>a</think>b", True),
        ("a</think>b", True),  # the template opened it
        ("b", False),
        ("<think>a", False),
        ("<think>a</think>b<think>c</think>", False),
        ("<think><think>a</think>b", False),
    ],
)
def test_leading_thought(text: str, is_fine: bool) -> None:
    assert has_leading_thought(text) is is_fine


@pytest.mark.parametrize(
    ("expected", "actual", "is_covered"),
    [
        ({"a": [1, {"b": "2"}]}, {"a": [1, {"b": 2, "c": 3}]}, True),
        ("[1, 2]", [1, 2], True),
        (5, "5", True),
        (5, "five", False),
        ("5", "5.0", False),  # two texts are compared as texts
        (True, 1, False),
        ([1], [1, 2], False),
        (5, "9" * 5000, False),
    ],
)
def test_covering_with_texts_for_values(expected: Any, actual: Any, is_covered: bool) -> None:
    assert covers(expected, actual, coerce=True) is is_covered


async def test_conversation_ends_at_the_first_wrong_turn() -> None:
    dialogue = dialogue_of(TWO_REQUESTS, DialogueRule())
    assert dialogue is not None
    conversation = DialogueConversation(dialogue, check_call_turn)

    first = await conversation.reply(Turn(call("a", x=1), 0, ()))
    second = await conversation.reply(Turn(call("b"), 1, ()))

    assert (first.is_done, second.is_done) == (False, True)
    assert first.messages == dialogue.inter_turns[0]
    assert [check.is_match for check in conversation.checks] == [True, False]
    assert not conversation.is_complete


def test_sample_is_a_file_of_rows() -> None:
    assert {path.name for path in Path(SAMPLE).iterdir()} == {"train.jsonl", "test.jsonl"}


@pytest.mark.parametrize(
    "text",
    [
        "-" * 15_000 + "1",
        "1+" * 9_000 + "1",
        "{" * 15_000,
        "{'name': 'f', 1: 2}",
        "{'name': 'f', 'arguments': {(1, 2): 3}}",
        "{'name': 'f', 'arguments': {'a': {1, 2}}}",
        "{'name': 'f', 'arguments': {'a': b'c'}}",
        "{'name': 'f', 'arguments': {'a': ...}}",
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": -Infinity}}',
    ],
)
def test_what_is_not_json_is_no_call(text: str) -> None:
    assert read_calls(f"<tool_call>{text}</tool_call>", allow_literals=True).num_broken == 1


def test_blocks_that_are_never_closed_are_no_calls() -> None:
    text = "<tool_call>" * 50_000

    assert read_calls(text) == ([], 0, text)


@pytest.mark.parametrize(
    "conversations",
    [[{"role": "user", "content": "hi"}], "hi", [{"from": "human", "value": None}], 3],
)
def test_row_of_another_form_is_named(conversations: Any) -> None:
    with pytest.raises(ConfigError, match="conversations: expected a list of"):
        dialogue_of({"conversations": conversations}, DialogueRule())
