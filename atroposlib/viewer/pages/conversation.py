"""One rollout as a conversation, with tool calls and thinking folded; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.viewer.pages.images import image_markup, images_of_content
from atroposlib.viewer.pages.markup import block, empty, folded, part_chips, score_chip, shown
from atroposlib.viewer.rollouts import Rollout, text_of_content
from atroposlib.viewer.token_reader import TokenReader

__all__ = ["conversation_page"]

_THINKING = re.compile(r"<(think|thinking|reasoning)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LONG_TOOL_RESULT = 400


def conversation_page(rollout: Rollout, reader: TokenReader) -> str:
    """Return the page: a block per message; without messages one per stretch of the mask."""
    parts = ""
    if rollout.reward_parts:
        score = score_chip(rollout.score)
        parts = f'<div class="v-chips">{score}{part_chips(rollout.reward_parts)}</div>'
    if rollout.chat:
        return parts + "".join(_message(message) for message in rollout.chat)
    if not len(rollout):
        return empty("This rollout has neither messages nor tokens.")
    note = '<p class="v-legend">no messages were saved: these are its tokens as text</p>'
    return (
        parts
        + note
        + "".join(
            _box("trained" if is_trained else "masked", _body(reader.text(ids)))
            for is_trained, ids in _stretches(rollout)
        )
    )


def _message(message: Mapping[str, Any]) -> str:
    role = str(message.get("role") or "text")
    text = text_of_content(message.get("content"))
    parts = []
    if message.get("reasoning_content"):
        parts.append(_thinking(str(message["reasoning_content"])))
    if role == "tool" and len(text) > _LONG_TOOL_RESULT:
        parts.append(folded(f"result, {len(text):,} characters", block(text)))
    else:
        parts.append(_body(text))
    parts += [image_markup(image) for image in images_of_content(message.get("content"))]
    parts += [_call(call) for call in _calls(message.get("tool_calls"))]
    return _box(role, "".join(parts), name=str(message.get("name") or ""))


def _box(role: str, content: str, *, name: str = "") -> str:
    kind = role if role in ("system", "user", "assistant", "tool", "trained", "masked") else "text"
    title = f"{role} {name}".strip()
    return f'<section class="v-message v-{kind}"><h4>{shown(title)}</h4>{content}</section>'


def _body(text: str) -> str:
    """Show text in which thinking and tool calls stand between tags, those folded."""
    parts = []
    at = 0
    spans = [
        (found.start(), found.end(), _thinking(found[2])) for found in _THINKING.finditer(text)
    ]
    spans += [(found.start(), found.end(), _spelled_call(found[1])) for found in
              _TOOL_CALL.finditer(text)]  # fmt: skip
    for start, stop, markup in sorted(spans):
        if start < at:  # a call within a thought stays there
            continue
        parts += [_plain(text[at:start]), markup]
        at = stop
    return "".join([*parts, _plain(text[at:])])


def _plain(text: str) -> str:
    return block(text.strip("\n")) if text.strip() else ""


def _thinking(text: str) -> str:
    return folded(f"thinking, {len(text):,} characters", block(text.strip("\n")), kind="v-think")


def _calls(calls: Any) -> Sequence[Any]:
    return calls if isinstance(calls, list) else [calls] if calls else []


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or "name" not in function:
        return folded("tool call", block(json.dumps(call, default=str, indent=1)), kind="v-call")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, default=str, ensure_ascii=False)
    title = f"calls {function['name']}({arguments})"
    body = json.dumps(call, default=str, indent=1, ensure_ascii=False)
    return folded(title[:160], block(body), kind="v-call")


def _spelled_call(text: str) -> str:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError):
        return folded("tool call that is no JSON", block(text), kind="v-call")


def _stretches(rollout: Rollout) -> list[tuple[bool, list[int]]]:
    """Part the tokens where training on them begins or ends."""
    stretches: list[tuple[bool, list[int]]] = []
    for i, token_id in enumerate(rollout.tokens):
        mask = rollout.masks[i] if i < len(rollout.masks) else IGNORE_INDEX
        is_trained = mask != IGNORE_INDEX
        if not stretches or stretches[-1][0] != is_trained:
            stretches.append((is_trained, []))
        stretches[-1][1].append(token_id)
    return stretches
