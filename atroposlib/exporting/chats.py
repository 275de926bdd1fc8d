"""Chats of trajectories in the forms that trainers take; pure.

A chat that a form cannot hold is refused with a reason, which the report counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ChatError", "check_chat", "openai_chat", "plain_chat", "split_chats"]

Chat = list[dict[str, Any]]

_OPENAI_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_ASSISTANT_ROLES = frozenset({"assistant", "agent"})


class ChatError(ValueError):
    """A chat that the asked form cannot hold; the message is the reason for the report."""


def check_chat(messages: Any) -> Chat:
    """Return a chat if it is one that ends with what the policy wrote.

    Raises:
        ChatError: it is not.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError("no messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError("a message without a role")
    if messages[-1]["role"] not in _ASSISTANT_ROLES:
        raise ChatError("the last message is not the assistant's")
    return messages


def plain_chat(messages: Any) -> Chat:
    """Return a chat with role, content and tool calls only; raises `ChatError`."""
    chat = []
    for message in check_chat(messages):
        role = "assistant" if message["role"] in _ASSISTANT_ROLES else message["role"]
        content = message.get("content")
        plain: dict[str, Any] = {"role": role, "content": "" if content is None else content}
        for name in ("tool_calls", "tool_call_id", "name"):
            if message.get(name):
                plain[name] = message[name]
        chat.append(plain)
    return chat


def openai_chat(messages: Any) -> Chat:
    """Return a chat as OpenAI's fine-tuning takes it; raises `ChatError`."""
    chat = plain_chat(messages)
    for message in chat:
        if message["role"] not in _OPENAI_ROLES:
            raise ChatError("a role that OpenAI's format does not have")
        if message["role"] == "tool" and not message.get("tool_call_id"):
            raise ChatError("a tool message without tool_call_id")
        if message.get("tool_calls"):
            message["tool_calls"] = [_openai_call(call) for call in message["tool_calls"]]
    return chat


def split_chats(chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[Chat, Chat, Chat]:
    """Return the messages two chats begin with, and the rest of each.

    Raises:
        ChatError: one of the chats is the beginning of the other: nothing is left to prefer.
    """
    shared = 0
    for a, b in zip(chosen, rejected, strict=False):
        if a != b:
            break
        shared += 1
    prompt, preferred, other = list(chosen[:shared]), list(chosen[shared:]), list(rejected[shared:])
    if not preferred or not other:
        raise ChatError("both chats say the same")
    return prompt, preferred, other


def _openai_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError("a tool call without a function")
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": str(call.get("id") or f"call_{function['name']}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }
