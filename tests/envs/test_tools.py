from __future__ import annotations

import asyncio
import threading
from typing import Literal

import pytest

from atroposlib.envs.tools import Tool, ToolCall, parse_tool_calls, run_tool_calls
from atroposlib.errors import ConfigError


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Both are whole.

    Args:
        a: The first one,
            and a second line.
        b (int): The second one.

    Returns:
        The sum.
    """
    return a + b


async def find(title: str, unit: Literal["km", "m"], tags: list[str] | None = None) -> dict:
    return {"title": title, "unit": unit, "tags": tags}


def test_definition_comes_from_signature_and_docstring() -> None:
    assert Tool.of(add).definition() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nBoth are whole.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one, and a second line."},
                    "b": {"type": "integer", "description": "The second one.", "default": 1},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def test_definition_keeps_an_argument_called_title_and_shows_choices() -> None:
    parameters = Tool.of(find).definition()["function"]["parameters"]

    assert parameters["properties"]["title"] == {"type": "string"}
    assert parameters["properties"]["unit"]["enum"] == ["km", "m"]
    assert parameters["required"] == ["title", "unit"]


def test_function_without_parameters_or_docstring_is_a_tool() -> None:
    def now() -> str:
        return "noon"

    function = Tool.of(now).definition()["function"]

    assert (function["description"], function["parameters"]["properties"]) == ("", {})


def test_parameter_without_annotation_is_refused() -> None:
    def bad(a) -> None:  # type: ignore[no-untyped-def]
        """Nothing."""

    with pytest.raises(ConfigError, match=r"tool bad: parameter 'a' has no annotation"):
        Tool.of(bad)


def test_parameter_that_has_no_name_for_the_model_is_refused() -> None:
    def bad(*values: int) -> None:
        """Nothing."""

    with pytest.raises(ConfigError, match=r"parameter 'values' cannot be given by name"):
        Tool.of(bad)


def test_parse_reads_every_call_in_order() -> None:
    text = (
        'I look. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and\n'
        "<tool_call>{'name': 'find', 'arguments': {}}</tool_call>"
    )

    calls = parse_tool_calls(text)

    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1}), ("find", {})]


@pytest.mark.parametrize("text", ["", "no call", "</tool_call>"])
def test_parse_finds_no_call(text: str) -> None:
    assert parse_tool_calls(text) == []


@pytest.mark.parametrize(
    "content", ["{oops", "[1]", '"add"', '{"name": 3}', '{"arguments": {}}', ""]
)
def test_parse_says_what_is_no_call(content: str) -> None:
    [call] = parse_tool_calls(f"<tool_call>{content}</tool_call>")

    assert call.error is not None


def test_parse_takes_a_last_call_that_was_not_closed() -> None:
    [call] = parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}')

    assert (call.name, call.error) == ("add", None)


async def test_run_answers_in_the_order_of_the_calls() -> None:
    calls = [
        ToolCall(name="find", arguments={"title": "x", "unit": "m"}),
        ToolCall(name="add", arguments={"a": 2}),
    ]

    found, added = await run_tool_calls(calls, [Tool.of(add), Tool.of(find)], timeout_s=5.0)

    assert (added.content, added.is_error) == ("3", False)
    assert found.content == '{"title": "x", "unit": "m", "tags": null}'


async def test_calls_of_one_turn_run_at_the_same_time() -> None:
    gathered = asyncio.Barrier(3) if hasattr(asyncio, "Barrier") else None

    async def meet() -> str:
        if gathered is not None:
            await gathered.wait()
        return "met"

    results = await run_tool_calls([ToolCall(name="meet")] * 3, [Tool.of(meet)], timeout_s=5.0)

    assert [result.content for result in results] == ["met"] * 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall(name="nope"), "there is no tool 'nope'; there are add, find"),
        (ToolCall(error="not JSON"), "not JSON"),
        (ToolCall(name="add", arguments={"a": "x"}), "wrong arguments: a: Input should be"),
        (ToolCall(name="add", arguments={}), "a: Field required"),
        (ToolCall(name="add", arguments={"a": 1, "c": 2}), "c: Extra inputs are not permitted"),
        (ToolCall(name="add", arguments=[1]), "wrong arguments: arguments: Input should be"),
    ],
)
async def test_unusable_call_is_told_to_the_model(call: ToolCall, said: str) -> None:
    [result] = await run_tool_calls([call], [Tool.of(add), Tool.of(find)], timeout_s=5.0)

    assert result.is_error
    assert said in result.content


async def test_what_a_tool_raises_is_told_to_the_model() -> None:
    def divide(a: int) -> float:
        return 1 / a

    [result] = await run_tool_calls(
        [ToolCall(name="divide", arguments={"a": 0})], [Tool.of(divide)], timeout_s=5.0
    )

    assert (result.is_error, result.content) == (True, "ZeroDivisionError: division by zero")


async def test_cancellation_inside_a_tool_is_told_to_the_model() -> None:
    async def lose_connection() -> str:
        task = asyncio.create_task(asyncio.sleep(30))
        task.cancel()
        await task
        return "unreachable"

    [result] = await run_tool_calls(
        [ToolCall(name="lose_connection")], [Tool.of(lose_connection)], timeout_s=5.0
    )

    assert (result.is_error, result.content) == (True, "CancelledError: ")


async def test_answer_without_a_json_form_is_told_to_the_model() -> None:
    def count() -> dict[tuple[int, int], int]:
        return {(1, 2): 3}

    [result] = await run_tool_calls([ToolCall(name="count")], [Tool.of(count)], timeout_s=5.0)

    assert result.is_error
    assert result.content.startswith("TypeError: keys must be str")


async def test_tool_ends_with_its_cancelled_rollout() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return "late"

    running = asyncio.create_task(
        run_tool_calls([ToolCall(name="wait")], [Tool.of(wait)], timeout_s=5.0)
    )
    await started.wait()
    running.cancel()
    await asyncio.wait({running})

    assert running.cancelled()
    assert ended.is_set()


async def test_tool_out_of_time_is_told_to_the_model() -> None:
    async def wait() -> str:
        await asyncio.sleep(30)
        return "late"

    [result] = await run_tool_calls([ToolCall(name="wait")], [Tool.of(wait)], timeout_s=0.02)

    assert (result.is_error, result.content) == (True, "wait gave no answer within 0.02 s")


async def test_plain_function_does_not_hold_up_the_loop() -> None:
    started, loop_went_on = threading.Event(), threading.Event()

    def block() -> str:
        started.set()
        return "done" if loop_went_on.wait(30) else "the loop stood still"

    running = asyncio.create_task(
        run_tool_calls([ToolCall(name="block")], [Tool.of(block)], timeout_s=60.0)
    )
    while not started.is_set():  # noqa: ASYNC110 - set in another thread
        await asyncio.sleep(0.005)
    loop_went_on.set()

    [result] = await running
    assert result.content == "done"
