"""Records of examples to imitate, one function per format; pure.

What a function gets is a trajectory with everything a format may need; what it returns is one line
of the output, without the score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.exporting.chats import check_chat, openai_chat, plain_chat
from atroposlib.exporting.splitting import Span, trained_spans
from atroposlib.exporting.texts import TextPair
from atroposlib.scored_data import IGNORE_INDEX

__all__ = ["SFT_FORMATS", "Example", "SftFormat"]


class Example(NamedTuple):
    """One chosen trajectory."""

    tokens: Sequence[int]
    """[L]."""
    mask: Sequence[int] | None
    """[L]; None when the group says nothing about what to train on."""
    prompt_length: int
    """Tokens of the prompt."""
    text: TextPair | None
    """Where the format asks for text."""
    segments: Sequence[str]
    """Text of each of `spans`, where the format asks for them."""
    messages: Any
    """The chat, whatever the environment gave."""

    def spans(self) -> list[Span]:
        """Return what is trained on and what is not."""
        return spans_of(self.tokens, self.mask, self.prompt_length)


class SftFormat(NamedTuple):
    """A format of the output."""

    build: Callable[[Example], dict[str, Any]]
    about: str
    """For people: who reads it."""
    needs_text: bool = False
    needs_segments: bool = False
    needs_messages: bool = False
    has_score: bool = False
    """Whether records carry the score unasked."""

    @property
    def needs_tokenizer(self) -> bool:
        """Whether tokens are decoded."""
        return self.needs_text or self.needs_segments


def spans_of(tokens: Sequence[int], mask: Sequence[int] | None, prompt_length: int) -> list[Span]:
    """Return trained and other stretches; without a mask all behind the prompt is trained on."""
    if mask:
        return trained_spans(mask)
    spans = [Span(0, prompt_length, False), Span(prompt_length, len(tokens), True)]
    return [span for span in spans if span.start < span.end]


def _prefix_completion(example: Example) -> dict[str, Any]:
    assert example.text is not None
    return {"prefix": example.text.prompt, "completion": example.text.completion}


def _prompt_completion(example: Example) -> dict[str, Any]:
    assert example.text is not None
    return {"prompt": example.text.prompt, "completion": example.text.completion}


def _messages_as_given(example: Example) -> dict[str, Any]:
    return {"messages": example.messages}


def _messages(example: Example) -> dict[str, Any]:
    return {"messages": plain_chat(example.messages)}


def _chat_prompt_completion(example: Example) -> dict[str, Any]:
    chat = plain_chat(check_chat(example.messages))
    return {"prompt": chat[:-1], "completion": chat[-1:]}


def _segments(example: Example) -> dict[str, Any]:
    pairs = zip(example.spans(), example.segments, strict=True)
    return {"segments": [{"label": span.is_trained, "text": text} for span, text in pairs]}


def _openai(example: Example) -> dict[str, Any]:
    return {"messages": openai_chat(example.messages)}


def _token_ids(example: Example) -> dict[str, Any]:
    labels = list(example.mask or [])
    if not labels:
        ignored = [IGNORE_INDEX] * example.prompt_length
        labels = [*ignored, *example.tokens[example.prompt_length :]]
    return {
        "input_ids": list(example.tokens),
        "attention_mask": [1] * len(example.tokens),
        "labels": labels,
    }


SFT_FORMATS: Mapping[str, SftFormat] = {
    "atropos": SftFormat(
        _prefix_completion, "prefix, completion, score", needs_text=True, has_score=True
    ),
    "atropos-messages": SftFormat(
        _messages_as_given,
        "messages as the environment gave them, score",
        needs_messages=True,
        has_score=True,
    ),
    "trl": SftFormat(_prompt_completion, "TRL: prompt, completion", needs_text=True),
    "trl-messages": SftFormat(_messages, "TRL: conversational messages", needs_messages=True),
    "trl-chat": SftFormat(
        _chat_prompt_completion,
        "TRL: conversational prompt, completion",
        needs_messages=True,
    ),
    "axolotl": SftFormat(
        _segments, "Axolotl, type input_output: segments as trained on", needs_segments=True
    ),
    "axolotl-chat": SftFormat(
        _messages, "Axolotl, type chat_template: messages", needs_messages=True
    ),
    "openai": SftFormat(_openai, "OpenAI fine-tuning: messages", needs_messages=True),
    "tokens": SftFormat(_token_ids, "TRL and Axolotl: input_ids, attention_mask, labels"),
}
"""The formats of `atropos-sft-gen`, by name."""
