"""When the messages of a request continue a recorded conversation; pure.

A caller sends the whole conversation again with every turn, and rarely as it was answered: agents
and the dialects of a proxy re-serialise arguments, drop empty fields, trim texts. So turns are
compared by what they mean. Two messages are the same when these are equal:

- role, `name`, and the text of the content; a list of text parts is the text they make together.
  Missing, null and empty content are the same.
- of an assistant message also the calls, in their order: name, and arguments as JSON values, so
  neither spacing nor the order of keys nor `1.0` for `1` counts; its text without outer space.

Ids of calls, `tool_call_id` and every other field are left out. An id, and then the exact content,
still choose between replies that say the same; a changed argument under an old id is a changed
turn.

The reply of a recorded turn may come back in any of these forms: as it was answered; without the
thinking in front of its `</think>`; only its calls, without the text before them; the raw text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "THINKING_END",
    "Conversation",
    "as_mapping",
    "calls_of",
    "continued_turns",
    "digest",
    "matched_length",
    "message_key",
    "reply_keys",
    "spoken_text",
    "text_of_content",
]

THINKING_END = "</think>"

_EMPTY_ARGUMENTS = "{}"
_SPACED = re.compile(r"\s")

Keys = frozenset[str]
"""Every form of one message that counts as it."""


@dataclass(frozen=True)
class Conversation:
    """The turns of one recorded sequence, the sampled reply last."""

    turns: tuple[Keys, ...]
    """[M] the forms of each message."""
    tools_key: str
    """The tool definitions the prompt showed."""
    call_ids: tuple[str, ...] = ()
    """Ids given to the calls of the last reply."""
    reply_content: str = ""
    """The content the last reply was answered with."""
    has_thinking: bool = False
    """Whether a sampled reply holds thinking."""


def matched_length(conversation: Conversation, keys: Sequence[str]) -> int:
    """Return how many messages of a request are this conversation's; 0 unless all of it are.

    Args:
        conversation: A recorded one.
        keys: [M] `message_key` of each message of the request.
    """
    turns = conversation.turns
    length = len(turns)
    if length > len(keys) or keys[length - 1] not in turns[-1]:  # most end here
        return 0
    is_prefix = all(key in forms for key, forms in zip(keys[:length], turns, strict=True))
    return length if is_prefix else 0


def continued_turns(
    parent: Conversation | None, keys: Sequence[str], reply: Keys
) -> tuple[Keys, ...]:
    """Return the turns of a new sequence: those of its parent, the added messages, the reply."""
    known = parent.turns if parent is not None else ()
    return (*known, *(frozenset({key}) for key in keys[len(known) :]), reply)


def reply_keys(
    raw_text: str, content: str | None, tool_calls: Sequence[Any] | None, *, keeps_thinking: bool
) -> Keys:
    """Return the forms in which a reply may come back.

    Args:
        raw_text: The completion.
        content: Text of the answer that was given for it.
        tool_calls: Calls of that answer.
        keeps_thinking: Whether a reply that comes back without its thinking is another one.
    """
    contents = {content or "", raw_text if not tool_calls else ""}
    contents |= {""} if tool_calls else set()
    if not keeps_thinking:
        contents |= {text.rpartition(THINKING_END)[2] for text in contents}
    forms = [{"role": "assistant", "content": c, "tool_calls": tool_calls} for c in contents]
    forms.append({"role": "assistant", "content": raw_text})
    return frozenset(map(message_key, forms))


def message_key(message: Any) -> str:
    """Return a short text that is equal for messages that mean the same."""
    fields = as_mapping(message)
    role = str(fields.get("role"))
    text = text_of_content(fields.get("content"))
    if role != "assistant":
        return digest([role, fields.get("name"), text])
    calls = [[name, arguments] for _, name, arguments in calls_of(fields.get("tool_calls"))]
    return digest([role, None, text.strip(), calls])


def digest(value: Any) -> str:
    """Return a short text that is equal for equal JSON values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def calls_of(tool_calls: Any) -> list[tuple[str, str, str]]:
    """Return (id, name, canonical arguments) of each call of an assistant message."""
    found = []
    for call in tool_calls if isinstance(tool_calls, Sequence) else ():
        fields = as_mapping(call)
        function = as_mapping(fields.get("function"))
        arguments = _canonical_arguments(function.get("arguments"))
        found.append((str(fields.get("id")), str(function.get("name")), arguments))
    return found


def text_of_content(content: Any) -> str:
    """Return the text of a message's content; parts that are not text appear as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    return "".join(_text_of_part(part) for part in parts)


def spoken_text(content: Any) -> str:
    """Return the text of a message's content without the parts that are not text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(as_mapping(part).get("text") or "") for part in parts)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a message or call as a mapping; agents also pass on the objects of their client."""
    if isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    dumped = dump() if callable(dump) else None
    return dumped if isinstance(dumped, Mapping) else {}


def _text_of_part(part: Any) -> str:
    fields = as_mapping(part)
    text = fields.get("text")
    if isinstance(text, str):
        return text
    return json.dumps(fields or part, sort_keys=True, default=str)


def _canonical_arguments(arguments: Any) -> str:
    """Return JSON that is equal for equal values; arguments that are no JSON without space."""
    value = arguments
    if isinstance(arguments, str):
        if not arguments.strip():
            return _EMPTY_ARGUMENTS
        try:
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return _SPACED.sub("", arguments)
    if value is None:
        return _EMPTY_ARGUMENTS
    try:
        return json.dumps(_with_plain_numbers(value), sort_keys=True, default=str)
    except (ValueError, TypeError, RecursionError):
        return repr(value)


def _with_plain_numbers(value: Any) -> Any:
    """Write whole numbers as integers everywhere, as clients in other languages do."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _with_plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_plain_numbers(entry) for entry in value]
    return value
