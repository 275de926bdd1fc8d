"""The images of a group beside what the model said of them; pure.

Only images that are in the data are shown; an address elsewhere is named, never loaded.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from atroposlib.viewer.chat_text import extract_text_from_chat, image_address_in
from atroposlib.viewer.pages.markup import block, empty, score_chip, shown
from atroposlib.viewer.rollouts import Group
from atroposlib.viewer.texts import RolloutText

__all__ = ["image_markup", "images_of_content", "images_of_group", "images_page"]

_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|gif|webp);base64,([A-Za-z0-9+/=\s]+)")
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_MAX_ANSWER_CHARACTERS = 3000
_MAX_ADDRESS_CHARACTERS = 120


def images_page(group: Group, texts: list[RolloutText]) -> str:
    """Return the page: images, the question, then every score with its answer."""
    images = images_of_group(group)
    if not images:
        return empty("This group has no images.")
    answers = "".join(
        f'<section class="v-card" data-rollout="{rollout.number}" tabindex="0">'
        f"<h4>rollout {rollout.number} {score_chip(rollout.score)}</h4>"
        f"{block(text.answer, max_characters=_MAX_ANSWER_CHARACTERS)}</section>"
        for rollout, text in zip(group.rollouts, texts, strict=True)
    )
    shown_images = "".join(image_markup(image) for image in images)
    return (
        f'<div class="v-images"><div>{shown_images}</div>'
        f"<div>{block(extract_text_from_chat(texts[0].prompt))}</div></div>"
        f'<div class="v-cards">{answers}</div>'
    )


def images_of_group(group: Group) -> list[str]:
    """Return addresses of a group's images, `data:` ones where they are in it, each once."""
    found = list(_walk(group.fields.get("images")))
    for rollout in group.rollouts:
        for message in rollout.chat:
            found += images_of_content(message.get("content"))
    if not found and group.rollouts and isinstance(group.rollouts[0].messages, str):
        address = image_address_in(group.rollouts[0].messages)
        found += [address] if address else []
    return list(dict.fromkeys(found))


def images_of_content(content: Any) -> list[str]:
    """Return addresses of the images in the content of a message."""
    parts = content if isinstance(content, list) else []
    return [address for part in parts if isinstance(part, Mapping) for address in _of_part(part)]


def image_markup(address: str) -> str:
    """Show an image of the data; name any other."""
    if _DATA_URL.fullmatch(address):
        return f'<img class="v-image" alt="image of the group" src="{shown(address)}">'
    cut = address[:_MAX_ADDRESS_CHARACTERS]
    return f'<p class="v-legend">[image elsewhere: {shown(cut) or "no address"}]</p>'


def _of_part(part: Mapping[str, Any]) -> list[str]:
    if part.get("type") not in ("image", "image_url", "input_image"):
        return []
    value = part.get("image_url", part.get("image", ""))
    address = value.get("url", "") if isinstance(value, Mapping) else value
    return [_as_data_url(str(address))]


def _walk(value: Any) -> Iterator[str]:
    """Yield the texts of an `images` field, which environments nest as they like."""
    if isinstance(value, str) and value:
        yield _as_data_url(value)
    elif isinstance(value, Mapping):
        yield from _walk(value.get("url", value.get("image_url", value.get("image"))))
    elif isinstance(value, list):
        for entry in value:
            yield from _walk(entry)


def _as_data_url(text: str) -> str:
    """Return base64 of an image as a `data:` address; anything else as it is."""
    if ":" in text[:20]:
        return text
    try:
        head = base64.b64decode(text[:16], validate=True)
    except (binascii.Error, ValueError):
        return text
    kind = next((name for start, name in _KINDS.items() if head.startswith(start)), None)
    return text if kind is None else f"data:image/{kind};base64,{text}"
