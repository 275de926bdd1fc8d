import logging
from typing import Any

import pytest

from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.message_history_utils import (
    ensure_trajectory_token_limit,
    strip_thinking,
    truncate_thinking,
)


class WordTokenizer:
    """One token per word; a chat renders as `role word word ... .` per message."""

    eos_token_id = None

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)

    def apply_chat_template(
        self, chat: Any, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> list[int]:
        text = " ".join(f"{m['role']} {m['content']} ." for m in chat)
        return self.encode(text + (" assistant" if add_generation_prompt else ""))


TOKENIZER = WordTokenizer()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<think>b</think>c", "ac"),
        ("a</think>b<think>c", "a</think>b<think>c"),
        ("a</think>b<think>c</think>", "a</think>b<think>c</think>"),
        ("<think>open", "<think>open"),
        ("<think>1</think>x<think>2</think>", "x<think>2</think>"),
    ],
)
def test_strip_thinking(text, expected):
    assert strip_thinking(text) == expected


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("a <think> one two three </think> b", 10, "a <think>\none two three\n</think> b"),
        ("a <think> one two three </think> b", 2, "a <think>\n... two three\n</think> b"),
        ("a <think> </think> b", 10, "a <think></think> b"),
        ("<think>x</think>", 0, "<think></think>"),
        ("<think>a b c\n\nd e</think>", 3, "<think>\n... d e\n</think>"),
        ("<think>a b c\n\nd e f g</think>", 3, "<think>\n... e f g\n</think>"),
        ("no tags", 1, "no tags"),
        ("</think><think>", 1, "</think><think>"),
    ],
)
def test_truncate_thinking(text, limit, expected):
    assert truncate_thinking(text, WordTokenizer(), limit) == expected


def test_truncate_thinking_failing_tokenizer_leaves_the_text(caplog):
    class Broken:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise RuntimeError("no vocabulary")

    assert truncate_thinking("<think>a b</think>", Broken(), 1) == "<think>a b</think>"
    assert "no vocabulary" in caplog.text


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def step_of(*chats: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    tokens = [TOKENIZER.apply_chat_template(chat) for chat in chats]
    return {
        "seed": 0,
        "parsed_actions": [],
        "messages": list(chats),
        "tokens": tokens,
        "masks": [[IGNORE_INDEX] * len(row) for row in tokens],
        "scores": [1.0] * len(chats),
        **extra,
    }


CHAT = [
    message("system", "rules"),  # 3 tokens each
    message("environment", "o1"),
    message("assistant", "a1"),
    message("environment", "o2"),
    message("assistant", "a2"),
]


def contents(step: dict[str, Any], alternative: int = 0) -> list[str]:
    return [m["content"] for m in step["messages"][alternative]]


def test_step_that_fits_is_the_same_object():
    step = step_of(CHAT)

    assert ensure_trajectory_token_limit([step], TOKENIZER, 15)[0] is step


def test_step_too_long_loses_a_pair_and_trains_on_the_last_reply():
    (shortened,) = ensure_trajectory_token_limit([step_of(CHAT)], TOKENIZER, 14)

    assert contents(shortened) == ["rules", "o2", "a2"]
    tokens, masks = shortened["tokens"][0], shortened["masks"][0]
    assert len(tokens) == len(masks) == 9
    # masked: system 3, environment 3, and the word that opens the reply
    assert masks == [IGNORE_INDEX] * 7 + tokens[7:]


def test_closing_observation_stays_masked():
    chat = [*CHAT, message("environment", "end")]

    (shortened,) = ensure_trajectory_token_limit([step_of(chat)], TOKENIZER, 17)

    assert contents(shortened) == ["rules", "o2", "a2", "end"]
    assert shortened["masks"][0][-3:] == [IGNORE_INDEX] * 3
    assert shortened["masks"][0][7:9] == shortened["tokens"][0][7:9]


def test_step_without_a_message_to_drop_is_left_out(caplog):
    assert ensure_trajectory_token_limit([step_of(CHAT)], TOKENIZER, 8) == []
    assert "without a message to drop" in caplog.text


def test_alternative_that_cannot_shrink_is_not_cut_down():
    short = [message("system", "rules"), message("assistant", "only")]

    (shortened,) = ensure_trajectory_token_limit([step_of(CHAT, short)], TOKENIZER, 10)

    assert contents(shortened, 0) == ["rules", "o2", "a2"]
    assert contents(shortened, 1) == ["rules", "only"]


def test_other_fields_stay_and_token_lists_are_cut_alike():
    step = step_of(CHAT, overrides=[{"a": 1}], advantages=[[float(i) for i in range(15)]])

    (shortened,) = ensure_trajectory_token_limit([step], TOKENIZER, 10)

    assert shortened["overrides"] == [{"a": 1}]
    assert shortened["scores"] == [1.0]
    # Tokens 3 to 8 have left, or the equal run 2 to 7: every message ends with the same token.
    assert len(shortened["advantages"][0]) == 9
    assert shortened["advantages"][0][:2] == [0.0, 1.0]
    assert shortened["advantages"][0][-6:] == [9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert step["messages"][0] is CHAT


@pytest.mark.parametrize("missing", ["messages", "tokens", "masks", "seed", "parsed_actions"])
def test_incomplete_step_is_left_out(missing, caplog):
    step = step_of(CHAT)
    step[missing] = None

    with caplog.at_level(logging.WARNING):
        assert ensure_trajectory_token_limit([step], TOKENIZER, 100) == []
    assert missing in caplog.text
