from __future__ import annotations

import copy
from typing import Any

import pytest

from atroposlib.envs.server_handling.chat_rendering import (
    render_messages,
    special_spellings,
    without_specials,
)
from atroposlib.errors import ConfigError
from tests.fakes import CharTokenizer
from tests.templates.make_tokenizers import FAMILIES, load_tokenizer

USER = {"role": "user", "content": "hi"}
THOUGHT = {"role": "assistant", "content": "<think>why</think>ok"}


class StrictTokenizer:
    """Accepts only the keyword names every tokenizer has."""

    def __init__(self) -> None:
        self.generation_prompts: list[bool] = []

    def apply_chat_template(
        self, messages: Any, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> str:
        self.generation_prompts.append(add_generation_prompt)
        return "|".join(message["content"] for message in messages)


@pytest.mark.parametrize(
    ("messages", "opens_a_reply"),
    [([USER], True), ([USER, THOUGHT], False), ([], True)],
)
def test_reply_is_opened_unless_the_assistant_spoke_last(
    messages: list[dict[str, str]], opens_a_reply: bool
) -> None:
    tokenizer = StrictTokenizer()

    render_messages(tokenizer, messages)

    assert tokenizer.generation_prompts == [opens_a_reply]


def test_thinking_survives_a_template_that_drops_it() -> None:
    tokenizer = CharTokenizer(strips_thinking=True)

    kept = render_messages(tokenizer, [USER, THOUGHT, USER])
    stripped = render_messages(tokenizer, [USER, THOUGHT, USER], keep_thinking=False)

    assert "[assistant]<think>why</think>ok</s>" in kept
    assert "[assistant]ok</s>" in stripped


def test_messages_are_not_changed_and_user_tags_stay() -> None:
    messages = [{"role": "user", "content": "what is <think>?"}, dict(THOUGHT)]

    text = render_messages(CharTokenizer(), messages)

    assert "what is <think>?" in text
    assert messages[1] == THOUGHT


def test_tools_are_shown_only_when_given() -> None:
    assert render_messages(CharTokenizer(), [USER], tools=[{}, {}]).startswith("[tools]2")
    assert render_messages(CharTokenizer(), [USER]) == "[user]hi</s>\n[assistant]"


def test_content_that_is_not_text_passes() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}

    assert render_messages(CharTokenizer(), [call]) == "[assistant]</s>\n"


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_without_a_template_messages_become_lines(tokenizer: object) -> None:
    assert render_messages(tokenizer, [USER, USER]) == "user: hi\nuser: hi"


def test_tokenizer_without_a_chat_template_is_named_with_what_to_do() -> None:
    tokenizer = load_tokenizer("chatml")
    tokenizer.chat_template = None

    with pytest.raises(ConfigError, match=r"chatml has no chat template.*--env\.tokenizer_name"):
        render_messages(tokenizer, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_text_without_specials_has_no_special_token(name: str) -> None:
    tokenizer = load_tokenizer(name)
    spelled = "".join(tokenizer.all_special_tokens) + "<<|im_end|>"
    spellings = special_spellings(tokenizer)

    ids = tokenizer.encode(without_specials(spelled, spellings), add_special_tokens=False)

    assert spellings is not None
    assert not {i for i in ids if i in tokenizer.all_special_ids} - {tokenizer.unk_token_id}


def test_text_without_specials_keeps_tags_of_ours() -> None:
    text = "<tool_call>1</tool_call> <think> a < b"

    assert without_specials(text, special_spellings(load_tokenizer("chatml"))) == text
    assert without_specials(text, special_spellings(CharTokenizer())) == text


PARTS_ONLY = (
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
REJECTS_TEXTS = PARTS_ONLY.replace("p['type'] == 'text'", "p.text | length")


@pytest.mark.parametrize("template", [PARTS_ONLY, REJECTS_TEXTS])
def test_texts_become_parts_for_a_template_that_reads_only_parts(template: str) -> None:
    tokenizer = load_tokenizer("chatml")
    tokenizer.chat_template = template
    given = [USER, THOUGHT, {"role": "user", "content": [{"type": "text", "text": "bye"}]}]
    messages = copy.deepcopy(given)

    text = render_messages(tokenizer, messages)

    assert text == "<user>hi<assistant><think>why</think>ok<user>bye"
    assert messages == given


def test_texts_stay_texts_for_a_template_that_shows_parts_as_they_are() -> None:
    tokenizer = load_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )

    assert render_messages(tokenizer, [USER]) == "<user>hi"
