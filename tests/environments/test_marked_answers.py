from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.tasks.answers import boxed_answer, only_tagged, tagged_answer
from atroposlib.tasks.blackjack import (
    form_bonus,
    read_action,
    shorten_thinking,
)
from atroposlib.tasks.reasoning_gym import extract_answer

PIECES = ["<answer>", "</answer>", "<ANSWER>", "<answer", "a", " ", "\n", "</Answer>"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 3 </answer>", "3"),
        ("<Answer>3</ANSWER> <answer>4</answer>", "3"),
        ("<answer>\n3</answer><answer>4</answer>", "4"),
        ("<answer>1 <answer>2</answer>", "1 <answer>2"),
        ("<answer></answer>", ""),
        ("</answer>3<answer>", None),
        ("<answer>3", None),
        ("<an\u017fwer>3</answer>", None),  # a long s
        ("", None),
    ],
)
def test_tagged_answer_is_the_first_pair_on_a_line(text: str, answer: str | None) -> None:
    assert tagged_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<guess> e </guess>", "e"),
        ("<guess>\ne\n</guess>", "e"),
        ("<guess>a<guess>b</guess>", "a<guess>b"),
        ("<guess>a</guess></guess>", "a"),
        ("<guess>a</guess> <guess>", "a"),
        ("<guess>a</guess> <guess>b</guess>", None),
        ("</guess>a<guess>", None),
        ("<GUESS>a</GUESS>", None),
        ("", None),
    ],
)
def test_only_pair_of_tags(text: str, answer: str | None) -> None:
    assert only_tagged(text, "guess") == answer


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_tags_are_found_as_by_a_pattern(text: str) -> None:
    first = re.search("<answer>(.*?)</answer>", text, re.IGNORECASE)
    pairs = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)

    assert tagged_answer(text) == (first[1].strip() if first else None)
    assert only_tagged(text, "answer") == (pairs[0].strip() if len(pairs) == 1 else None)


THOUGHTS = ["<think>", "</think>", "<answer>a</answer>", "b", "\n"]


@given(st.lists(st.sampled_from(THOUGHTS), max_size=9).map("".join))
def test_thinking_is_left_out_as_by_a_pattern(text: str) -> None:
    visible = re.sub("<think>.*?</think>", "", text, flags=re.DOTALL)
    visible = visible.rsplit("</think>", 1)[-1].split("<think>", 1)[0]

    assert extract_answer(text) == ("a" if visible.count("<answer>") == 1 else None)


@pytest.mark.parametrize("tag", ["<answer>", "<guess>", "<think>", "<think></think>", "\\boxed{"])
def test_half_a_million_tags_are_read_at_once(tag: str) -> None:
    # Time that grew with the square of the length would be hours.
    text = tag * 500_000

    assert (tagged_answer(text), only_tagged(text, "guess"), boxed_answer(text)) == (None,) * 3
    assert (extract_answer(text), read_action(text)) == (None, None)
    assert form_bonus(text, is_valid=False, thinking_active=True) <= -0.4
    assert shorten_thinking(text, max_chars=10).endswith(tag)
