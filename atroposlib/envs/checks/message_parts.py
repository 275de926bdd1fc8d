"""Messages whose content is a list of parts, as a model of text alone would read them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["has_images", "text_only"]

IMAGE_PARTS = ("image_url", "image", "input_image")


def has_images(messages: Sequence[Any]) -> bool:
    """Whether a message holds an image."""
    return any(part.get("type") in IMAGE_PARTS for message in messages for part in _parts(message))


def text_only(message: Any) -> Any:
    """Return a message with the texts of its parts as its content; others as they are."""
    parts = _parts(message)
    if not parts:
        return message
    texts = [str(part["text"]) for part in parts if part.get("type") == "text"]
    return {**message, "content": "\n".join(texts)}


def _parts(message: Any) -> list[Mapping[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    entries = content if isinstance(content, list) else []
    return [part for part in entries if isinstance(part, Mapping)]
