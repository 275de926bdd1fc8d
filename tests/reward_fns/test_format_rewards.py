"""Tags, think blocks, containment, and crossword answers."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.reward_fns.crossword_format_reward import (
    CrosswordFormatReward,
    crossword_format_reward,
)
from atroposlib.envs.reward_fns.format_reward import FormatReward, format_reward
from atroposlib.envs.reward_fns.r1_reward import (
    AccuracyXReward,
    FormatReasoningReward,
    R1Reward,
    accuracy_reward,
    format_reasoning_reward,
    parse_reasoning_response,
    r1_reward,
)

TWO_BLOCKS = "<think>a</think> b <think>c</think> d"


@pytest.mark.parametrize(
    ("completion", "parameters", "expected"),
    [
        ("<think>a</think>", {}, 1.0),
        ("<ANSWER>a\nb</Answer>", {}, 1.0),
        ("<answer>never closed", {}, 0.0),
        ("</think><think>", {}, 0.0),
        ("", {}, 0.0),
        ("<think>a</think>", {"require_all_tags": True}, 0.0),
        ("<think>a</think><answer>b</answer>", {"require_all_tags": True}, 1.0),
        ("<THINK>a</THINK>", {"case_sensitive": True}, 0.0),
        ("<a.b>x</a.b>", {"preferred_tags": ["a.b"]}, 1.0),
        ("<axb>x</axb>", {"preferred_tags": ["a.b"]}, 0.0),
        ("<think>a</think>", {"preferred_tags": []}, 0.0),
        ("<b>a</b>", {"preferred_tags": "b"}, 1.0),
        ("<B>a</B>", {"preferred_tags": ["B"], "case_sensitive": True}, 1.0),
        ("</b><b>a</b>", {"preferred_tags": ["b"]}, 1.0),
        ("<think>a</think>", {"weight": 0.5}, 0.5),
    ],
)
def test_format_reward(completion: str, parameters: dict[str, Any], expected: float) -> None:
    assert FormatReward(**parameters)([completion]) == [expected]


def test_legacy_format_reward_takes_tags() -> None:
    assert format_reward(["<think>a</think>", "<b>a</b>"]) == [1.0, 0.0]
    assert format_reward(["<think>a</think>", "<b>a</b>"], preferred_tags=["b"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "thinking", "response", "is_multiple"),
    [
        ("<think> a </think> b ", "a", "b", False),
        ("before <think>a</think>b", "a", "b", False),
        ("no block", "", "no block", False),
        ("<Think>a</Think>b", "", "<Think>a</Think>b", False),
        ("<think>never closed", "", "<think>never closed", False),
        (TWO_BLOCKS, "", TWO_BLOCKS, True),
        (5, "", "5", False),
    ],
)
def test_parse_reasoning_response(
    text: Any, thinking: str, response: str, is_multiple: bool
) -> None:
    assert parse_reasoning_response(text) == {
        "thinking_content": thinking,
        "response": response,
        "multiple_thinking": is_multiple,
    }


@pytest.mark.parametrize(
    ("completion", "parameters", "expected"),
    [
        ("<think>a</think> b", {}, 0.5),
        ("<think>a</think>", {}, 0.0),
        ("<think> </think> b", {}, 0.0),
        ("b", {}, 0.0),
        ("", {}, 0.0),
        ("<think>a</think>", {"require_response": False}, 0.5),
        ("b", {"require_thinking": False}, 0.5),
        (" ", {"require_thinking": False}, 0.0),
        (TWO_BLOCKS, {}, 0.0),
        (TWO_BLOCKS, {"require_thinking": False}, 0.0),
        (TWO_BLOCKS, {"allow_multiple_thinking": True}, 0.5),
        ("<think>a</think> b <think>c</think>", {"allow_multiple_thinking": True}, 0.0),
        ("<think>a</think> b", {"reward_value": 2.0, "weight": 3.0}, 6.0),
    ],
)
def test_format_reasoning(completion: str, parameters: dict[str, Any], expected: float) -> None:
    assert FormatReasoningReward(**parameters)([completion]) == [expected]


@pytest.mark.parametrize(
    ("completion", "solution", "parameters", "expected"),
    [
        ("The answer is Paris.", "paris", {}, 1.0),
        ("The answer is Paris.", "paris", {"case_sensitive": True}, 0.0),
        ("The answer is Paris.", "Paris", {"exact_match": True}, 0.0),
        ("<think>x</think> Paris ", "paris", {"exact_match": True}, 1.0),
        ("<think>Paris</think> Rome", "Paris", {}, 0.0),
        ("<think>Paris</think> a <think>b</think> c", "Paris", {}, 1.0),  # whole text
        ("it is 4", 4, {}, 1.0),
        ("it is 5", 4, {}, 0.0),
        ("anything", "", {}, 0.0),
        ("any thing", " ", {}, 0.0),
        ("None", None, {}, 0.0),
        ("4", "4", {"reward_value": 0.25}, 0.25),
    ],
)
def test_accuracyx(
    completion: str, solution: Any, parameters: dict[str, Any], expected: float
) -> None:
    assert AccuracyXReward(**parameters)([completion], solution=solution) == [expected]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think> The answer is 4", 1.5),
        ("4", 1.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> 5", 0.5),
        ("", 0.0),
    ],
)
def test_r1(completion: str, expected: float) -> None:
    assert R1Reward()([completion], solution="4") == [expected]
    assert r1_reward([completion], "4") == [expected]


def test_r1_weights_and_solutions_per_completion() -> None:
    reward = R1Reward(format_weight=2.0, accuracy_weight=3.0)

    assert reward(["<think>a</think> 4", "5"], solution=["4", "4"]) == [5.0, 0.0]
    assert format_reasoning_reward(["<think>a</think> b"]) == [0.5]
    assert accuracy_reward(["4", "5"], "4") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "parameters", "expected"),
    [
        ("1-Across: HELLO", {}, 1.0),
        ("well: 12-down: hello 3-Across: you", {}, 1.0),
        ("1-Across: W1", {}, 0.0),  # the whole word is examined
        ("1-Across: W-X", {}, 0.0),
        ("1-Across: HELLO, 2-Down: YOU.", {}, 1.0),
        ("1-Across: HELLO 2-Down: Y0U", {}, 0.0),
        ("1-Across: W1", {"penalize_invalid_chars": False}, 1.0),
        ("1-Across: ABC", {"valid_chars": "AB"}, 0.0),
        ("1-Across: ab", {"valid_chars": "AB"}, 1.0),
        ("Across: HELLO", {}, 0.0),  # no number
        ("1-Across:HELLO", {}, 0.0),  # no space
        ("HELLO", {}, 0.0),
        ("", {}, 0.0),
        ("HELLO", {"format_patterns": ["^H"]}, 1.0),
        ("1-Across: HI", {"reward_value": 0.5}, 0.5),
    ],
)
def test_crossword_format(completion: str, parameters: dict[str, Any], expected: float) -> None:
    assert CrosswordFormatReward(**parameters)([completion]) == [expected]


def test_legacy_crossword_format_reward() -> None:
    assert crossword_format_reward(["1-Across: HI", "HI"]) == [1.0, 0.0]
