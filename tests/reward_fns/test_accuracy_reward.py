from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from atroposlib.envs.reward_fns import registry
from atroposlib.envs.reward_fns.accuracy_reward import (
    AccuracyReward,
    _extract_final_answer,
    _normalize_numerical_value,
    _verify_answer,
    accuracy_reward,
)
from atroposlib.envs.reward_fns.cascading_r1_math_reward import (
    accuracy_reward as cascading_accuracy,
)
from atroposlib.envs.reward_fns.cascading_r1_math_reward import (
    cascading_r1_math_reward,
    format_reward,
    get_completion_content,
)

SEVEN_BOXES = "\\boxed{4}" * 7


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("\\boxed{42}", "#### 42", 1.0),
        ("#### 42", "42", 1.0),
        ("\\boxed{1}", "2", 0.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{1,000}", "1000", 1.0),
        ("The answer is $4$.", "4", 1.0),
        ("$4$", "4", 0.0),  # LaTeX without an anchor
        ("42", "42", 0.0),  # a bare number
        ("", "42", 0.0),
        ("#### -5", "-5", 1.0),
        ("#### 5", "-5", 0.0),
        ("#### 1,000", "1000", 1.0),
        ("#### 1,000.5", "#### 1000.5", 1.0),
        ("so it is\n#### 7.\n", "7", 1.0),
        ("\\boxed{} #### 7", "7", 1.0),
        ("\\boxed{42}", "work #### 42\nmore", 1.0),
        ("\\boxed{42}", "\\boxed{42}", 1.0),
        ("#### 42", "\\boxed{42}", 1.0),
        ("\\boxed{42}", 42, 1.0),
        ("\\boxed{0.5}", 0.5, 1.0),
        ("\\boxed{4}", "", 0.0),
        ("\\boxed{4}", None, 0.0),
        ("\\boxed{4}<think>\\boxed{5}</think>", "4", 0.0),
        ("<think>\\boxed{5}</think>\\boxed{4}", "4", 1.0),
        ("a</think>\\boxed{5}</think>\\boxed{4}", "4", 1.0),
        ("</think>" + SEVEN_BOXES, "4", 0.0),  # too many boxes
        ("</think>" + "\\boxed{4}" * 6, "4", 1.0),
        (SEVEN_BOXES, "4", 1.0),  # no tag, no limit
    ],
)
def test_accuracy(completion: str, gold: Any, expected: float) -> None:
    assert accuracy_reward([completion], solution=gold) == [expected]
    assert cascading_accuracy([completion], gold) == [expected]


def test_accuracy_without_splitting_reads_everything() -> None:
    reward = AccuracyReward(split_on_think_tag=False)

    assert reward(["\\boxed{4}</think>"], solution="4") == [1.0]
    assert reward(["</think>" + SEVEN_BOXES], solution="4") == [1.0]


def test_accuracy_max_boxed_threshold_counts_behind_the_tag() -> None:
    reward = AccuracyReward(max_boxed_threshold=1)

    assert reward(["\\boxed{4}\\boxed{4}</think>\\boxed{4}"], solution="4") == [1.0]
    assert reward(["</think>\\boxed{4}\\boxed{4}"], solution="4") == [0.0]


def test_accuracy_ground_truth_wins_and_nothing_gives_zeros() -> None:
    completions = ["\\boxed{4}", "\\boxed{5}"]

    assert accuracy_reward(completions, solution="4", ground_truth="5") == [0.0, 1.0]
    assert accuracy_reward(completions, ["4", "4"]) == [1.0, 0.0]
    assert accuracy_reward(completions) == [0.0, 0.0]


def test_accuracy_gives_one_value_per_completion_for_a_short_list() -> None:
    assert accuracy_reward(["\\boxed{4}"] * 3, solution=["4"]) == [1.0, 0.0, 0.0]


def test_accuracy_gold_is_highest_and_empty_lowest() -> None:
    completions = ["<think>a</think>\\boxed{4}", "\\boxed{4", "4", "\\boxed{3}", ""]

    rewards = accuracy_reward(completions, solution="4")

    assert rewards[0] == max(rewards) == 1.0
    assert rewards[-1] == min(rewards) == 0.0


def test_accuracy_reads_messages() -> None:
    message = {"role": "assistant", "content": "\\boxed{4}"}

    assert accuracy_reward([message, [message], {"message": message}], "4") == [1.0] * 3


def test_accuracy_works_off_the_main_thread_and_logs_nothing_loud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewards: list[float] = []
    thread = threading.Thread(
        target=lambda: rewards.extend(accuracy_reward(["\\boxed{4}", "\\frac{"], "4"))
    )
    with caplog.at_level(logging.INFO):
        thread.start()
        thread.join()

    assert rewards == [1.0, 0.0]
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4.0),
        ("-1,234.5", -1234.5),
        ("\\boxed{7}", 7.0),
        ("x", None),
        ("25_8", None),
        ("nan", None),
        ("", None),
    ],
)
def test_normalize_numerical_value(text: str, number: float | None) -> None:
    assert _normalize_numerical_value(text) == number


def test_extract_final_answer() -> None:
    assert _extract_final_answer("a #### 5 \nb") == "5"
    assert _extract_final_answer(" 1/2 ") == "1/2"


def test_verify_answer_tolerance_is_for_plain_numbers() -> None:
    assert _verify_answer("#### 4.05", "4", tolerance=0.1)
    assert not _verify_answer("#### 4.05", "4")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think> \\boxed{4}", 1.5),
        ("\\boxed{4}", 1.0),
        ("<think>a</think> \\boxed{5}", 0.0),
        ("<think>a</think> <b> \\boxed{4}", 1.0),  # another <
        ("<think>1 < 2</think> \\boxed{4}", 1.0),
        ("well <think>a</think> \\boxed{4}", 1.0),  # not leading
        ("", 0.0),
    ],
)
def test_cascading_r1_math(completion: str, expected: float) -> None:
    assert cascading_r1_math_reward([completion], "4") == [expected]


def test_cascading_format_reward_needs_text_behind_the_block() -> None:
    texts = ["<think>a</think> b", "<think>a</think>", "<think>a</think> \n", "<think></think>b"]

    assert format_reward(texts, reward_value=2.0) == [2.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("a", "a"),
        ({"content": "a"}, "a"),
        ({"role": "user", "content": "a"}, "a"),
        ({"message": {"content": "a"}}, "a"),
        ([{"content": "a"}, {"content": "b"}], "a"),
        ([], "[]"),
        ({}, "{}"),
        (4, "4"),
    ],
)
def test_get_completion_content(completion: Any, text: str) -> None:
    assert get_completion_content(completion) == text


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("<think>Rome?</think>It is <answer> paris. </answer>", "Paris", 1.0),
        ("<answer>Rome</answer> no: <answer>Paris</answer>", "Paris", 1.0),
        ("So it must be\nNew  York", "new york", 1.0),
        ("<answer>\\boxed{42}</answer>", 42, 1.0),
        ("It is \\boxed{\\text{Paris}}.", "Paris", 1.0),
        ("It is $\\boxed{\\mathbf{Paris}}$, not \\boxed{\\text{Rome}}.", "Paris", 0.0),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("\\boxed{1{,}000}", "1000", 1.0),
        ("<answer>$\u22125$</answer>", "-5", 1.0),
        ("<think>Perhaps \\boxed{5}", "5", 0.0),
        ("<think>a</think>\\boxed{5", "5", 0.0),
        ("<answer>1,000.0</answer>", "1000", 1.0),
        ("<answer>12</answer>", "4 * 3 #### 12", 1.0),
        ("<answer>Paris or Rome</answer>", "Paris", 0.0),
        ("Paris\nor Rome", "Paris", 0.0),
        ("<answer></answer>\nParis", "Paris", 0.0),
        ("", "", 0.0),
        ("", None, 0.0),
    ],
)
def test_answer_text(completion: str, gold: object, reward: float) -> None:
    assert registry.create("answer_text")([completion], solution=gold) == [reward]
