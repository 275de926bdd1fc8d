"""The OpenAI chat types with tool calls as plain dictionaries.

The client's own types turn each call into an object, which cannot be indexed. Imported where
answers are built, as the OpenAI package takes a second to import.
"""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import SerializeAsAny

__all__ = [
    "ChatCompletion",
    "ChatCompletionMessage",
    "Choice",
    "ToolCallChat",
    "ToolCallChoice",
    "ToolCallMessage",
]


class ToolCallMessage(ChatCompletionMessage):
    """A message whose tool calls are dictionaries."""

    tool_calls: list[dict[str, Any]] | None = None  # type: ignore[assignment]  # see the module
    """`{"id", "type": "function", "function": {"name", "arguments"}}` each."""


class ToolCallChoice(Choice):
    """A choice with such a message."""

    message: ToolCallMessage


class ToolCallChat(ChatCompletion):
    """An answer whose choices may call tools."""

    choices: list[SerializeAsAny[Choice]]
    """Each dumped as what it is; the client's type would warn of the dictionaries."""
