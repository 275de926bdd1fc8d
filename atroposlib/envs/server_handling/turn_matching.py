"""Match request messages with recorded conversations, and extend token sequences; pure.

A caller sends the whole conversation with every turn, rarely byte for byte: agents and proxy
dialects re-serialize arguments, drop empty fields and trim texts. So turns are compared by meaning.
Two messages are the same if these are equal:

- role, `name`, and the text of the content. A list of text parts equals their concatenation;
  missing, null and empty content are equal.
- for assistant messages also the calls, in order: name, and arguments as JSON values, so spacing,
  key order and `1.0` for `1` are ignored. Their text is compared in its `said_form`: without
  whitespace around thoughts and text, and with repeated thoughts once.

Ids of calls, `tool_call_id` and all other fields are ignored. Among replies with equal meaning, the
ids decide, then the exact content. A changed argument under an old id is a changed turn.

A recorded reply may be sent back in any of these forms: as it was answered; without the thinking
before its `</think>`; only its calls, without the text before them; the raw text. A text that a
client library inserts into an empty reply (`INSERTED_TEXTS`) counts as empty.

One sequence of two turns, `p` prompt, `c` sampled, `.` masked:

    turn 1   p p p p c c c e            e is the sampled end of turn, absent from the text
    turn 2   p p p p c c c e p p p c c  the next prompt repeats e as text: it is not added again
    masks    . . . . c c c e . . . c c
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from pydantic import BaseModel

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB

__all__ = [
    "INSERTED_TEXTS",
    "THINKING_END",
    "THINKING_START",
    "Conversation",
    "SampledReply",
    "SequenceNode",
    "as_mapping",
    "calls_of",
    "continue_ids",
    "digest",
    "earlier_turns",
    "longest_prefix",
    "make_node",
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
"""Texts that litellm inserts into empty assistant messages, which some providers refuse."""

_EMPTY_ARGUMENTS = "{}"
_SPACED = re.compile(r"\s")
_TAGS = re.compile(f"{THINKING_START}|{THINKING_END}")

Keys = frozenset[str]
"""The keys of all equivalent forms of one message."""


class SampledReply:
    """A sampled reply, and the forms in which a caller may send it back.

    Args:
        raw_text: The completion.
        content: Text of the answer given for it.
        tool_calls: Calls of that answer.
        keeps_thinking: Whether a reply sent back without its thinking counts as a different one.

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
        self._calls = _calls_text(calls)  # computed now, as the caller may modify the calls

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

        An empty content matches an empty reply better than a reply that is only thinking.
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
    """Digest of the tool definitions in the prompt."""
    has_thinking: bool = False
    """Whether a sampled reply holds thinking."""

    @property
    def num_turns(self) -> int:
        """Number of messages, the reply included."""
        return len(self.earlier) + 1


def matched_length(conversation: Conversation, keys: Sequence[str]) -> int:
    """Return the length of a conversation if a request starts with it, else 0.

    Args:
        conversation: A recorded conversation.
        keys: [M] `message_key` of each message of the request.
    """
    length = conversation.num_turns
    if length > len(keys) or keys[length - 1] not in conversation.reply.keys:  # most end here
        return 0
    earlier = conversation.earlier
    is_prefix = all(key in forms for key, forms in zip(keys[: length - 1], earlier, strict=True))
    return length if is_prefix else 0


def earlier_turns(parent: Conversation | None, keys: Sequence[str]) -> tuple[Keys, ...]:
    """Return the turns before a new reply: those of the continued conversation and the added ones.

    Args:
        parent: The continued conversation; None for a new one.
        keys: [M] `message_key` of each message of the request.
    """
    known = (*parent.earlier, parent.reply.keys) if parent is not None else ()
    known = known[: len(keys)]  # if the request continues the reply itself, the messages before it
    return (*known, *(frozenset({key}) for key in keys[len(known) :]))


def message_key(message: Any) -> str:
    """Return a short text that is equal for messages with equal meaning."""
    fields = as_mapping(message)
    role = str(fields.get("role"))
    text = text_of_content(fields.get("content"))
    if role != "assistant":
        return _key(role, fields.get("name"), "", text)
    return _key(role, None, _calls_text(calls_of(fields.get("tool_calls"))), said_form(text))


def said_form(text: str) -> str:
    """Return a reply's text in a normalized form, equal for texts with equal meaning.

    Whitespace around thoughts and text is removed. Within thoughts, whitespace is collapsed, and
    repeated or empty thoughts are dropped. The opening tag may be missing.
    """
    head, end, said = text.rpartition(THINKING_END)
    said = said.strip()
    while said.startswith(THINKING_START):  # truncated within the thinking
        said = said.removeprefix(THINKING_START).lstrip()
    if said in INSERTED_TEXTS:
        said = ""
    thoughts = [" ".join(part.split()) for part in _TAGS.split(head)] if end else []
    distinct = dict.fromkeys(filter(None, thoughts))
    return "\0".join([*distinct, "", said]) if distinct else said


def reply_forms(text: str, *, has_calls: bool = False) -> frozenset[str]:
    """Return the `said_form` of every form in which a reply's text may be sent back.

    Args:
        text: Text of the answer.
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
    """Return the text of a message's content without its non-text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(as_mapping(part).get("text") or "") for part in parts)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a message or call as a mapping; agents may pass objects of their client."""
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
    """Return JSON that is equal for equal values; text that is not JSON loses its whitespace."""
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
    """Convert floats with integer values to integers, as clients in other languages do."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _with_plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_plain_numbers(entry) for entry in value]
    return value


class SequenceNode(BaseModel):
    """One tracked sequence: a prompt, its completion, and all turns that follow.

    `tokens`, `masked_tokens` and `logprobs` have one entry per token. A worked example, prompt
    `[1, 72]` and sampled `[105, 2]`:

        tokens         [1,    72,   105,  2]
        masked_tokens  [-100, -100, 105,  2]
        logprobs       [1.0,  1.0,  -0.3, -0.1]
    """

    full_text: str
    """Prompt and completions as text, without special tokens in the completions."""
    tokens: list[int]
    """[L] ids as the engine reported them."""
    masked_tokens: list[int]
    """[L] the id where it was sampled, `IGNORE_INDEX` elsewhere."""
    logprobs: list[float]
    """[L] the sampled id's logprob, `MASKED_LOGPROB` elsewhere."""
    metadata: dict[str, Any] | None = None
    """`finish_reason` of the last completion, and these optional keys:

    `extended_by_tokens`: why the recorded ids differ from a fresh rendering of the conversation: a
    list of `template` (the chat template would write earlier turns differently) and
    `tokenisation` (the text of a reply has other ids than were sampled).

    `weight_versions`: the engine's name of the weights of each completion, oldest first.

    `policy_version`: the oldest policy version among them, from the engine or the service.

    `tokenized_from_text`: True if the server reported no ids for at least one completion, so that
    they were encoded from its text; its logprobs are then `MASKED_LOGPROB`.
    """


def longest_prefix(nodes: Sequence[SequenceNode], text: str) -> SequenceNode | None:
    """Return the node whose text is the longest prefix of `text`; the first wins ties."""
    candidates = [node for node in nodes if text.startswith(node.full_text)]
    return max(candidates, key=lambda node: len(node.full_text), default=None)


def continue_ids(
    node: SequenceNode, added_ids: Sequence[int], is_hidden: Callable[[int], bool]
) -> list[int]:
    """Return the node's tokens followed by the added ones, the shared end of turn only once.

    The sampled end-of-turn tokens are not part of the node's text, so the next prompt repeats
    them; the longest overlap between them and the start of `added_ids` is skipped.

    Args:
        node: Sequence that the prompt continues.
        added_ids: [A] ids of the prompt's text after the node's text.
        is_hidden: Whether a token is absent from the node's text.
    """
    num_hidden = 0
    for token_id, mask in zip(reversed(node.tokens), reversed(node.masked_tokens), strict=True):
        if mask == IGNORE_INDEX or not is_hidden(token_id):
            break
        num_hidden += 1
    overlap = 0
    for length in range(min(num_hidden, len(added_ids)), 0, -1):
        if node.tokens[-length:] == list(added_ids[:length]):
            overlap = length
            break
    return [*node.tokens, *added_ids[overlap:]]


def make_node(
    *,
    full_text: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    completion_logprobs: Sequence[float],
    finish_reason: str,
    parent: SequenceNode | None,
    notes: Mapping[str, Any] | None = None,
) -> SequenceNode:
    """Build the node of one completion, keeping the sampled tokens of its parent trainable.

    Args:
        full_text: Prompt text and completion text.
        prompt_ids: [P] ids the engine read.
        completion_ids: [C] ids it sampled.
        completion_logprobs: [C] their logprobs; padded with `MASKED_LOGPROB` or cut to C.
        finish_reason: Why sampling ended.
        parent: Node the prompt continues. Its masks and logprobs are copied for the common prefix
            of its tokens and the prompt; None masks the whole prompt.
        notes: Further entries of `SequenceNode.metadata`.
    """
    masks = [IGNORE_INDEX] * len(prompt_ids)
    logprobs = [MASKED_LOGPROB] * len(prompt_ids)
    if parent is not None:
        shared = _common_length(parent.tokens, prompt_ids)
        masks[:shared] = parent.masked_tokens[:shared]
        logprobs[:shared] = parent.logprobs[:shared]
    padding = [MASKED_LOGPROB] * (len(completion_ids) - len(completion_logprobs))
    fields: dict[str, Any] = {
        "full_text": full_text,
        "tokens": [*prompt_ids, *completion_ids],
        "masked_tokens": [*masks, *completion_ids],
        "logprobs": [*logprobs, *completion_logprobs[: len(completion_ids)], *padding],
        "metadata": {"finish_reason": finish_reason, **(notes or {})},
    }
    try:  # ten times faster than the model's validation, which blocks the event loop
        fields["tokens"] = msgspec.convert(fields["tokens"], list[int])
        fields["logprobs"] = msgspec.convert(fields["logprobs"], list[float])
    except msgspec.ValidationError:  # numbers of other kinds, or none
        return SequenceNode(**fields)
    return SequenceNode.model_construct(**fields)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    shortest = min(len(first), len(second))
    if list(first[:shortest]) == list(second[:shortest]):
        return shortest
    return next(i for i in range(shortest) if first[i] != second[i])
