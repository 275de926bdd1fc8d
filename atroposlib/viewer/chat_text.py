"""The image and the question in the text of a multimodal chat, where it was saved as text; pure."""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["extract_image_from_chat", "extract_text_from_chat", "image_address_in"]

_IMAGE = re.compile(r"data:image/(?:jpeg|png);base64,[A-Za-z0-9+/=]+")
_TEXT_PART = re.compile(r'"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*("(?:[^"\\]|\\.)*")')
_IMAGE_MARK = "[Image]"


def image_address_in(chat_text: str) -> str | None:
    """Return the first JPEG or PNG that stands in a text as a `data:` address."""
    found = _IMAGE.search(chat_text)
    return found.group() if found else None


def extract_image_from_chat(chat_text: str) -> Image | None:
    """Return the first image in the text of a chat, None when there is none that can be read.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    address = image_address_in(chat_text)
    if address is None:
        return None
    try:
        from PIL import Image as images
        from PIL import UnidentifiedImageError
    except ImportError as error:
        from atroposlib.errors import MissingExtraError

        raise MissingExtraError("pillow", extra="examples") from error
    try:
        content = base64.b64decode(address.partition(",")[2], validate=True)
        return images.open(io.BytesIO(content))
    except (binascii.Error, ValueError, UnidentifiedImageError):
        return None


def extract_text_from_chat(chat_text: str) -> str:
    """Return the question: the first text part, else what follows `[Image]`, else all of it."""
    found = _TEXT_PART.search(chat_text)
    if found:
        try:
            return str(json.loads(found[1]))
        except ValueError:
            return found[1].strip('"')
    _, mark, rest = chat_text.partition(_IMAGE_MARK)
    return rest.strip() if mark else chat_text
