"""Messages for chat templates that read content as parts only, as those of some vision models do.

    {"content": "hi"}  ->  {"content": [{"type": "text", "text": "hi"}]}

Such a template leaves out, or rejects, a content that is a text. vLLM converts messages likewise
(`--chat-template-content-format auto`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["in_readable_form"]

_PROBE = "atropos-probe"
_MAX_KNOWN = 64
_known: dict[str, bool] = {}
"""Whether a template reads parts only, by its source."""


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


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _reads_parts_only(tokenizer: Any, template: str) -> bool:
    if template not in _known:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        message = {"role": "user", "content": _PROBE}
        _known[template] = not _shows_probe(tokenizer, message) and _shows_probe(
            tokenizer, _in_parts(message)
        )
    return _known[template]


def _shows_probe(tokenizer: Any, message: Mapping[str, Any]) -> bool:
    try:
        text = tokenizer.apply_chat_template([message], tokenize=False)
    except Exception:  # noqa: BLE001 - templates fail in many ways, and the chat itself will, too
        return False
    return _PROBE in str(text)
