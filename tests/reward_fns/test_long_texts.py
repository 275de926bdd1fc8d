"""No text a policy may write keeps a reward function busy: the work grows with its length only."""

from __future__ import annotations

import time

import pytest

from atroposlib.envs.reward_fns import registry
from atroposlib.envs.reward_fns.accuracy_reward import _plain_number
from atroposlib.envs.reward_fns.cascading_r1_math_reward import format_reward

pytestmark = pytest.mark.slow

NUM_CHARACTERS = 400_000
LIMIT_S = 3.0
"""Ten times what the slowest takes; work that grows with the square takes minutes."""

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
    texts = [part * (NUM_CHARACTERS // len(part)) for part in PARTS]
    texts += ["<think>a</think>" + text + "<" for text in texts]

    slowest = 0.0
    for text in texts:
        start = time.process_time()
        reward([text], solution="4")
        slowest = max(slowest, time.process_time() - start)

    assert slowest < LIMIT_S


@pytest.mark.parametrize("part", PARTS)
def test_helpers_of_the_mathematical_rewards_take_long_texts(part: str) -> None:
    text = part * (NUM_CHARACTERS // len(part))

    start = time.process_time()
    _plain_number(text)
    format_reward([text, "<think>a</think>" + text + "<"])

    assert time.process_time() - start < LIMIT_S
