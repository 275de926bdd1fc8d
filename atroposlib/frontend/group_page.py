"""Rendering groups as HTML: pure functions, text in, markup out.

Model output is untrusted. Raw HTML in it is shown as text, Markdown makes plain tags of the rest,
without links or images, and the page's content policy lets only the page's own script run and
nothing load.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from atroposlib.frontend.message_text import render_markdown
from atroposlib.utils.inert_text import inert_markup
from atroposlib.utils.short_score import short_score

__all__ = ["create_html_for_group", "get_score_class", "render_markdown", "render_page"]

logger = logging.getLogger(__name__)

IMAGE_STARTS = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}
"""How base64 of an image begins."""
PROMPT_ROLES = frozenset({"system", "developer", "user", "environment"})
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
            cut to the shorter one with a warning. A prompt that all of them begin with is
            folded from the second on. Base64 texts in `images` are shown above them, each once,
            and so is `gold_answer`, a text or one per turn.
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
    num_shared = _num_shared([chat for chat, _ in pairs])
    items = "\n".join(
        _item(_render_chat(chat, num_folded=num_shared if i else 0), score, index, i)
        for i, (chat, score) in enumerate(pairs)
    )
    numbers = [score for _, score in pairs if get_score_class(score)]
    best = max(numbers, default="")
    mean = sum(numbers) / len(numbers) if numbers else ""
    return (
        f'<details class="group" id="group-{index}" data-index="{index}" data-best="{best}" '
        f'data-mean="{mean}">\n<summary>Group {index}</summary>\n'
        f"{_group_images(group_data.get('images'))}{_gold(group_data.get('gold_answer'))}"
        f"{items}\n</details>"
    )


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


def _item(content: str, score: Any, group: int, i: int) -> str:
    classes = f"item {get_score_class(score)}".strip()
    number = short_score(score) if get_score_class(score) else ""
    return (
        f'<div class="{classes}" id="group-{group}-item-{i}" tabindex="0" data-score="{number}">\n'
        f"<h3>Content {i}</h3>\n"
        f'<div class="content-block">{content}</div>\n'
        f'<p class="reward">Reward: {inert_markup(str(short_score(score)))}</p>\n</div>'
    )


def _num_shared(chats: Sequence[Any]) -> int:
    """Return how many messages of the prompt, from the first on, are the same in all chats."""
    first, *others = chats
    if not isinstance(first, list) or not all(isinstance(chat, list) for chat in others):
        return 0
    num_shared = 0
    for message in first:
        role = message.get("role") if isinstance(message, dict) else None
        is_prompt = isinstance(role, str) and role.lower() in PROMPT_ROLES
        if not is_prompt or any(chat[num_shared : num_shared + 1] != [message] for chat in others):
            break
        num_shared += 1
    return num_shared


def _render_chat(chat: Any, *, num_folded: int) -> str:
    if not isinstance(chat, list):
        return render_markdown(str(chat))
    folded = "\n".join(map(_render_message, chat[:num_folded]))
    rest = "\n".join(map(_render_message, chat[num_folded:]))
    if not folded:
        return rest
    return f'<details class="folded"><summary>prompt as above</summary>\n{folded}</details>\n{rest}'


def _render_message(message: Any) -> str:
    if not isinstance(message, dict):
        return render_markdown(str(message))
    text, images = _split_content(message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        text += f"\n\n```json\n{json.dumps(calls, indent=1, ensure_ascii=False, default=str)}\n```"
    role = str(message.get("role") or "unknown").capitalize()
    kind = "message prompt" if role.lower() in PROMPT_ROLES else "message"
    # The role has a line of its own: a fence or a table begins a line.
    return (
        f'<div class="{kind}"><p class="role"><strong>{inert_markup(role)}</strong>:</p>\n'
        f"{render_markdown(text)}{''.join(_image(url) for url in images)}</div>"
    )


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


def _gold(answer: Any) -> str:
    """Return a perfect answer, one per turn where it is a list; folded, as it gives all away."""
    turns = answer if isinstance(answer, list) else [answer]
    texts = "\n".join(render_markdown(turn) for turn in turns if isinstance(turn, str))
    if not texts:
        return ""
    return (
        '<details class="gold"><summary>Gold answer</summary>\n'
        f'<div class="content-block">{texts}</div></details>\n'
    )


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
