"""When the messages of a request continue a recorded conversation; pure.

A caller sends the whole conversation again with every turn, and rarely as it was answered: agents
and the dialects of a proxy re-serialise arguments, drop empty fields, trim texts. So turns are
compared by what they mean. Two messages are the same when these are equal:

- role, `name`, and the text of the content; a list of text parts is the text they make together.
  Missing, null and empty content are the same.
- of an assistant message also the calls, in their order: name, and arguments as JSON values, so
  neither spacing nor the order of keys nor `1.0` for `1` counts; its text as `said_form` has it:
  without the space around thoughts and text, a repeated thought once.

Ids of calls, `tool_call_id` and every other field are left out. An id, and then the exact content,
still choose between replies that say the same; a changed argument under an old id is a changed
turn.

The reply of a recorded turn may come back in any of these forms: as it was answered; without the
thinking in front of its `</think>`; only its calls, without the text before them; the raw text. A
text that a client library puts where a reply has none (`INSERTED_TEXTS`) counts as none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = [
    "INSERTED_TEXTS",
    "THINKING_END",
    "THINKING_START",
    "Conversation",
    "SampledReply",
    "as_mapping",
    "calls_of",
    "digest",
    "earlier_turns",
    "matched_length",
    "message_key",
    "reply_forms",
    "said_form",
    "spoken_text",
    "text_of_content",
]

THINKING_START = "<think>"
THINKING_END = "</think>"

INSERTED_TEXTS = frozenset(
    {"[System: Empty message content sanitised to satisfy protocol]", "Please continue."}
)
"""What litellm writes into an assistant message without text, since some providers refuse one."""

_EMPTY_ARGUMENTS = "{}"
_SPACED = re.compile(r"\s")
_TAGS = re.compile(f"{THINKING_START}|{THINKING_END}")

Keys = frozenset[str]
"""Every form of one message that counts as it."""


class SampledReply:
    """A sampled reply, and the forms in which it may come back.

    Args:
        raw_text: The completion.
        content: Text of the answer that was given for it.
        tool_calls: Calls of that answer.
        keeps_thinking: Whether a reply that comes back without its thinking is another one.

    Attributes:
        raw_text: The completion.
        call_ids: Ids of the calls.
    """

    def __init__(
        self,
        raw_text: str,
        content: str,
        tool_calls: Sequence[Any] | None,
        *,
        keeps_thinking: bool,
    ) -> None:
        self._content = content
        self.raw_text = raw_text
        self._keeps_thinking = keeps_thinking
        calls = calls_of(tool_calls)
        self.call_ids = tuple(call[0] for call in calls)
        self._calls = _calls_text(calls)  # now, since the caller may change what it was given

    @cached_property
    def keys(self) -> Keys:
        """The key of each form."""
        texts = {said_form(self._content)}
        if not self._keeps_thinking:
            texts = set(reply_forms(self._content, has_calls=bool(self.call_ids)))
        if self.call_ids:
            texts.add("")
        elif self.raw_text != self._content:
            texts |= (
                {said_form(self.raw_text)} if self._keeps_thinking else reply_forms(self.raw_text)
            )
        forms = {_key("assistant", None, self._calls, text) for text in texts}
        raw_form = _key("assistant", None, _calls_text([]), said_form(self.raw_text))
        return frozenset(forms | {raw_form})

    def likeness(self, content: str) -> int:
        """Return 3 for this reply's content, 2 for other spacing, 1 without its thinking, else 0.

        Of an empty reply and a thought with nothing behind it, an empty content is the first.
        """
        if content == self._content:
            return 3
        if said_form(content) == said_form(self._content):
            return 2
        return int(content == self._content.rpartition(THINKING_END)[2])


@dataclass(frozen=True)
class Conversation:
    """The turns of one recorded sequence."""

    earlier: tuple[Keys, ...]
    """[M-1] the forms of each message before the reply."""
    reply: SampledReply
    """The last message."""
    tools_key: str
    """The tool definitions the prompt showed."""
    has_thinking: bool = False
    """Whether a sampled reply holds thinking."""

    @property
    def num_turns(self) -> int:
        """Messages, the reply included."""
        return len(self.earlier) + 1


def matched_length(conversation: Conversation, keys: Sequence[str]) -> int:
    """Return how many messages of a request are this conversation's; 0 unless all of it are.

    Args:
        conversation: A recorded one.
        keys: [M] `message_key` of each message of the request.
    """
    length = conversation.num_turns
    if length > len(keys) or keys[length - 1] not in conversation.reply.keys:  # most end here
        return 0
    earlier = conversation.earlier
    is_prefix = all(key in forms for key, forms in zip(keys[: length - 1], earlier, strict=True))
    return length if is_prefix else 0


def earlier_turns(parent: Conversation | None, keys: Sequence[str]) -> tuple[Keys, ...]:
    """Return the turns before a new reply: those of the conversation it continues, and the added.

    Args:
        parent: That conversation; None for a new one.
        keys: [M] `message_key` of each message of the request.
    """
    known = (*parent.earlier, parent.reply.keys) if parent is not None else ()
    known = known[: len(keys)]  # of a reply that goes on itself, the messages before it
    return (*known, *(frozenset({key}) for key in keys[len(known) :]))


def message_key(message: Any) -> str:
    """Return a short text that is equal for messages that mean the same."""
    fields = as_mapping(message)
    role = str(fields.get("role"))
    text = text_of_content(fields.get("content"))
    if role != "assistant":
        return _key(role, fields.get("name"), "", text)
    return _key(role, None, _calls_text(calls_of(fields.get("tool_calls"))), said_form(text))


def said_form(text: str) -> str:
    """Return a reply's text in a form that is equal for texts that say the same.

    Thoughts and text lose the space around them, thoughts also the kind of space inside and their
    repetitions; a thought without words counts as none. The opening tag may be missing.
    """
    head, end, said = text.rpartition(THINKING_END)
    said = said.strip()
    while said.startswith(THINKING_START):  # cut inside of the thinking
        said = said.removeprefix(THINKING_START).lstrip()
    if said in INSERTED_TEXTS:
        said = ""
    thoughts = [" ".join(part.split()) for part in _TAGS.split(head)] if end else []
    distinct = dict.fromkeys(filter(None, thoughts))
    return "\0".join([*distinct, "", said]) if distinct else said


def reply_forms(text: str, *, has_calls: bool = False) -> frozenset[str]:
    """Return the `said_form` of everything that a reply's text may come back as.

    Args:
        text: What was answered.
        has_calls: Whether the reply calls tools; then its text may be left out.
    """
    said = text.rpartition(THINKING_END)[2]
    is_cut = said.lstrip().startswith(THINKING_START)
    forms = {text, said, "" if is_cut else said}
    if has_calls:
        forms |= {"", text[: len(text) - len(said)]}
    return frozenset(map(said_form, forms))


def digest(value: Any) -> str:
    """Return a short text that is equal for equal JSON values."""
    return _hashed(json.dumps(value, sort_keys=True, default=str))


def _key(role: str, name: Any, calls: str, text: str) -> str:
    return _hashed(f"{role}\0{name}\0{calls}\0{text}")


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _calls_text(calls: Sequence[tuple[str, str, str]]) -> str:
    return json.dumps([call[1:] for call in calls]) if calls else ""


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
