"""Turning a conversation into the exact text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["render_messages"]

# Private-use characters: no template looks for them and no tokenizer ever sees them.
_PLACEHOLDERS = {"<think>": "\ue000think\ue001", "</think>": "\ue000/think\ue001"}


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    keep_thinking: bool = True,
) -> str:
    """Return the prompt text of a conversation.

    A reply is opened unless the last message is the assistant's. Without a chat template each
    message becomes a line `role: content`.

    Args:
        tokenizer: Anything with `apply_chat_template`; None for the plain lines.
        messages: Conversation so far; not changed.
        tools: Tool definitions the template should show; None leaves the argument out.
        keep_thinking: Hide `<think>` tags of assistant messages from the template, since many
            templates drop earlier thinking and a continued sequence would no longer match.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    rendered_messages = [_hide_thinking(message) for message in messages]
    text = tokenizer.apply_chat_template(
        rendered_messages if keep_thinking else list(messages),
        tokenize=False,
        add_generation_prompt=not messages or messages[-1]["role"] != "assistant",
        **({"tools": tools} if tools is not None else {}),
    )
    return _show_thinking(str(text)) if keep_thinking else str(text)


def _hide_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    for tag, placeholder in _PLACEHOLDERS.items():
        content = content.replace(tag, placeholder)
    return {**message, "content": content}


def _show_thinking(text: str) -> str:
    for tag, placeholder in _PLACEHOLDERS.items():
        text = text.replace(placeholder, tag)
    return text
