"""Turning a conversation into the exact text of a prompt, or of what follows a sampled reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.tool_formats.json_calls import whole_value
from atroposlib.envs.server_handling.turn_matching import as_mapping

__all__ = ["render_added", "render_either", "render_messages", "tail_behind"]

Render = Callable[[Sequence[Mapping[str, Any]]], str]

# Private-use characters: no template looks for them and no tokenizer ever sees them.
_PLACEHOLDERS = {"<think>": "\ue000think\ue001", "</think>": "\ue000/think\ue001"}
_REPLY = "\ue002reply\ue003"


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
        return "\n".join(
            f"{message['role']}: {message.get('content') or ''}" for message in messages
        )
    shown = [_with_parsed_arguments(message) for message in messages]
    text = tokenizer.apply_chat_template(
        [_hide_thinking(message) for message in shown] if keep_thinking else shown,
        tokenize=False,
        add_generation_prompt=not messages or messages[-1]["role"] != "assistant",
        **({"tools": tools} if tools is not None else {}),
    )
    return _show_thinking(str(text)) if keep_thinking else str(text)


def render_either(
    render: Render,
    preferred: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
) -> str:
    """Return the text of a conversation in the first of two forms that the template accepts.

    Some templates tell an answer from a call by the calls, and refuse two answers in a row.
    """
    refusals = _refusals()
    try:
        return render(preferred)
    except refusals as error:
        if list(other) == list(preferred):
            raise
        try:
            return render(other)
        except refusals:
            raise error from None


def render_added(
    render: Render, history: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return the text a template writes behind a reply: its end, the added messages, the opening.

    What stands before the reply does not enter, so it does not matter how the template would
    write it today. The reply stands behind one short question, so that a template which puts
    the system text or the tools in front of the *last* question does not repeat them; a template
    that refuses this is given the whole history instead.

    Args:
        render: Messages to prompt text.
        history: [M] messages before the reply.
        added: Messages behind it.

    Returns:
        The text, or None if the template refuses both.
    """
    question = {"role": "user", "content": "?"}
    for before in ([question], list(history)):
        text = tail_behind(render, before, added)
        if text is not None:
            return text
    return None


def tail_behind(
    render: Render, before: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return what a template writes behind a reply to `before`; None if it refuses."""
    marker = _REPLY
    while any(marker in str(message.get("content")) for message in before):
        marker += _REPLY
    reply = {"role": "assistant", "content": marker}
    try:
        text = render([*before, reply, *added])
    except _refusals():
        return None
    _, found, tail = text.partition(marker)
    return tail if found else None


def _refusals() -> tuple[type[Exception], ...]:
    """Return what a template raises on a conversation it does not want."""
    try:
        from jinja2 import TemplateError
    except ImportError:  # then the tokenizer renders by other means
        return (TypeError,)
    return (TemplateError, TypeError)  # the latter when it joins text and nothing


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls hold their arguments as objects, as chat templates want them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or not calls:
        return message
    return {**message, "tool_calls": [_with_object(as_mapping(call)) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = as_mapping(call.get("function"))
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": whole_value(arguments, blank={})}}


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
