"""Shared parts of evaluations: prompts that request reasoning, and its extraction from answers.

Providers return reasoning in different fields, which are searched in this order:

    choice.reasoning_content ► message.reasoning_content ► message.reasoning
      ► choice.reasoning_details ► message.reasoning_details ► choice.reasoning
      ► <think> in the text ► scratchpad in the text
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = [
    "HERMES_REASONING_PROMPT",
    "HERMES_REASONING_PROMPT_WITH_ANSWER",
    "Reasoning",
    "extract_reasoning_from_completion",
    "extract_reasoning_from_response",
]

HERMES_REASONING_PROMPT = (
    "You are an assistant that reasons before it answers. Work through the problem step by step, "
    "check your steps and correct them where they are wrong. Write all of this between <think> "
    "and </think>, then give your answer to the user after the closing tag."
)
HERMES_REASONING_PROMPT_WITH_ANSWER = (
    f"{HERMES_REASONING_PROMPT} Put the final answer, and nothing else, between <answer> and "
    "</answer>."
)

Source = Literal[
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "think_block",
    "scratchpad_block",
    "none",
]

_BLOCKS: Mapping[Source, re.Pattern[str]] = {
    "think_block": re.compile(r"<think>(.*?)</think>", re.DOTALL | re.IGNORECASE),
    "scratchpad_block": re.compile(
        r"<\|start_of_scratchpad\|>(.*?)<\|end_of_scratchpad\|>", re.DOTALL | re.IGNORECASE
    ),
}


class Reasoning(NamedTuple):
    """Reasoning and where it was; unpacks as `(reasoning, source)`."""

    reasoning: str | None
    """Never blank; None with the source `none`."""
    source: Source
    """Field or block of the reasoning."""


class CompletionReasoning(NamedTuple):
    """Reasoning and text of one choice; unpacks as `(reasoning, source, content)`."""

    reasoning: str | None
    """As in `Reasoning`."""
    source: Source
    content: str | None
    """Text of the message, reasoning blocks included; None without a text."""


def extract_reasoning_from_response(response: Any, content: str | None = None) -> Reasoning:
    """Return the reasoning of one choice of a chat answer.

    Args:
        response: A choice, as an object of the OpenAI client or as a mapping.
        content: Text to search for reasoning blocks; None takes that of the choice's message.
    """
    message = _field(response, "message")
    fields: list[tuple[Source, Any]] = [
        ("reasoning_content", _field(response, "reasoning_content")),
        ("reasoning_content", _field(message, "reasoning_content")),
        ("reasoning", _field(message, "reasoning")),
        ("reasoning_details", _first_detail(_field(response, "reasoning_details"))),
        ("reasoning_details", _first_detail(_field(message, "reasoning_details"))),
        ("reasoning", _field(response, "reasoning")),
    ]
    text = _field(message, "content") if content is None else content
    if isinstance(text, str):
        blocks = [(source, pattern.search(text)) for source, pattern in _BLOCKS.items()]
        fields += [(source, found[1].strip()) for source, found in blocks if found]
    for source, value in fields:
        if _is_text(value):
            return Reasoning(value, source)
    return Reasoning(None, "none")


def extract_reasoning_from_completion(completion: Any, choice_idx: int = 0) -> CompletionReasoning:
    """Return reasoning and text of one choice of a chat answer; all None without such a choice.

    Args:
        completion: The answer, as an object of the OpenAI client or as a mapping.
        choice_idx: Index of the choice.
    """
    choices = _field(completion, "choices")
    if not isinstance(choices, Sequence) or not 0 <= choice_idx < len(choices):
        return CompletionReasoning(None, "none", None)
    content = _field(_field(choices[choice_idx], "message"), "content")
    text = content if isinstance(content, str) else None
    reasoning, source = extract_reasoning_from_response(choices[choice_idx], text)
    return CompletionReasoning(reasoning, source, text)


def _field(owner: Any, name: str) -> Any:
    # Fields added by providers are not declared.
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _first_detail(details: Any) -> str | None:
    """Return the first text of the entries; others are encrypted or summaries."""
    entries = details if isinstance(details, Sequence) and not isinstance(details, str) else ()
    texts = (_field(entry, "text") for entry in entries)
    return next((text for text in texts if _is_text(text)), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
