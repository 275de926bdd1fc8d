"""The messages of a Messages request as chat messages and assistant turns; pure.

user       text        ─► a user message; neighbours are one turn
           tool_result ─► a tool message
assistant  thinking    ┐
           text        ├─ one SentTurn
           tool_use    ┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.reading import (
    joined_text,
    list_at,
    object_at,
    refuse,
    text_at,
)
from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage, SentTurn

__all__ = ["read_messages"]

_TEXT = ("text",)
_ROLES = ("user", "assistant", "system")


def read_messages(messages: list[Any], system: Any) -> list[ChatMessage | SentTurn]:
    """Return the entries of a request's `system` and `messages`.

    Raises:
        ProxyRefusal: a block cannot be given to a model that reads text and calls tools.
    """
    entries: list[ChatMessage | SentTurn] = []
    instructions = joined_text(system, "system", kinds=_TEXT)
    if instructions:
        entries.append({"role": "system", "content": instructions})
    for i, value in enumerate(messages):
        path = f"messages[{i}]"
        message = object_at(value, path)
        role, content = message.get("role"), message.get("content")
        if role == "user":
            _add_user(entries, content, f"{path}.content")
        elif role == "assistant":
            entries.append(_assistant_turn(content, f"{path}.content"))
        elif role == "system":
            text = joined_text(content, f"{path}.content", kinds=_TEXT)
            entries.append({"role": "system", "content": text})
        else:
            refuse(f"{path}.role", f"expected one of {', '.join(_ROLES)}; got {role!r}")
    return entries


def _add_user(entries: list[ChatMessage | SentTurn], content: Any, path: str) -> None:
    if content in ("", []):
        refuse(path, "user messages must have non-empty content")
    if isinstance(content, str):
        _add_user_text(entries, content)
        return
    for i, entry in enumerate(list_at(content, path)):
        block = object_at(entry, f"{path}[{i}]")
        if block.get("type") == "tool_result":
            entries.append(_tool_message(block, f"{path}[{i}]"))
        else:
            _add_user_text(entries, _block_text(block, f"{path}[{i}]"))


def _add_user_text(entries: list[ChatMessage | SentTurn], text: str) -> None:
    """Add text to the user's turn, which may span several messages; templates take turns."""
    last = entries[-1] if entries else None
    if isinstance(last, Mapping) and last["role"] == "user":
        entries[-1] = {"role": "user", "content": f"{last['content']}\n{text}"}
    else:
        entries.append({"role": "user", "content": text})


def _tool_message(block: Mapping[str, Any], path: str) -> ChatMessage:
    return {
        "role": "tool",
        "tool_call_id": text_at(block.get("tool_use_id"), f"{path}.tool_use_id"),
        "content": joined_text(block.get("content"), f"{path}.content", kinds=_TEXT),
    }


def _assistant_turn(content: Any, path: str) -> SentTurn:
    if isinstance(content, str):
        return SentTurn(content)
    texts: list[str] = []
    thinking: list[str] = []
    signatures: list[str] = []
    calls: list[ChatMessage] = []
    for i, entry in enumerate(list_at(content, path)):
        place = f"{path}[{i}]"
        block = object_at(entry, place)
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call_of(block, place))
        elif kind == "thinking":
            thinking.append(text_at(block.get("thinking"), f"{place}.thinking"))
            signatures.append(text_at(block.get("signature", ""), f"{place}.signature"))
        elif kind != "redacted_thinking":  # sealed by another model's provider
            texts.append(_block_text(block, place))
    return SentTurn("".join(texts), tuple(signatures), tuple(calls), "\n".join(thinking).strip())


def _block_text(block: Mapping[str, Any], path: str) -> str:
    if block.get("type") != "text":
        refuse(
            path, f"blocks of type {block.get('type')!r} are not supported: the model reads text"
        )
    return text_at(block.get("text"), f"{path}.text")


def _call_of(block: Mapping[str, Any], path: str) -> ChatMessage:
    arguments = json.dumps(object_at(block.get("input"), f"{path}.input"), ensure_ascii=False)
    function = {"name": text_at(block.get("name"), f"{path}.name"), "arguments": arguments}
    return {"id": text_at(block.get("id"), f"{path}.id"), "type": "function", "function": function}
