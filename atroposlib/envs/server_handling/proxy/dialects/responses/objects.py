"""A chat answer as a Response object; pure.

thinking ─► reasoning item      rs_...
text     ─► message item        msg_...
calls    ─► function_call items fc_..., each with the call_id of the chat answer
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.proxy.dialects.answers import ShownAnswer, ShownCall
from atroposlib.envs.server_handling.proxy.dialects.reading import refuse
from atroposlib.envs.server_handling.proxy.dialects.responses.requests import (
    ENCRYPTED_REASONING,
    ResponsesFields,
)

__all__ = [
    "ResponseHead",
    "finished",
    "in_progress",
    "listed_items",
    "new_id",
    "output_items",
    "page_of",
]

Item = dict[str, Any]

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_MOST_LISTED = 100


class ResponseHead(NamedTuple):
    """What is known of a response before the model has answered."""

    response_id: str
    """`resp_...`"""
    created_at: float
    """Seconds since the epoch."""
    model: str
    """Name of the session's model."""
    fields: ResponsesFields
    """The request."""


def new_id(prefix: str) -> str:
    """Return an id nobody can guess, as `msg_3f...`."""
    return f"{prefix}_{secrets.token_hex(16)}"


def output_items(
    answer: ShownAnswer,
    *,
    include: Sequence[str] = (),
    namespaces: Mapping[str, tuple[str, str]] | None = None,
) -> list[Item]:
    """Return the output items of an answer: thinking, text, then calls.

    Args:
        answer: What to show. An empty answer is an empty message.
        include: The request's `include`. A reasoning item's `encrypted_content`, when asked for,
            is a handle of the turn that works in this session only.
        namespaces: Namespace and name of the functions that stand in one, by the model's name.
    """
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[Item] = []
    if answer.thinking is not None:
        handle = new_id("enc") if ENCRYPTED_REASONING in include else None
        items.append(_reasoning_item(answer.thinking, handle, status))
    if answer.text.strip() or not (answer.calls or items):
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": new_id("msg"),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    return [*items, *(_call_item(call, (namespaces or {}).get(call.name)) for call in answer.calls)]


def in_progress(head: ResponseHead) -> dict[str, Any]:
    """Return the Response object of a request the model works on."""
    fields = head.fields
    return {
        "id": head.response_id,
        "object": "response",
        "created_at": head.created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(fields.reasoning or {})},
        "store": fields.store is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": {"type": "text"}, **(fields.text or {})},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def finished(
    head: ResponseHead, answer: ShownAnswer, output: Sequence[Item], *, now: float
) -> dict[str, Any]:
    """Return the Response object of an answered request; `now` in seconds since the epoch."""
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(
        answer.finish_reason
    )
    return {
        **in_progress(head),
        "status": "incomplete" if reason else "completed",
        "completed_at": None if reason else now,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(output),
        "usage": _usage(answer),
    }


def listed_items(sent: Any) -> list[Item]:
    """Return a request's input as the items that are listed of it, each with an id."""
    entries = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    return [_listed_item(entry) for entry in entries]


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a list of items.

    Args:
        items: Oldest first.
        query: `order` (`desc` unless `asc`), `limit` (1 to 100, else 20), and `after`, an id.

    Raises:
        ProxyRefusal: a parameter has no such value.
    """
    ordered = list(items) if query.get("order") == "asc" else list(items)[::-1]
    after = query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            refuse("after", f"there is no item {after!r}")
        ordered = ordered[places[0] + 1 :]
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_LISTED:
        refuse("limit", f"expected an integer from 1 to {_MOST_LISTED}, got {limit!r}")
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def _listed_item(entry: Mapping[str, Any]) -> Item:
    kind = entry.get("type", "message")
    item = {**entry, "type": kind, "id": entry.get("id") or new_id(_ID_PREFIXES.get(kind, "item"))}
    if kind == "message" and isinstance(entry.get("content"), str):
        part = "output_text" if entry.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": entry["content"]}]
    if kind in _ID_PREFIXES:
        item.setdefault("status", "completed")
    return item


def _reasoning_item(thinking: str, handle: str | None, status: str) -> Item:
    return {
        "id": new_id("rs"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thinking}],
        "encrypted_content": handle,
        "status": status,
    }


def _call_item(call: ShownCall, place: tuple[str, str] | None) -> Item:
    namespace, name = place or (None, call.name)
    return {
        **({} if namespace is None else {"namespace": namespace}),
        "id": new_id("fc"),
        "type": "function_call",
        "call_id": call.call_id,
        "name": name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _usage(answer: ShownAnswer) -> Mapping[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.num_thinking_tokens},
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
    }
