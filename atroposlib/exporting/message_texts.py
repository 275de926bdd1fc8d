"""What the messages of a chat say, in the forms in which templates write it; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Place", "find_text", "message_texts"]

_COMPARED_CHARS = 200
_THINKING_END = "</think>"


class Place(NamedTuple):
    """Where a text was found."""

    start: int
    end: int


def message_texts(chat: Any) -> list[list[str]]:
    """Return what each message with text may look like in a rendered chat.

    A template may trim a content, drop the thinking before an answer, and write the content of a
    tool message as JSON. Of a long content the beginning is returned. Contents that are no text,
    and messages with calls, which some templates write without their content, are left out.

    Args:
        chat: messages; anything else has no texts.
    """
    messages = chat if isinstance(chat, list) else []
    contents = [
        message.get("content")
        for message in messages
        if isinstance(message, Mapping) and not message.get("tool_calls")
    ]
    return [_forms(content) for content in contents if isinstance(content, str) and content.strip()]


def find_text(text: str, forms: Sequence[str], start: int = 0) -> Place | None:
    """Return where the first of several forms that occurs in a text stands, from `start` on."""
    for form in forms:
        found = text.find(form, start)
        if found >= 0:
            return Place(found, found + len(form))
    return None


def _forms(content: str) -> list[str]:
    plain = content.strip()
    answer = plain.rpartition(_THINKING_END)[2].strip()
    as_json = (json.dumps(plain, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    forms = [plain, *as_json, answer]
    return list(dict.fromkeys(form[:_COMPARED_CHARS] for form in forms if form))
