"""Turning a conversation into the exact text of a prompt, or of what follows a sampled reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.tool_formats.json_calls import whole_value
from atroposlib.envs.server_handling.turn_matching import THINKING_END, as_mapping
from atroposlib.errors import ConfigError, PromptError
from atroposlib.utils.tokenizers.earlier_calls import no_template_text

__all__ = ["check_texts", "render_added", "render_either", "render_messages", "tail_behind"]

Render = Callable[[Sequence[Mapping[str, Any]]], str]

# Private-use characters: no template looks for them and no tokenizer ever sees them.
_PLACEHOLDERS = {"<think>": "\ue000think\ue001", "</think>": "\ue000/think\ue001"}
_REPLY = "\ue002reply\ue003"

_STANDS_FOR = {"developer": "system"}
"""Roles that most templates pass over without a word, and the one that means the same."""

_SHOWN_START = 60


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    keep_thinking: bool = True,
) -> str:
    """Return the prompt text of a conversation.

    A reply is opened unless the last message is the assistant's. Without a chat template each
    message becomes a line `role: content`. A `developer` is the system where the template's
    source does not name that role.

    Args:
        tokenizer: Anything with `apply_chat_template`; None for the plain lines.
        messages: Conversation so far; not changed.
        tools: Tool definitions the template should show; None leaves the argument out.
        keep_thinking: Hide `<think>` tags of assistant messages from the template, since many
            templates drop earlier thinking and a continued sequence would no longer match.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        return "\n".join(
            f"{message['role']}: {message.get('content') or ''}" for message in messages
        )
    # Tokenizers of users may render without one.
    if not getattr(tokenizer, "chat_template", "their own"):
        raise ConfigError(no_template_text(tokenizer))
    shown = [_with_parsed_arguments(m) for m in _with_known_roles(tokenizer, messages)]
    text = tokenizer.apply_chat_template(
        [_hide_thinking(message) for message in shown] if keep_thinking else shown,
        tokenize=False,
        add_generation_prompt=not messages or messages[-1]["role"] != "assistant",
        **({"tools": tools} if tools is not None else {}),
    )
    return _show_thinking(str(text)) if keep_thinking else str(text)


def check_texts(
    prompt: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    start: int = 0,
    keeps_thinking: bool = True,
) -> None:
    """Raise unless a prompt holds the text of every message from `start` on.

    Outer space may differ, and the text may stand as JSON, as templates write results of tools.
    Parts of a message that are not text are not looked for.

    Args:
        prompt: What a template made of the messages.
        messages: A conversation.
        start: Index of the first message that is looked for.
        keeps_thinking: Whether the prompt must hold the thinking of the assistant's messages.

    Raises:
        PromptError: a text is missing; names the message and its role.
    """
    position = 0
    for i, message in enumerate(messages[start:], start=start):
        for text in _texts_of(message, keeps_thinking=keeps_thinking):
            found = prompt.find(text, position)
            if found >= 0:
                position = found + len(text)
            elif text not in prompt and not _is_written_otherwise(text, prompt):
                raise PromptError(
                    f"the chat template leaves out the text of messages[{i}] (role "
                    f"{message.get('role')!r}, {text[:_SHOWN_START]!r}); give the text in a role "
                    "that the template knows"
                )


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


def _with_known_roles(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with roles the template does not know replaced by what they stand for.

    The system's messages at the front are then one, as templates look for one.
    """
    source = str(getattr(tokenizer, "chat_template", None) or "")
    unknown = {role for role in _STANDS_FOR if role not in source}
    if not any(message.get("role") in unknown for message in messages):
        return messages
    known = [
        {**message, "role": _STANDS_FOR[message["role"]]}
        if message.get("role") in unknown
        else message
        for message in messages
    ]
    num_systems = next((i for i, m in enumerate(known) if m.get("role") != "system"), len(known))
    if num_systems < 2:
        return known
    joined = "\n\n".join(str(message.get("content") or "") for message in known[:num_systems])
    return [{"role": "system", "content": joined}, *known[num_systems:]]


def _texts_of(message: Mapping[str, Any], *, keeps_thinking: bool) -> Iterator[str]:
    """Yield the texts of a message without the space around them."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        text = as_mapping(part).get("text")
        if not isinstance(text, str):
            continue
        if message.get("role") == "assistant" and not keeps_thinking:
            text = text.rpartition(THINKING_END)[2]
        if text.strip():
            yield text.strip()


def _is_written_otherwise(text: str, prompt: str) -> bool:
    """Whether a prompt holds a text as JSON, or with other space."""
    written = [json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)]
    written += [_without_marks(form) for form in written]
    if any(form in prompt for form in written):
        return True
    squeezed = "".join(prompt.split())
    value = whole_value(text)
    if isinstance(value, (dict, list)):
        written += [json.dumps(value, ensure_ascii=is_ascii) for is_ascii in (False, True)]
    return any("".join(form.split()) in squeezed for form in [text, *written])


def _without_marks(text: str) -> str:
    """Return JSON text as templates that write HTML escape it."""
    marks = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&'"}
    return text.translate(marks)


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
