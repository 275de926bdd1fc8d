"""Rendering groups as HTML: pure functions, text in, markup out.

Model output is untrusted. Raw HTML in it is shown as text, Markdown makes plain tags of the rest,
without links or images, and the page's content policy lets only the page's own script run and
nothing load.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from string import Template
from typing import Any

from atroposlib.utils.inert_text import inert_block, inert_markup

__all__ = ["create_html_for_group", "get_score_class", "render_markdown", "render_page"]

logger = logging.getLogger(__name__)

MAX_MARKDOWN_CHARACTERS = 200_000
"""Longer texts are shown as they are: Markdown's cost grows faster than the text."""

KEPT_TEXTS = 256
"""Prompts repeat within a group: rendering them once halves the time of a page."""

UNWANTED_RULES = ["link", "image", "autolink", "reference", "html_inline", "html_block", "entity"]
IMAGE_STARTS = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}
"""How base64 of an image begins."""
INLINE_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+")


def get_score_class(score: Any) -> str:
    """Return the CSS class of a score: positive, negative or zero; empty when it is no number."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return ""
    if score > 0:
        return "reward-positive"
    return "reward-negative" if score < 0 else "reward-zero"


def create_html_for_group(group_data: Mapping[str, Any], index: int) -> str:
    """Return one group as a collapsible block.

    Args:
        group_data: `messages` [G], each a text or a chat, and `scores` [G]. Unequal lengths are
            cut to the shorter one with a warning. Base64 texts in `images` are shown above them,
            each once.
        index: number of the group on the page.

    Returns:
        The block, empty when there is nothing to show.
    """
    messages = group_data.get("messages") or []
    scores = group_data.get("scores") or []
    if len(messages) != len(scores):
        logger.warning(
            "group %d has %d messages and %d scores; showing the first %d",
            index,
            len(messages),
            len(scores),
            min(len(messages), len(scores)),
        )
    pairs = list(zip(messages, scores))  # noqa: B905 - cut to the shorter, as announced above
    if not pairs:
        return ""
    items = "\n".join(_item(chat, score, index, i) for i, (chat, score) in enumerate(pairs))
    numbers = [score for _, score in pairs if get_score_class(score)]
    best = max(numbers, default="")
    mean = sum(numbers) / len(numbers) if numbers else ""
    return (
        f'<details class="group" id="group-{index}" data-index="{index}" data-best="{best}" '
        f'data-mean="{mean}">\n<summary>Group {index}</summary>\n'
        f"{_group_images(group_data.get('images'))}{items}\n</details>"
    )


@lru_cache(maxsize=KEPT_TEXTS)
def render_markdown(text: str) -> str:
    """Return Markdown text as safe HTML; raw HTML in it appears as text, control codes as signs."""
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return _as_is(text)
    try:
        rendered: str = _converter().render(inert_block(text))
        return rendered
    except (RecursionError, ValueError, IndexError) as error:
        logger.debug("shown without Markdown: %s", error)
        return _as_is(text)


def render_page(input_name: str, groups: Sequence[str]) -> str:
    """Return the whole page: one file that loads nothing from elsewhere.

    Args:
        input_name: named in the title.
        groups: what `create_html_for_group` returned, in file order.
    """
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    empty = '<p class="empty">No data: no line held messages and scores.</p>'
    return Template(_resource("template.html")).substitute(
        title=inert_markup(f"Rendered Messages - {input_name}"),
        style=_resource("page.css"),
        groups="\n".join(groups) or empty,
        script=script,
        script_hash=digest,
    )


def _item(chat: Any, score: Any, group: int, i: int) -> str:
    classes = f"item {get_score_class(score)}".strip()
    number = score if get_score_class(score) else ""
    return (
        f'<div class="{classes}" id="group-{group}-item-{i}" tabindex="0" data-score="{number}">\n'
        f"<h3>Content {i}</h3>\n"
        f'<div class="content-block">{_render_chat(chat)}</div>\n'
        f'<p class="reward">Reward: {inert_markup(str(score))}</p>\n</div>'
    )


def _render_chat(chat: Any) -> str:
    if not isinstance(chat, list):
        return render_markdown(str(chat))
    return "\n".join(_render_message(message) for message in chat)


def _render_message(message: Any) -> str:
    if not isinstance(message, dict):
        return render_markdown(str(message))
    text, images = _split_content(message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        text += f"\n\n```json\n{json.dumps(calls, indent=1, ensure_ascii=False, default=str)}\n```"
    role = str(message.get("role") or "unknown").capitalize()
    return render_markdown(f"**{role}**: {text}") + "".join(_image(url) for url in images)


def _split_content(content: Any) -> tuple[str, list[str]]:
    """Part message content into its text and the addresses of its images."""
    if content is None:
        return "", []
    if not isinstance(content, list):
        return str(content), []
    texts: list[str] = []
    images: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            texts.append(str(part))
        elif part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif part.get("type") in ("image_url", "input_image", "image"):
            images.append(_image_address(part))
        else:
            texts.append(f"[{part.get('type', 'unknown')} part]")
    return "\n\n".join(texts), images


def _image_address(part: Mapping[str, Any]) -> str:
    value = part.get("image_url", part.get("image", ""))
    return str(value.get("url", "")) if isinstance(value, dict) else str(value)


def _group_images(images: Any) -> str:
    """Return the images of the whole group; one is often repeated for every trajectory."""
    texts = [images] if isinstance(images, str) else images
    found = [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
    addresses = (_as_address(text) for text in dict.fromkeys(found))
    return "".join(f"{_image(address)}\n" for address in addresses)


def _as_address(text: str) -> str:
    kind = next((kind for start, kind in IMAGE_STARTS.items() if text.startswith(start)), None)
    return text if kind is None else f"data:image/{kind};base64,{text}"


def _image(url: str) -> str:
    if INLINE_IMAGE.fullmatch(url):
        return f'<img class="image" alt="image in the message" src="{url}">'
    # An address elsewhere is named, not loaded: opening a page must not call anybody.
    return f'<p class="image">[image: {inert_markup(url[:200]) or "no address"}]</p>'


@cache
def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _converter() -> Any:
    from markdown_it import MarkdownIt

    # Raw HTML is ordinary text and gets escaped. Links stay text as well: a reader sees the
    # address, and nobody is led anywhere.
    options = {"html": False, "breaks": True}
    converter = MarkdownIt("commonmark", options).enable("table").disable(UNWANTED_RULES)
    # The language a fence names would become an attribute; nothing on the page uses it.
    converter.add_render_rule("fence", lambda _, tokens, i, *__: _code_block(tokens[i].content))
    return converter


def _code_block(text: str) -> str:
    return f"<pre><code>{html.escape(text, quote=False)}</code></pre>\n"


def _as_is(text: str) -> str:
    return f"<pre>{html.escape(inert_block(text), quote=False)}</pre>"
