"""The input of a Responses request as chat messages and assistant turns; pure.

reasoning     ┐
message       ├─ one SentTurn      what the assistant did at one go
function_call ┘
function_call_output ── a tool message
message of another role ── a chat message
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.reading import (
    joined_text,
    list_at,
    object_at,
    refuse,
    text_at,
)
from atroposlib.envs.server_handling.proxy.dialects.responses.requests import flat_name
from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage, SentTurn

__all__ = ["FindItem", "read_input"]

FindItem = Callable[[str], Mapping[str, Any] | None]

_INPUT_PARTS = ("input_text", "text", "output_text")
_OUTPUT_PARTS = ("output_text", "text", "refusal", "input_text")
_ROLES = {"user": "user", "system": "system", "developer": "system"}


def read_input(value: Any, find_item: FindItem) -> list[ChatMessage | SentTurn]:
    """Return the entries of a request's `input`.

    Args:
        value: Text, which is a user's message, or a list of items.
        find_item: Returns an earlier output item of the session by its id.

    Raises:
        ProxyRefusal: an item cannot be given to a model that reads text and calls functions.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    reader = _Reader()
    for i, entry in enumerate(list_at(value, "input")):
        path = f"input[{i}]"
        item = object_at(entry, path)
        if item.get("type") == "item_reference":
            item = _referenced(item, path, find_item)
        reader.read(item, path)
    return reader.finish()


def _some_text(item: Mapping[str, Any], field: str, path: str) -> str:
    """Return the text of a field that must be there."""
    if item.get(field) is None:
        refuse(f"{path}.{field}", "expected text or a list, got nothing")
    return joined_text(item[field], f"{path}.{field}", kinds=_INPUT_PARTS)


class _Reader:
    """Collects the items of one assistant turn until an item of somebody else follows."""

    def __init__(self) -> None:
        self._entries: list[ChatMessage | SentTurn] = []
        self._ids: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ChatMessage] = []
        self._thinking: list[str] = []

    def read(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type", "message")
        if kind == "reasoning":
            self._read_reasoning(item, path)
        elif kind == "function_call":
            self._note_id(item)
            self._calls.append(_call_of(item, path))
        elif kind == "message" and item.get("role") == "assistant":
            self._read_assistant(item, path)
        elif kind in ("message", "function_call_output"):
            self._end_turn()
            message = _message_of if kind == "message" else _result_of
            self._entries.append(message(item, path))
        else:
            refuse(path, f"items of type {kind!r} are not supported")

    def finish(self) -> list[ChatMessage | SentTurn]:
        self._end_turn()
        return self._entries

    def _read_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        parts = joined_text(item.get("content"), f"{path}.content", kinds=("reasoning_text",))
        summary = joined_text(item.get("summary"), f"{path}.summary", kinds=("summary_text",))
        thinking = parts or summary
        is_repeated = thinking.split() in [known.split() for known in self._thinking]
        if self._texts or self._calls or (self._thinking and not is_repeated):
            self._end_turn()
        self._note_id(item)
        handle = item.get("encrypted_content")
        if isinstance(handle, str):
            self._ids.append(handle)
        if not (self._thinking and is_repeated):
            self._thinking.append(thinking)

    def _read_assistant(self, item: Mapping[str, Any], path: str) -> None:
        if self._texts or self._calls:
            self._end_turn()
        self._note_id(item)
        content = item.get("content")
        self._texts.append(
            joined_text(content, f"{path}.content", kinds=_OUTPUT_PARTS, separator="")
        )

    def _note_id(self, item: Mapping[str, Any]) -> None:
        if isinstance(item.get("id"), str):
            self._ids.append(item["id"])

    def _end_turn(self) -> None:
        if self._texts or self._calls or self._thinking:
            self._entries.append(
                SentTurn(
                    text="".join(self._texts),
                    ids=tuple(self._ids),
                    calls=tuple(self._calls),
                    thinking="\n".join(filter(None, self._thinking)),
                )
            )
        self._ids, self._texts, self._calls, self._thinking = [], [], [], []


def _referenced(reference: Mapping[str, Any], path: str, find_item: FindItem) -> Mapping[str, Any]:
    item_id = text_at(reference.get("id"), f"{path}.id")
    item = find_item(item_id)
    if item is None:
        refuse(f"{path}.id", f"no stored response of this session has an item {item_id!r}")
    return item


def _message_of(item: Mapping[str, Any], path: str) -> ChatMessage:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        refuse(f"{path}.role", f"expected one of {', '.join([*_ROLES, 'assistant'])}; got {role!r}")
    return {"role": _ROLES[role], "content": _some_text(item, "content", path)}


def _result_of(item: Mapping[str, Any], path: str) -> ChatMessage:
    return {
        "role": "tool",
        "tool_call_id": text_at(item.get("call_id"), f"{path}.call_id"),
        "content": _some_text(item, "output", path),
    }


def _call_of(item: Mapping[str, Any], path: str) -> ChatMessage:
    function = {
        "name": flat_name(text_at(item.get("name"), f"{path}.name"), item.get("namespace")),
        "arguments": text_at(item.get("arguments"), f"{path}.arguments"),
    }
    call_id = text_at(item.get("call_id"), f"{path}.call_id")
    return {"id": call_id, "type": "function", "function": function}
