"""Reasoning prompts, and reasoning found wherever a provider puts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from environments.eval_environments.eval_helpers import (
    HERMES_REASONING_PROMPT,
    HERMES_REASONING_PROMPT_WITH_ANSWER,
    extract_reasoning_from_completion,
    extract_reasoning_from_response,
)

# Every place at once, in the order in which they are looked at.
PLACES: list[tuple[str, str, Any]] = [
    ("choice", "reasoning_content", "1"),
    ("message", "reasoning_content", "2"),
    ("message", "reasoning", "3"),
    ("choice", "reasoning_details", [{"type": "reasoning.encrypted"}, {"text": "4"}]),
    ("message", "reasoning_details", [{"text": ""}, {"text": "5"}]),
    ("choice", "reasoning", "6"),
]
TEXT = "<|start_of_scratchpad|>8<|end_of_scratchpad|><THINK> 7\n</think>answer"


def choice_of(places: list[tuple[str, str, Any]], content: str | None = None) -> dict[str, Any]:
    message = {name: value for owner, name, value in places if owner == "message"}
    choice = {name: value for owner, name, value in places if owner == "choice"}
    return {**choice, "message": {"role": "assistant", "content": content, **message}}


def as_object(choice: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**choice, "message": SimpleNamespace(**choice["message"])})


def test_prompts_name_their_tags() -> None:
    for prompt in (HERMES_REASONING_PROMPT, HERMES_REASONING_PROMPT_WITH_ANSWER):
        assert "<think>" in prompt
        assert "</think>" in prompt
    assert "<answer>" in HERMES_REASONING_PROMPT_WITH_ANSWER
    assert "<answer>" not in HERMES_REASONING_PROMPT


@pytest.mark.parametrize("first", range(len(PLACES)))
@pytest.mark.parametrize("shape", [dict, as_object])
def test_places_are_looked_at_in_order(first: int, shape: Any) -> None:
    choice = shape(choice_of(PLACES[first:], TEXT))

    assert extract_reasoning_from_response(choice) == (str(first + 1), PLACES[first][1])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (TEXT, ("7", "think_block")),
        ("<|start_of_scratchpad|>8<|end_of_scratchpad|>x", ("8", "scratchpad_block")),
        (
            "<think> </think><|start_of_scratchpad|>8<|end_of_scratchpad|>",
            ("8", "scratchpad_block"),
        ),
        ("<think>never closed", (None, "none")),
        ("plain", (None, "none")),
        ("", (None, "none")),
        (None, (None, "none")),
    ],
)
def test_text_is_looked_at_last(content: str | None, expected: tuple[str | None, str]) -> None:
    choice = choice_of(
        [("message", "reasoning", " "), ("choice", "reasoning_details", "x")], content
    )

    assert extract_reasoning_from_response(choice) == expected


def test_given_text_replaces_that_of_the_message() -> None:
    choice = choice_of([], "<think>a</think>")

    assert extract_reasoning_from_response(choice, "<think>b</think>") == ("b", "think_block")
    assert extract_reasoning_from_response(choice, "plain") == (None, "none")
    assert extract_reasoning_from_response(None, "<think>b</think>") == ("b", "think_block")


def test_choice_of_an_answer_is_taken_with_its_text() -> None:
    choices = [
        {"index": i, "finish_reason": "stop", "message": choice_of([], text)["message"]}
        for i, text in enumerate(["plain", TEXT])
    ]
    choices[0]["message"]["reasoning_content"] = "why"
    answer: dict[str, Any] = {"id": "x", "created": 0, "model": "m", "object": "chat.completion"}
    completion = ChatCompletion.model_validate({**answer, "choices": choices})

    first = extract_reasoning_from_completion(completion)
    second = extract_reasoning_from_completion(completion, choice_idx=1)

    assert first == ("why", "reasoning_content", "plain")
    assert second == ("7", "think_block", TEXT)


@pytest.mark.parametrize(
    ("completion", "choice_idx"),
    [
        ({"choices": []}, 0),
        ({"choices": [choice_of([], "x")]}, 1),
        ({"choices": [choice_of([], TEXT)]}, -1),
        ({"choices": None}, 0),
        (None, 0),
    ],
)
def test_missing_choice_has_no_reasoning(completion: Any, choice_idx: int) -> None:
    assert extract_reasoning_from_completion(completion, choice_idx) == (None, "none", None)


def test_reasoning_of_repeated_tags_takes_linear_time() -> None:
    chat = {"choices": [{"message": {"content": "<think>" * 100_000}}]}

    assert extract_reasoning_from_completion(chat).source == "none"
