"""No text a policy may write keeps a reward function busy: the work grows with its length only."""

from __future__ import annotations

import pytest

from atroposlib.envs.reward_fns import registry
from atroposlib.envs.reward_fns.accuracy_reward import _plain_number
from atroposlib.envs.reward_fns.cascading_r1_math_reward import format_reward
from tests.growth import assert_linear

pytestmark = pytest.mark.slow

NUM_CHARACTERS = 12_000
"""Length of the shorter text."""

PARTS = [
    "1",
    " ",
    "#",
    "#### ",
    "a",
    "<",
    "<think>",
    "</think>",
    "<answer>",
    "step ",
    "step 1",
    "1-Across: ",
    "1-Across: A ",
    "\\boxed{",
    "to begin",
    "to ",
    "- \n",
    "\n",
    ".",
    "1.",
    "kh",
]
NAMES = [
    "format",
    "format_reasoning",
    "accuracyx",
    "r1",
    "crossword_format",
    "reasoning_steps",
    "repetition_penalty",
]


@pytest.mark.parametrize("name", NAMES)
def test_reward_functions_take_long_texts(name: str) -> None:
    reward = registry.create(name)

    for part in PARTS:
        text = part * (NUM_CHARACTERS // len(part))
        assert_linear(lambda times, text=text: reward([text * times], solution="4"))
        assert_linear(
            lambda times, text=text: reward(["<think>a</think>" + text * times + "<"], solution="4")
        )


@pytest.mark.parametrize("part", PARTS)
def test_helpers_of_the_mathematical_rewards_take_long_texts(part: str) -> None:
    shorter = part * (NUM_CHARACTERS // len(part))

    def read(times: int) -> None:
        text = shorter * times
        _plain_number(text)
        format_reward([text, "<think>a</think>" + text + "<"])

    assert_linear(read)
