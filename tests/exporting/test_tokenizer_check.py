"""Tokenizers that fit groups and tokenizers that do not, also where they differ little."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.texts import check_tokenizer, find_text, message_texts
from tests.templates.make_tokenizers import load_tokenizer

PAIRS = [("qwen2_5", "llama3"), ("llama3", "qwen2_5")]
FAMILIES = ["qwen2_5", "qwen3", "llama3", "mistral", "chatml"]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "price", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: load_tokenizer(name) for name in FAMILIES}


def shop_chat(item: int, answer: str, *, calls: bool = True) -> list[dict[str, Any]]:
    """Two questions; the first one is answered with the help of a tool."""
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "price", "arguments": {"item": item}},
    }
    looked_up = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": f'{{"price": {item}}}'},
    ]
    return [
        {"role": "user", "content": f"What does item {item} cost?"},
        *(looked_up if calls else []),
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And two of them?"},
        {"role": "assistant", "content": f"{2 * item}"},
    ]


def row_of(tokenizer: Any, chat: list[dict[str, Any]], **words: Any) -> tuple[Any, Any]:
    """Ids of a chat, and masks that train on what follows its first question."""
    text = tokenizer.apply_chat_template(chat, tokenize=False, **words)
    asked = tokenizer.apply_chat_template(
        chat[: 1 + (chat[0]["role"] == "system")],
        tokenize=False,
        add_generation_prompt=True,
        **words,
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    num_prompt = len(tokenizer.encode(asked, add_special_tokens=False))
    return ids, [-100] * num_prompt + ids[num_prompt:]


def groups_of(
    tokenizer: Any, chats: list[list[dict[str, Any]]], *, messages: bool = True, **words: Any
) -> list[ExportGroup]:
    """One group of one trajectory for each chat."""
    groups = []
    for chat in chats:
        ids, mask = row_of(tokenizer, chat, **words)
        groups.append(ExportGroup([ids], [1.0], [mask], [chat] if messages else None))
    return groups


def shop_chats(*, calls: bool = True) -> list[list[dict[str, Any]]]:
    return [shop_chat(item, f"It is {item}.", calls=calls) for item in range(1, 9)]


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize(("made_with", "named"), PAIRS)
def test_tokenizer_that_differs_in_special_tokens_is_refused(
    made_with: str, named: str, calls: bool, tokenizers: dict[str, Any]
) -> None:
    groups = groups_of(tokenizers[made_with], shop_chats(calls=calls), tools=TOOLS)

    mismatch = check_tokenizer(tokenizers[named], groups)

    assert mismatch is not None
    assert mismatch.is_certain
    assert "other special tokens than its chat template writes" in mismatch.reason


@pytest.mark.parametrize(("made_with", "named"), PAIRS)
def test_short_plain_answers_do_not_hide_special_tokens(
    made_with: str, named: str, tokenizers: dict[str, Any]
) -> None:
    chats = [
        [{"role": "user", "content": f"{i} + {i}?"}, {"role": "assistant", "content": f"{i + i}"}]
        for i in range(8)
    ]

    mismatch = check_tokenizer(tokenizers[named], groups_of(tokenizers[made_with], chats))

    assert mismatch is not None
    assert mismatch.is_certain


@pytest.mark.parametrize(("made_with", "named"), PAIRS)
def test_special_tokens_of_groups_without_messages_are_warned_about(
    made_with: str, named: str, tokenizers: dict[str, Any]
) -> None:
    groups = groups_of(tokenizers[made_with], shop_chats(), messages=False, tools=TOOLS)

    mismatch = check_tokenizer(tokenizers[named], groups)

    assert mismatch is not None
    assert not mismatch.is_certain
    assert "8 of 8 prompts end with other special tokens" in mismatch.reason


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("words", [{}, {"tools": TOOLS}])
@pytest.mark.parametrize("name", FAMILIES)
def test_right_tokenizer_is_taken(
    name: str, words: dict[str, Any], messages: bool, tokenizers: dict[str, Any]
) -> None:
    groups = groups_of(tokenizers[name], shop_chats(), messages=messages, **words)

    assert check_tokenizer(tokenizers[name], groups) is None


def changed(chat: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The chat as an environment may tell it, beside tokens that hold the whole of it."""
    *before, last = chat
    if kind == "only the answer":
        return [last]
    if kind == "an image beside the text":
        return [{"role": "user", "content": [{"type": "image"}]}, *chat[1:]]
    if kind == "answers that were read":
        return [*before, {**last, "content": "ANSWER"}]
    if kind == "contents missing":
        return [{"role": message["role"]} for message in chat]
    return "no chat"  # type: ignore[return-value]


@pytest.mark.parametrize(
    "kind",
    ["only the answer", "an image beside the text", "answers that were read", "contents missing",
     "no chat"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "mistral"])
def test_messages_that_tell_less_than_the_tokens_speak_against_nothing(
    name: str, kind: str, tokenizers: dict[str, Any]
) -> None:
    groups = groups_of(tokenizers[name], shop_chats())
    for group, chat in zip(groups, shop_chats(), strict=True):
        group.messages = [changed(chat, kind)]

    assert check_tokenizer(tokenizers[name], groups) is None


def test_thinking_that_the_template_drops_is_not_missed(tokenizers: dict[str, Any]) -> None:
    chats = [shop_chat(i, f"<think>I look up {i} first</think>\n\nIt is {i}.") for i in range(8)]

    groups = groups_of(tokenizers["qwen3"], chats)

    assert "I look up 3 first" not in tokenizers["qwen3"].decode(groups[3].tokens[0])
    assert check_tokenizer(tokenizers["qwen3"], groups) is None


def test_completions_that_were_cut_speak_against_nothing(tokenizers: dict[str, Any]) -> None:
    groups = groups_of(tokenizers["llama3"], shop_chats())
    for group in groups:
        num_prompt = group.masks[0].count(-100) if group.masks else 0
        group.tokens = [group.tokens[0][: num_prompt + 3]]
        group.masks = [group.masks[0][: num_prompt + 3]] if group.masks else None

    assert check_tokenizer(tokenizers["llama3"], groups) is None


@pytest.mark.parametrize("name", ["qwen2_5", "llama3"])
@pytest.mark.parametrize("has_template", [True, False])
def test_plain_text_of_a_base_model_speaks_against_nothing(name: str, has_template: bool) -> None:
    tokenizer = load_tokenizer(name)
    if not has_template:
        tokenizer.chat_template = None
    groups = []
    for chat in shop_chats(calls=False):
        texts = [f"{message['role']}: {message['content']}" for message in chat]
        text = (tokenizer.bos_token or "") + tokenizer.eos_token.join(texts)
        ids = tokenizer.encode(text, add_special_tokens=False)
        groups.append(ExportGroup([ids], [1.0], [[-100] * 20 + ids[20:]], [chat]))

    assert check_tokenizer(tokenizer, groups) is None


def test_image_tokens_before_a_text_are_no_opening(tokenizers: dict[str, Any]) -> None:
    tokenizer = load_tokenizer("qwen2_5")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    chats = shop_chats()
    groups = groups_of(tokenizer, chats)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for group, chat in zip(groups, chats, strict=True):
        text = tokenizer.decode(group.tokens[0])
        at = len(tokenizer.encode(text[: text.index(chat[0]["content"])]))
        group.tokens[0][at:at] = [image] * 3
        group.masks = None

    assert check_tokenizer(tokenizer, groups) is None


def test_texts_of_messages_are_found_as_templates_write_them() -> None:
    [thought, result] = message_texts(
        [
            {"role": "assistant", "content": " <think>a</think>\n\nIt is so. "},
            {"role": "tool", "content": '{"say": "ä"}'},
            {"role": "assistant", "content": "dropped", "tool_calls": [{}]},
            {"role": "user", "content": [{"type": "image"}]},
        ]
    )

    assert find_text("x It is so.", thought) == (2, 11)
    assert find_text("It is <think>a</think>", thought) is None
    assert find_text(r'"{\"say\": \"ä\"}"', result) is not None
    assert find_text(r'"{\"say\": \"\u00e4\"}"', result) is not None
