"""Messages for chat templates that read content as parts, as those of some vision models do.

    {"content": "hi"}  ->  {"content": [{"type": "text", "text": "hi"}]}

A template that reads parts only leaves out, or rejects, a content that is a text. vLLM converts
messages likewise (`--chat-template-content-format auto`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["in_readable_form", "reads_parts"]

_PROBE = "atropos-probe"
_MAX_KNOWN = 64
_known: dict[str, bool] = {}
"""Whether a template reads parts only, by its source."""
_known_parts: dict[str, bool] = {}
"""Whether a template reads parts, by its source."""


def in_readable_form(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with each text as a list of one part if the template needs that.

    They are not modified. Tokenizers without the source of one template are assumed to read texts.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or not _reads_parts_only(tokenizer, template):
        return messages
    return [_in_parts(message) for message in messages]


def reads_parts(tokenizer: Any) -> bool:
    """Return whether the chat template shows the texts in a list of parts, not the list itself."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return False
    if template not in _known_parts:
        _keep(_known_parts, template, _shows_parts(tokenizer))
    return _known_parts[template]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _reads_parts_only(tokenizer: Any, template: str) -> bool:
    if template not in _known:
        message = {"role": "user", "content": _PROBE}
        is_found = not _shows_probe(tokenizer, message) and _shows_probe(
            tokenizer, _in_parts(message)
        )
        _keep(_known, template, is_found)
    return _known[template]


def _keep(known: dict[str, bool], template: str, found: bool) -> None:
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[template] = found


def _shows_probe(tokenizer: Any, message: Mapping[str, Any]) -> bool:
    return _PROBE in _rendered(tokenizer, message)


def _shows_parts(tokenizer: Any) -> bool:
    text = _rendered(tokenizer, _in_parts({"role": "user", "content": _PROBE}))
    # A template that takes a content as it is shows the whole list.
    return _PROBE in text and f"{_PROBE}'" not in text and f'{_PROBE}"' not in text


def _rendered(tokenizer: Any, message: Mapping[str, Any]) -> str:
    """Return the text of a message, empty if the template rejects it."""
    try:
        return str(tokenizer.apply_chat_template([message], tokenize=False))
    except Exception:  # noqa: BLE001 - templates fail in many ways, and the chat itself will, too
        return ""
