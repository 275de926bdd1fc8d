"""Render conversations with the chat template, and convert between token ids and text.

messages ─► render_messages ─► prompt text ─► encode_prompt ─► ids
            render_added    ─► text that a template writes after a reply ─► encode_added ─► ids
ids      ─► text_of         ─► completion text without special tokens
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from atroposlib.envs.server_handling.token_server import drop_double_bos
from atroposlib.envs.server_handling.tool_formats import whole_value
from atroposlib.envs.server_handling.turn_matching import THINKING_END, as_mapping
from atroposlib.errors import ConfigError, PromptError
from atroposlib.utils.tokenizers.earlier_calls import no_template_text

__all__ = [
    "check_texts",
    "encode_added",
    "encode_model_text",
    "encode_prompt",
    "has_ids_of_text",
    "hidden_tail",
    "is_hidden",
    "render_added",
    "render_either",
    "render_messages",
    "tail_behind",
    "text_of",
    "text_of_end",
]

Render = Callable[[Sequence[Mapping[str, Any]]], str]

# Private-use characters: templates do not look for them, and they are removed before encoding.
_PLACEHOLDERS = {"<think>": "\ue000think\ue001", "</think>": "\ue000/think\ue001"}
_REPLY = "\ue002reply\ue003"

_STANDS_FOR = {"developer": "system"}
"""Roles that most templates silently skip, mapped to the role with the same meaning."""

_SHOWN_START = 60

PIECE_TOKENS = 2048
"""Maximum number of tokens encoded at once; longer pieces would block the event loop."""

_WORD_WITHIN = 64
"""How many tokens after a piece are searched for the start of a word."""

_COPIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Copies that encode the spelling of special tokens as text, by the original tokenizer."""


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    keep_thinking: bool = True,
) -> str:
    """Return the prompt text of a conversation.

    A generation prompt is added unless the last message is the assistant's. Without a chat template
    each message becomes a line `role: content`. The role `developer` becomes `system` if the
    template's source does not name it.

    Args:
        tokenizer: Any object with `apply_chat_template`; None for the plain lines.
        messages: Conversation so far; not modified.
        tools: Tool definitions for the template; None leaves the argument out.
        keep_thinking: Hide `<think>` tags of assistant messages from the template, since many
            templates drop earlier thinking and a continued sequence would no longer match.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        return "\n".join(
            f"{message['role']}: {message.get('content') or ''}" for message in messages
        )
    # User-defined tokenizers may render without one.
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

    Surrounding whitespace may differ, and the text may appear as JSON, as in tool results.
    Parts of a message that are not text are not checked.

    Args:
        prompt: Output of the template for the messages.
        messages: A conversation.
        start: Index of the first message to check.
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
                    f"{message.get('role')!r}, {text[:_SHOWN_START]!r}); send the text in a role "
                    "that the template supports"
                )


def render_either(
    render: Render,
    preferred: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
) -> str:
    """Return the text of a conversation in the first of two forms that the template accepts.

    Some templates recognize a tool call by its `tool_calls`, and refuse two answers in a row.
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
    """Return the text a template writes after a reply: its end, the added messages, the opening.

    The result does not depend on how the template would write the messages before the reply. The
    reply follows one short question: some templates put the system text or the tools before the
    *last* question and would repeat them. A template that refuses this gets the whole history.

    Args:
        render: Renders messages as prompt text.
        history: [M] messages before the reply.
        added: Messages after it.

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
    """Return what a template writes after a reply to `before`; None if it refuses."""
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
    """Return the errors a template raises for a conversation it refuses."""
    try:
        from jinja2 import TemplateError
    except ImportError:  # then the tokenizer does not render with jinja2
        return (TypeError,)
    return (TemplateError, TypeError)  # TypeError when a template adds None to text


def _with_known_roles(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with roles unknown to the template replaced by equivalent ones.

    Leading system messages are then joined, since templates expect a single one.
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
    """Yield the texts of a message without surrounding whitespace."""
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
    """Whether a prompt holds a text as JSON, or with different whitespace."""
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
    """Return JSON text with the escapes of templates that write HTML."""
    marks = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&'"}
    return text.translate(marks)


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls hold arguments as objects, as chat templates expect them."""
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


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a whole prompt, without the duplicate if text and tokenizer add a bos."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    return drop_double_bos(ids, getattr(tokenizer, "bos_token_id", None))


def encode_added(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of text that follows a recorded sequence."""
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def encode_model_text(tokenizer: Any, text: str, *, own_marks: str = "") -> list[int]:
    """Return the ids of a model's text, encoding the spelling of special tokens as plain text.

    A model that spells `<|im_end|>` in its answer has not ended its turn, and must not be trained
    as if it had. Tokens that stay in texts, such as `<think>`, are encoded as usual.

    Args:
        tokenizer: Any tokenizer. Texts that contain special tokens are encoded with its option
            `split_special_tokens`, or piece by piece if it lacks that option.
        text: Text of the model, with the markup that this package added.
        own_marks: The added markup alone. Its special tokens stay special in `text`, unless
            `text` spells further ones.
    """
    ids = encode_added(tokenizer, text)
    special = _special_ids(tokenizer)
    found = [i for i in ids if i in special]
    if not found or found == [i for i in encode_added(tokenizer, own_marks) if i in special]:
        return ids
    ids = _encode_split(tokenizer, text)
    if special.isdisjoint(ids):
        return ids
    spellings = (str(tokenizer.decode([i], skip_special_tokens=False)).strip() for i in special)
    longest_first = sorted(filter(None, spellings), key=len, reverse=True)
    # A cut after the first character of each leaves no special token in any piece.
    pieces = re.split(
        "|".join(f"(?<={re.escape(s[0])})(?={re.escape(s[1:])})" for s in longest_first), text
    )
    ids = [i for piece in pieces for i in encode_added(tokenizer, piece)]
    return [i for i in ids if i not in special]


def _encode_split(tokenizer: Any, text: str) -> list[int]:
    try:
        splitting = _COPIES.get(tokenizer)
        if splitting is None:
            # Fast tokenizers keep the option until their next call, possibly from another thread.
            splitting = copy.deepcopy(tokenizer)
            _COPIES[tokenizer] = splitting
        return list(splitting.encode(text, add_special_tokens=False, split_special_tokens=True))
    except Exception:  # noqa: BLE001 - any object may stand in for a tokenizer
        return encode_added(tokenizer, text)


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of special tokens, without the one for unknown text."""
    # User-defined tokenizers may have neither attribute.
    ids = set(getattr(tokenizer, "all_special_ids", None) or ())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    ids |= {i for i, token in added.items() if getattr(token, "special", False)}
    unknown = getattr(tokenizer, "unk_token_id", None)
    ends = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return {i for i in ids if i != unknown or i in ends}


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return a completion without its special tokens; without a tokenizer, ids are code points."""
    if tokenizer is None:
        return "".join(chr(i) for i in ids if 0 <= i < 0x110000 and chr(i).isprintable())
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def is_hidden(tokenizer: Any, token_id: int) -> bool:
    """Whether a token is left out of texts; False for one that always decodes to nothing."""
    try:
        return _is_hidden_once(tokenizer, token_id)
    except TypeError:  # a tokenizer that cannot be hashed
        return _is_hidden_once.__wrapped__(tokenizer, token_id)


@lru_cache(maxsize=4096)
def _is_hidden_once(tokenizer: Any, token_id: int) -> bool:
    shown = tokenizer.decode([token_id], skip_special_tokens=False)
    return bool(shown) and not text_of(tokenizer, [token_id])


def text_of_end(tokenizer: Any, end_ids: Sequence[int]) -> str:
    """Return the special tokens that end a turn as a template writes them."""
    return "".join(str(tokenizer.decode([i], skip_special_tokens=False)) for i in end_ids)


def hidden_tail(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the special tokens at the end of a completion, which end its turn."""
    start = len(ids)
    while start and is_hidden(tokenizer, ids[start - 1]):
        start -= 1
    return list(ids[start:])


async def has_ids_of_text(tokenizer: Any, ids: Sequence[int], *, hides_specials: bool) -> bool:
    """Whether encoding the text of these ids returns the same ids; models may sample others.

    Long texts are encoded in pieces that start at a word, so that each piece encodes as in the
    whole text.

    Args:
        tokenizer: Encodes and decodes.
        ids: [L] tokens.
        hides_specials: Whether special tokens are left out of the text.
    """
    start = 0
    while start < len(ids):
        end = _end_of_piece(tokenizer, ids, start)
        piece = list(ids[start:end])
        text = str(tokenizer.decode(piece, skip_special_tokens=hides_specials))
        if encode_added(tokenizer, text) != piece:
            return False
        start = end
        if start < len(ids):
            await asyncio.sleep(0)
    return True


def _end_of_piece(tokenizer: Any, ids: Sequence[int], start: int) -> int:
    end = start + PIECE_TOKENS
    for word in range(end, min(end + _WORD_WITHIN, len(ids))):
        if str(tokenizer.decode([ids[word]])).startswith(" "):
            return word
    return min(end, len(ids))
