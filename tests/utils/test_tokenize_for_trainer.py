from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from atroposlib.utils.tokenize_for_trainer import (
    tokenize_for_trainer,
    tokenize_for_trainer_dpo,
    tokenize_for_trainer_multistep,
)
from tests.fakes import CharTokenizer
from tests.templates.make_tokenizers import load_tokenizer

HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
# [user]hi</s>\n[assistant]hello</s>\n: 6 + 2 + 1 + 1 and 11 characters of prefix
PREFIX = 21


def trained_text(row: dict[str, Any]) -> str:
    kept = [t for t, m in zip(row["tokens"], row["masks"], strict=True) if m != -100]
    assert all(m in (-100, t) for t, m in zip(row["tokens"], row["masks"], strict=True))
    return CharTokenizer().decode(kept)


def test_default_trains_on_the_last_message_only() -> None:
    tokenizer = CharTokenizer()

    row = tokenize_for_trainer(tokenizer, [HI, HELLO])

    assert row["tokens"] == tokenizer.apply_chat_template([HI, HELLO])
    assert row["masks"][:PREFIX] == [-100] * PREFIX
    assert row["masks"][PREFIX:] == row["tokens"][PREFIX:]
    assert set(row) == {"tokens", "masks"}


def test_messages_are_included_as_the_same_object() -> None:
    chat = [HI, HELLO]

    assert tokenize_for_trainer(CharTokenizer(), chat, True)["messages"] is chat


def test_all_turns_train_on_every_assistant_message() -> None:
    chat = [HI, HELLO, HI, {"role": "agent", "content": "again"}, HI]

    row = tokenize_for_trainer(CharTokenizer(), chat, train_on_all_assistant_turns=True)

    # `agent` opens with another header than the generation prompt, one token per character:
    # [assistant] is 11 long, [agent] 7, so four characters of `again` lie before the span.
    assert trained_text(row) == "hello</s>\nn</s>\n"


def test_multistep_trains_on_the_last_assistant_message_and_masks_what_follows() -> None:
    chat = [
        HI,
        HELLO,
        HI,
        {"role": "assistant", "content": "bye"},
        {"role": "tool", "content": "x"},
    ]

    assert trained_text(tokenize_for_trainer_multistep(CharTokenizer(), chat)) == "bye</s>\n"


def test_multistep_without_an_assistant_message_masks_everything() -> None:
    assert trained_text(tokenize_for_trainer_multistep(CharTokenizer(), [HI])) == ""


class EndingTokenizer(CharTokenizer):
    """Renders nothing behind the last end token."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        ids = super().apply_chat_template(*args, **kwargs)
        return ids[:-1] if ids[-1] == ord("\n") else ids


@pytest.mark.parametrize(
    "options", [{"finish_reason": "length"}, {"include_messages": "length"}], ids=str
)
def test_truncated_completion_loses_the_end_token_it_never_had(options: dict[str, Any]) -> None:
    whole = tokenize_for_trainer(EndingTokenizer(), [HI, HELLO])

    cut = tokenize_for_trainer(EndingTokenizer(), [HI, HELLO], **options)

    assert cut["tokens"] == whole["tokens"][:-1]
    assert cut["masks"] == whole["masks"][:-1]
    assert whole["tokens"][-1] == CharTokenizer.eos_token_id


def test_finished_completion_keeps_its_end_token() -> None:
    row = tokenize_for_trainer(EndingTokenizer(), [HI, HELLO], finish_reason="stop")

    assert row["tokens"][-1] == CharTokenizer.eos_token_id


class MappingTokenizer(CharTokenizer):
    """Returns a mapping unless told otherwise, as transformers 5 does."""

    def apply_chat_template(self, conversation: Any, *_: Any, **options: Any) -> Any:
        return super().apply_chat_template(conversation, **{"return_dict": True, **options})


class PlainTokenizer:
    """Knows no option but the two old ones."""

    eos_token_id = 2

    def apply_chat_template(
        self, chat: Sequence[Any], tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        return CharTokenizer().apply_chat_template(
            chat, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )


class StubbornTokenizer(PlainTokenizer):
    """Always returns a mapping."""

    def apply_chat_template(
        self, chat: Sequence[Any], tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        return {"input_ids": super().apply_chat_template(chat, tokenize, add_generation_prompt)}


@pytest.mark.parametrize("tokenizer_cls", [MappingTokenizer, PlainTokenizer, StubbornTokenizer])
def test_ids_are_a_plain_list_with_every_kind_of_tokenizer(tokenizer_cls: type[Any]) -> None:
    assert tokenize_for_trainer(tokenizer_cls(), [HI, HELLO]) == tokenize_for_trainer(
        CharTokenizer(), [HI, HELLO]
    )


def test_reply_is_trained_if_the_template_drops_earlier_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Rewriting(CharTokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            rewritten = conversation if len(conversation) < 4 else conversation[2:]
            return super().apply_chat_template(rewritten, **options)

    chat = [HI, {"role": "assistant", "content": "<think>a</think>b"}, HI, HELLO]

    with caplog.at_level(logging.WARNING):
        row = tokenize_for_trainer(Rewriting(), chat)

    assert trained_text(row) == "hello</s>\n"
    assert caplog.text == ""


class Closing(CharTokenizer):
    """Ends the last turn otherwise than those before, as the template of Phi 3."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        ids = super().apply_chat_template(conversation, **options)
        return ids if options.get("add_generation_prompt") else [*ids, self.eos_token_id]


class Opening(CharTokenizer):
    """Opens replies with a thought that it leaves out of chats, as that of DeepSeek R1."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        ids = super().apply_chat_template(conversation, **options)
        return [*ids, *map(ord, "<think>")] if options.get("add_generation_prompt") else ids


def test_template_that_writes_another_end_before_a_message_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenize_for_trainer(Closing(), [HI, HELLO, HI], train_on_all_assistant_turns=True)

    assert "the first 2 messages differently when message 2 follows" in caplog.text


@pytest.mark.parametrize("text", ["hello", "<think>why</think> hello", "  hello"])
def test_turn_starts_with_its_text_if_the_prompt_opens_a_thought(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Dropping(Opening):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            shown = [
                {**m, "content": m["content"].rpartition("</think>")[2].strip()}
                for m in conversation
            ]
            return super().apply_chat_template(shown, **options)

    chat = [HI, {"role": "assistant", "content": text}, HI, HELLO]

    with caplog.at_level(logging.WARNING):
        last = tokenize_for_trainer(Dropping(), chat[:2])
        both = tokenize_for_trainer(Dropping(), chat, train_on_all_assistant_turns=True)

    assert trained_text(last) == "hello</s>\n"
    assert trained_text(both) == "hello</s>\nhello</s>\n"
    assert caplog.text == ""


def test_another_opening_without_the_text_behind_it_keeps_its_length_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Other(CharTokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            ids = super().apply_chat_template(conversation, **options)
            return [*ids[:-2], *map(ord, ">]")] if options.get("add_generation_prompt") else ids

    with caplog.at_level(logging.WARNING):
        row = tokenize_for_trainer(Other(), [HI, HELLO])

    assert row["masks"][:PREFIX] == [-100] * PREFIX
    assert row["masks"][PREFIX:] == row["tokens"][PREFIX:]
    assert "the first 1 messages differently when message 1 follows" in caplog.text


def test_dpo_renders_both_sides() -> None:
    pair = tokenize_for_trainer_dpo(CharTokenizer(), [HI, HELLO], [HI, HI])

    assert pair["chosen_tokens"] == tokenize_for_trainer(CharTokenizer(), [HI, HELLO])["tokens"]
    assert set(pair) == {"chosen_tokens", "chosen_masks", "rejected_tokens", "rejected_masks"}


def test_texts_are_trained_with_a_template_that_reads_only_parts() -> None:
    tokenizer = load_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{% for p in m['content'] %}"
        "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )

    row = tokenize_for_trainer(tokenizer, [HI, HELLO])

    trained = [mask for mask in row["masks"] if mask != -100]
    assert tokenizer.decode(trained) == "<|im_start|>hello<|im_end|>"
