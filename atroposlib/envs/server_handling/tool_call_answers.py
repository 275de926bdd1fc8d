"""Chat answers with tool calls as plain dictionaries.

The OpenAI client's own types convert them to objects, which cannot be indexed.
"""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import SerializeAsAny


class ToolCallMessage(ChatCompletionMessage):
    """A message whose tool calls are dictionaries."""

    tool_calls: list[dict[str, Any]] | None = None  # type: ignore[assignment]  # see the module
    """Each `{"id", "type": "function", "function": {"name", "arguments"}}`."""


class ToolCallChoice(Choice):
    """A choice whose message holds tool calls."""

    message: ToolCallMessage


class ToolCallChat(ChatCompletion):
    """An answer whose choices may call tools."""

    choices: list[SerializeAsAny[Choice]]
    """Serialized by their own class; the client's type would warn about the dictionaries."""
