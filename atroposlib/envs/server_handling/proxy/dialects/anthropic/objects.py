"""A chat answer as a Message, and a refusal as Anthropic's error; pure.

thinking ─► thinking block, its signature a handle of the turn
text     ─► text block
calls    ─► tool_use blocks, each with the id of the chat answer's call
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.answers import ShownAnswer
from atroposlib.envs.server_handling.proxy.dialects.anthropic.threads import THREAD_NOT_FOUND
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal

__all__ = ["content_blocks", "error_body", "message_object", "new_id", "tool_input"]

Block = dict[str, Any]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ERROR_CODES = frozenset({THREAD_NOT_FOUND})


def new_id(prefix: str) -> str:
    """Return an id nobody can guess, as `msg_3f...`."""
    return f"{prefix}_{secrets.token_hex(12)}"


def content_blocks(answer: ShownAnswer, *, omits_thinking: bool = False) -> list[Block]:
    """Return the content of an answer: thinking, text, then calls; empty for an empty answer.

    Args:
        answer: What to show.
        omits_thinking: Leave thinking blocks empty but for their signature.
    """
    blocks: list[Block] = []
    if answer.thinking is not None:
        shown = "" if omits_thinking else answer.thinking
        blocks.append({"type": "thinking", "thinking": shown, "signature": new_id("sig")})
    if answer.text.strip() or (answer.text and not answer.calls and not blocks):
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        arguments = tool_input(call.arguments)
        blocks.append(
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}
        )
    return blocks


def tool_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; text that is none comes as `arguments`."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def message_object(
    answer: ShownAnswer, content: Sequence[Block], *, model: str, fills_context: bool = False
) -> dict[str, Any]:
    """Return the Message of an answer with these content blocks.

    Args:
        answer: What is shown.
        content: Its blocks.
        model: Name of the session's model.
        fills_context: Whether the answer could be as long as the context allows.
    """
    stop_reason = _STOP_REASONS.get(answer.finish_reason, "end_turn")
    if fills_context and stop_reason == "max_tokens":
        stop_reason = "model_context_window_exceeded"
    was_stopped = answer.stop_sequence is not None and stop_reason == "end_turn"
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(content),
        "stop_reason": "stop_sequence" if was_stopped else stop_reason,
        "stop_sequence": answer.stop_sequence if was_stopped else None,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": answer.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": answer.num_thinking_tokens},
        },
    }


def anthropic_model_list(model_name: str, created: float) -> dict[str, Any]:
    """Return Anthropic's list of models, with the one there is."""
    return {
        "data": [anthropic_model_card(model_name, created)],
        "first_id": model_name,
        "last_id": model_name,
        "has_more": False,
    }


def anthropic_model_card(model_name: str, created: float) -> dict[str, Any]:
    """Return Anthropic's description of a model; `created` in seconds since the epoch."""
    at = datetime.fromtimestamp(int(created), tz=timezone.utc)
    return {
        "type": "model",
        "id": model_name,
        "display_name": model_name,
        "created_at": at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
    }


def error_body(refusal: ProxyRefusal) -> dict[str, Any]:
    """Return `{"type": "error", "error": {"type", "message"}}` in Anthropic's vocabulary.

    `error` has `details` with an `error_code` where clients know one.
    """
    fallback = "api_error" if refusal.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(refusal.status, fallback)
    error: dict[str, Any] = {"type": kind, "message": str(refusal)}
    if refusal.code in _ERROR_CODES:
        error["details"] = {"error_code": refusal.code}
    return {"type": "error", "error": error}
