"""Process one request of a tracked session: find the sequence it continues, record the result.

A caller sends the whole conversation with every turn, rarely byte for byte: agents and proxy
dialects re-serialize arguments, drop empty fields and trim texts. So turns are compared by meaning.
Two messages are the same if these are equal:

- role, `name`, and the text of the content. A list of text parts equals their concatenation;
  missing, null and empty content are equal.
- for assistant messages also the calls, in order: name, and arguments as JSON values, so spacing,
  key order and `1.0` for `1` are ignored. Their text is compared in its `normal_form`: without
  whitespace around thoughts and text, and with repeated thoughts once.

Ids of calls, `tool_call_id` and all other fields are ignored. Among replies with equal meaning, the
ids decide, then the exact content. A changed argument under an old id is a changed turn.

A recorded reply may be sent back in any of these forms: as it was answered; without the thinking
before its `</think>`; only its calls, without the text before them; the raw text. A text that a
client library inserts into an empty reply (`INSERTED_TEXTS`) counts as empty.

    messages               ─► keys ─► longest recorded conversation they start with ─┐
    prompt of a completion ─────────► longest recorded text it starts with ──────────┴─► NodeRecord
    NodeRecord ─► Continuation ─► Turn.input_ids ─► engine ─► Sampled
    Sampled    ─► Turn.record  ─► the caller's answer, and a new NodeRecord

A request may also continue from an earlier turn of a sequence; it then uses the recorded tokens up
to that turn. Candidates are ranked by length, then by equal call ids, then by exact content, then
by whether the prompt starts with their text; whole sequences precede prefixes, then the first wins.

Text of a continued chat:

    recorded text + rest of the prompt   if the prompt starts with the recorded text, and its rest
                                         starts with the end of the turn
    recorded text + the template's       if the template would render the recorded turns differently
      output after a reply
    recorded text                        if the last message is a reply truncated by a limit

If the last message is the assistant's text, the model continues it: the prompt ends with that text.

One sequence of two turns, `p` prompt, `c` sampled, `.` masked:

    turn 1   p p p p c c c e            e is the sampled end of turn, absent from the text
    turn 2   p p p p c c c e p p p c c  the next prompt repeats e as text: it is not added again
    masks    . . . . c c c e . . . c c
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
from pydantic import BaseModel

from atroposlib.envs.server_handling.chat_rendering import (
    THINKING_END,
    FinishReason,
    TextAnswer,
    ToolAnswer,
    as_mapping,
    calls_of,
    check_texts,
    encode_added,
    encode_prompt,
    has_ids_of_text,
    hidden_tail,
    is_hidden,
    normal_form,
    render_added,
    reply_forms,
    text_after_reply,
    text_of,
    text_of_content,
    text_of_end,
)
from atroposlib.envs.server_handling.server_baseline import FROM_TEXT, TOKEN_VERSIONS
from atroposlib.envs.server_handling.text_sampling import TextReply
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.errors import PromptError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB, VersionRun, cut_runs, join_runs
from atroposlib.utils.aio import decode_long

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str]
"""Renders messages and tools as prompt text."""

_OPENING_TOKENS = 16
"""Number of tokens before a reply that are searched for a special token, which splits encoding."""

Keys = frozenset[str]
"""The keys of all equivalent forms of one message."""


class RecordedReply:
    """A sampled reply, and the forms in which a caller may send it back.

    With `keeps_thinking`, a reply sent back without its thinking counts as a different one.
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
        texts = {normal_form(self._content)}
        if not self._keeps_thinking:
            texts = set(reply_forms(self._content, has_calls=bool(self.call_ids)))
        if self.call_ids:
            texts.add("")
        elif self.raw_text != self._content:
            texts |= (
                {normal_form(self.raw_text)} if self._keeps_thinking else reply_forms(self.raw_text)
            )
        forms = {_key("assistant", None, self._calls, text) for text in texts}
        raw_form = _key("assistant", None, _calls_text([]), normal_form(self.raw_text))
        return frozenset(forms | {raw_form})

    def likeness(self, content: str) -> int:
        """Return how closely a content is that of this reply, from 4 to 0.

        4 the same, 3 without the space around it, 2 without its thinking, 1 in another spacing.
        """
        if content == self._content:
            return 4
        if content == self._content.strip():
            return 3
        if content == self._content.rpartition(THINKING_END)[2]:
            return 2
        return int(normal_form(content) == normal_form(self._content))


@dataclass(frozen=True)
class RecordedTurns:
    """The turns of one recorded sequence."""

    earlier: tuple[Keys, ...]
    """[M-1] the forms of each message before the reply."""
    reply: RecordedReply
    tools_key: str
    """Digest of the tool definitions in the prompt."""
    has_thinking: bool = False
    """Whether a sampled reply holds thinking."""

    @property
    def num_turns(self) -> int:
        return len(self.earlier) + 1


def matched_length(conversation: RecordedTurns, keys: Sequence[str]) -> int:
    """Return the length of a conversation if a request starts with it, else 0.

    `keys` are the [M] `message_key` of the messages of the request.
    """
    length = conversation.num_turns
    if length > len(keys) or keys[length - 1] not in conversation.reply.keys:  # most end here
        return 0
    earlier = conversation.earlier
    is_prefix = all(key in forms for key, forms in zip(keys[: length - 1], earlier, strict=True))
    return length if is_prefix else 0


def earlier_turns(parent: RecordedTurns | None, keys: Sequence[str]) -> tuple[Keys, ...]:
    """Return the turns before a new reply: those of the continued conversation, then the added."""
    known = (*parent.earlier, parent.reply.keys) if parent is not None else ()
    known = known[: len(keys)]  # if the request continues the reply itself, the messages before it
    return (*known, *(frozenset({key}) for key in keys[len(known) :]))


def message_key(message: Any) -> str:
    """Return a digest that is equal for messages with equal meaning."""
    fields = as_mapping(message)
    role = str(fields.get("role"))
    text = text_of_content(fields.get("content"))
    if role != "assistant":
        return _key(role, fields.get("name"), "", text)
    return _key(role, None, _calls_text(calls_of(fields.get("tool_calls"))), normal_form(text))


def digest(value: Any) -> str:
    """Return a digest that is equal for equal JSON values."""
    return _hashed(json.dumps(value, sort_keys=True, default=str))


def _key(role: str, name: Any, calls: str, text: str) -> str:
    return _hashed(f"{role}\0{name}\0{calls}\0{text}")


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _calls_text(calls: Sequence[tuple[str, str, str]]) -> str:
    return json.dumps([call[1:] for call in calls]) if calls else ""


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

    `weight_versions`: the engine's name of the weights of each completion, of its first token if
    they changed; oldest first.

    `token_versions`: the policy versions of the tokens, as runs (see `scored_data`), if the
    engine names its weights.

    `policy_version`: the oldest policy version among them, from the engine or the service.

    `tokenized_from_text`: True if the server reported no ids for at least one completion, so that
    they were encoded from its text; its logprobs are then `MASKED_LOGPROB`.
    """


def continue_ids(
    node: SequenceNode, added_ids: Sequence[int], is_hidden: Callable[[int], bool]
) -> list[int]:
    """Return the node's tokens followed by the added ones, with a shared end of turn only once.

    The sampled end-of-turn tokens are not part of the node's text, so the next prompt repeats
    them; the longest overlap between them and the start of `added_ids` is skipped. `is_hidden`
    returns whether a token is absent from texts.
    """
    num_hidden = num_hidden_at_end(node, is_hidden)
    overlap = 0
    for length in range(min(num_hidden, len(added_ids)), 0, -1):
        if node.tokens[-length:] == list(added_ids[:length]):
            overlap = length
            break
    return [*node.tokens, *added_ids[overlap:]]


def num_hidden_at_end(node: SequenceNode, is_hidden: Callable[[int], bool]) -> int:
    """Return the number of sampled tokens at the end of a node that are absent from its text."""
    num_hidden = 0
    for token_id, mask in zip(reversed(node.tokens), reversed(node.masked_tokens), strict=True):
        if mask == IGNORE_INDEX or not is_hidden(token_id):
            break
        num_hidden += 1
    return num_hidden


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
        finish_reason: Reason for which sampling ended.
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
    except msgspec.ValidationError:  # other types of numbers, or other values
        return SequenceNode(**fields)
    return SequenceNode.model_construct(**fields)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    shortest = min(len(first), len(second))
    if list(first[:shortest]) == list(second[:shortest]):
        return shortest
    return next(i for i in range(shortest) if first[i] != second[i])


@dataclass(frozen=True)
class TurnEnd:
    """Where one sampled reply ends in its sequence."""

    num_tokens: int
    """Number of tokens up to this end, including the sampled end of turn."""
    text_length: int
    """Length of the sequence's text up to this end."""
    num_reply_ids: int
    """Number of sampled tokens of the reply without its end of turn."""
    num_end_ids: int
    """Number of sampled tokens that end the turn."""
    hides_specials: bool
    """Whether special tokens are left out of its text."""
    end_text: str
    """The sampled end of turn as a template writes it; empty if the reply was truncated."""
    conversation: RecordedTurns | None
    """Its turns; None if it was sampled for a bare prompt."""
    weight_version: str | None
    """The engine's name of its weights."""
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class NodeRecord:
    """A sequence, or a prefix of one."""

    node: SequenceNode
    ends: tuple[TurnEnd, ...] = ()
    """Its sampled replies, oldest first; empty for a node that was not recorded here."""

    @property
    def last(self) -> TurnEnd | None:
        return self.ends[-1] if self.ends else None

    def up_to(self, num_ends: int) -> NodeRecord:
        """Return the sequence up to one of its ends."""
        if num_ends >= len(self.ends):
            return self
        end = self.ends[num_ends - 1]
        node = SequenceNode.model_construct(  # already validated
            full_text=self.node.full_text[: end.text_length],
            tokens=self.node.tokens[: end.num_tokens],
            masked_tokens=self.node.masked_tokens[: end.num_tokens],
            logprobs=self.node.logprobs[: end.num_tokens],
            metadata=dict(end.metadata),
        )
        return NodeRecord(node, self.ends[:num_ends])


@dataclass(frozen=True)
class Continuation:
    """A recorded sequence, and the text a request adds to it."""

    record: NodeRecord
    added_text: str
    """Text after it, including the end of its last turn."""
    is_rerendered: bool
    """Whether the chat template would write the recorded turns differently."""
    is_same_reply: bool = False
    """Whether the request continues the last recorded reply itself, rather than adding a turn."""


class NodeRecords:
    """Records by node; a node without a record is treated as bare text."""

    def __init__(self) -> None:
        self._records: dict[int, NodeRecord] = {}

    def add(self, record: NodeRecord) -> None:
        self._records[id(record.node)] = record

    def forget_others(self, nodes: Iterable[SequenceNode]) -> None:
        """Drop the records of every node that is not among `nodes`."""
        kept = [self._of(node) for node in nodes]
        self._records = {id(record.node): record for record in kept if record.ends}

    def find_text(
        self, nodes: Sequence[SequenceNode], prompt: str, *, only_bare: bool = False
    ) -> Continuation | None:
        """Return the sequence whose text is the longest prefix of a prompt; the first wins ties.

        `only_bare` excludes sequences sampled for messages.
        """
        best: tuple[NodeRecord, int] | None = None
        best_rank = (-1, False)
        for record, num_ends in self._beginnings(nodes):
            end = record.ends[num_ends - 1] if record.ends else None
            if only_bare and end is not None and end.conversation is not None:
                continue
            length = end.text_length if end is not None else len(record.node.full_text)
            rank = (length, num_ends == len(record.ends))
            if rank > best_rank and prompt.startswith(record.node.full_text[:length]):
                best, best_rank = (record, num_ends), rank
        if best is None:
            return None
        return Continuation(best[0].up_to(best[1]), prompt[best_rank[0] :], is_rerendered=False)

    def find_conversation(
        self,
        nodes: Sequence[SequenceNode],
        messages: Sequence[Mapping[str, Any]],
        keys: Sequence[str],
        prompt: str,
    ) -> NodeRecord | None:
        """Return the record of the conversation that these messages continue."""
        best: tuple[NodeRecord, int] | None = None
        best_rank = (0, False, 0, False, False)
        for record, num_ends in self._beginnings(nodes):
            end = record.ends[num_ends - 1] if record.ends else None
            conversation = end.conversation if end is not None else None
            length = matched_length(conversation, keys) if conversation else 0
            if end is None or conversation is None or not 0 < length >= best_rank[0]:
                continue
            reply = messages[length - 1]
            calls = calls_of(reply.get("tool_calls"))
            rank = (
                length,
                tuple(call[0] for call in calls) == conversation.reply.call_ids,
                conversation.reply.likeness(text_of_content(reply.get("content"))),
                prompt.startswith(record.node.full_text[: end.text_length]),
                num_ends == len(record.ends),
            )
            if rank > best_rank:
                best, best_rank = (record, num_ends), rank
        return best[0].up_to(best[1]) if best is not None else None

    def _beginnings(self, nodes: Sequence[SequenceNode]) -> Iterator[tuple[NodeRecord, int]]:
        """Yield every record with each number of replies after which it can be continued."""
        for node in nodes:
            record = self._of(node)
            for num_ends in range(len(record.ends), min(1, len(record.ends)) - 1, -1):
                yield record, num_ends

    def _of(self, node: SequenceNode) -> NodeRecord:
        record = self._records.get(id(node))
        return record if record is not None and record.node is node else NodeRecord(node)


@dataclass(frozen=True)
class ChatRequest:
    """A chat in the form that is compared with recorded conversations."""

    messages: list[Mapping[str, Any]]
    """[M] the conversation, without the partial reply at its end."""
    keys: list[str]
    """[M] `message_key` of each message."""
    tools: Sequence[Any] | None
    """Tool definitions shown in the prompt."""
    tools_key: str
    """Equal for equal tools."""
    prompt: str
    """The text of the messages and of the partial reply."""
    partial_reply: Mapping[str, Any] | None = None
    """The assistant message that the model continues; None for a reply from its start."""

    @property
    def partial_text(self) -> str:
        return (
            "" if self.partial_reply is None else text_of_content(self.partial_reply.get("content"))
        )

    @property
    def all_messages(self) -> list[Mapping[str, Any]]:
        return self.messages if self.partial_reply is None else [*self.messages, self.partial_reply]

    @classmethod
    def of(
        cls, messages: Sequence[Any], tools: Sequence[Any] | None, render: Render
    ) -> ChatRequest:
        """Render a chat and compute its keys.

        Raises:
            PromptError: the last message calls tools, so that no text can follow in it.
        """
        plain = plain_messages(messages)
        partial_reply = None
        if plain and plain[-1].get("role") == "assistant":
            partial_reply = plain.pop()
            if partial_reply.get("tool_calls"):
                raise PromptError(
                    "the last message is the assistant's and calls tools; add a tool message with "
                    "the result of each call"
                )
        keys = [message_key(message) for message in plain]
        tools_key = digest(tools) if tools else ""
        chat = cls(plain, keys, tools, tools_key, "", partial_reply)
        return replace(chat, prompt=render(plain, tools) + chat.partial_text)


def continue_chat(
    records: NodeRecords,
    nodes: Sequence[SequenceNode],
    request: ChatRequest,
    render: Render,
    *,
    strips_thinking: bool,
) -> Continuation | None:
    """Return the sequence that a chat continues; None for a new one.

    `strips_thinking` is whether the template may drop earlier thinking.
    """
    cut = _cut_reply(records, nodes, request)
    if cut is not None:
        return Continuation(cut, "", is_rerendered=False, is_same_reply=True)
    record = records.find_conversation(nodes, request.messages, request.keys, request.prompt)
    conversation = record.last.conversation if record is not None and record.last else None
    if record is None or conversation is None:
        return records.find_text(nodes, request.prompt, only_bare=True)
    num_turns = conversation.num_turns
    history, added = request.messages[: num_turns - 1], request.messages[num_turns:]
    rest = _rest_of_prompt(record, request, history, added, render)
    if rest is not None:
        # A turn that ended with a different token than the template's keeps both.
        is_same_end = rest.startswith(record.last.end_text if record.last else "")
        return Continuation(record, rest, is_rerendered=not is_same_end)
    is_dropped = strips_thinking and conversation.has_thinking
    if is_dropped or conversation.tools_key != request.tools_key:
        return None
    tail = render_added(lambda messages: render(messages, None), history, added)
    if tail is None:
        return None
    return Continuation(record, tail + request.partial_text, is_rerendered=True)


def _cut_reply(
    records: NodeRecords, nodes: Sequence[SequenceNode], request: ChatRequest
) -> NodeRecord | None:
    """Return the record whose last reply is the partial one, without an end of turn."""
    if request.partial_reply is None or not request.partial_text.strip():
        return None
    keys = [*request.keys, message_key(request.partial_reply)]
    record = records.find_conversation(nodes, request.all_messages, keys, request.prompt)
    last = record.last if record is not None else None
    if last is None or last.conversation is None or last.num_end_ids:
        return None
    is_whole = last.conversation.num_turns == len(keys)
    return record if is_whole and last.conversation.tools_key == request.tools_key else None


def _rest_of_prompt(
    record: NodeRecord,
    request: ChatRequest,
    history: Sequence[Mapping[str, Any]],
    added: Sequence[Mapping[str, Any]],
    render: Render,
) -> str | None:
    """Return the prompt after the recorded text; None unless the turn ends exactly there.

    A prompt that starts with the text may still be within the turn: `10` starts with `1`, and every
    prompt starts with the text of an empty reply.
    """
    if not request.prompt.startswith(record.node.full_text):
        return None
    rest = request.prompt[len(record.node.full_text) :]
    end_text = record.last.end_text if record.last is not None else ""
    if end_text and rest.startswith(end_text):
        return rest
    tail = text_after_reply(lambda messages: render(messages, request.tools), history, added)
    return rest if tail is not None and tail + request.partial_text == rest else None


def plain_messages(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return messages as mappings with text content, as chat templates expect them.

    Objects of a client lose their unset fields; content made only of text parts becomes one text.
    Other messages are the same objects.

    Raises:
        TypeError: `messages` is not a list of messages with roles.
    """
    plain = [] if isinstance(messages, str | Mapping) else [_plain_message(m) for m in messages]
    if not all("role" in message for message in plain) or (messages and not plain):
        raise TypeError(
            f"messages is {messages!r:.100}; expected a list of messages such as "
            '[{"role": "user", "content": "..."}]'
        )
    return plain


def _plain_message(message: Any) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = message
    if not isinstance(message, Mapping):
        fields = {name: v for name, v in as_mapping(message).items() if v is not None}
    content = fields.get("content")
    if not isinstance(content, list) or not content:
        return fields
    texts = [as_mapping(part).get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        return fields
    return {**fields, "content": "".join(map(str, texts))}


@dataclass(frozen=True)
class Sampled:
    """One completion as returned by the engine."""

    prompt_ids: list[int]
    """[P] ids the engine read."""
    ids: list[int]
    """[C] ids it sampled."""
    logprobs: list[float]
    """[C] their logprobs."""
    finish_reason: FinishReason
    weight_version: str | None
    """The engine's name of its weights at the first token."""
    version_runs: list[VersionRun]
    """Policy versions of the C ids; None for ids that were encoded from text."""
    policy_version: int | None
    """The oldest of them, else the version that the service reported."""
    reply: TextReply | None = None
    """Answer of a server without token ids, whose text was encoded; None: `ids` were sampled."""
    num_end_ids: int = 0
    """Number of ids after the text of `reply`."""


@dataclass(frozen=True)
class TurnRequest:
    """One request: its prompt, and the recorded sequence it continues."""

    tokenizer: Any
    """None if no tokenizer is known; then no ids are sent."""
    prompt: str
    parent: Continuation | None
    """The continued sequence; None for a new one."""
    chat: ChatRequest | None = None
    """The messages; None for a bare prompt."""
    translator: ToolCallTranslator | None = None
    """Parses tool calls; None leaves them as text."""
    tool_choice: Any = None
    strips_thinking: bool = False
    """Whether a reply sent back without its thinking counts as a different one."""

    @property
    def _last(self) -> TurnEnd | None:
        return self.parent.record.last if self.parent is not None else None

    @property
    def _metadata(self) -> Mapping[str, Any]:
        return (self.parent.record.node.metadata if self.parent is not None else None) or {}

    def input_ids(self) -> list[int]:
        """Return [P] ids to send, with the ids of the continued sequence unchanged."""
        if self.parent is None:
            return encode_prompt(self.tokenizer, self.prompt)
        added, node = self.parent.added_text, self.parent.record.node

        def is_absent(token_id: int) -> bool:
            return is_hidden(self.tokenizer, token_id)

        # The template may write only the last of several special tokens.
        num_ends = num_hidden_at_end(node, is_absent)
        ends = (text_of_end(self.tokenizer, node.tokens[-n:]) for n in range(1, num_ends + 1))
        if any(added.lstrip().startswith(end) for end in ends):
            added = added.lstrip()  # a space before the end would hide that it was sampled
        return continue_ids(node, encode_added(self.tokenizer, added), is_absent)

    def check_prompt(self) -> None:
        """Raise `PromptError` unless the prompt has the text of every message that was added."""
        if self.chat is None:
            return
        last = self._last
        if self.parent is None or last is None or last.conversation is None:
            text, start = self.full_prompt, 0
        else:
            text, start = self.parent.added_text, last.conversation.num_turns
        check_texts(text, self.chat.messages, start=start, keeps_thinking=not self.strips_thinking)

    async def record(
        self, sampled: Sampled, notes: Mapping[str, Any]
    ) -> tuple[TextAnswer | ToolAnswer, NodeRecord]:
        """Return the caller's answer for a completion, and the record of its sequence.

        Long texts are decoded in a way that does not block other sessions.
        """
        if sampled.reply is None:
            end_ids = self._end_ids(sampled.ids)
            reply_ids = list(sampled.ids[: len(sampled.ids) - len(end_ids)])
            text = await self._text_of(sampled.ids, reply_ids)
            given = self._answer_of(TextAnswer(text, sampled.finish_reason))
        else:
            num_reply_ids = len(sampled.ids) - sampled.num_end_ids
            reply_ids, end_ids = sampled.ids[:num_reply_ids], sampled.ids[num_reply_ids:]
            text = sampled.reply.text
            given = self._answer_with_calls(sampled.reply)
        if sampled.reply is not None or self._metadata.get(FROM_TEXT):
            notes = {**notes, FROM_TEXT: True}
        node = make_node(
            full_text=self.full_prompt + text,
            prompt_ids=sampled.prompt_ids,
            completion_ids=sampled.ids,
            completion_logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            parent=self.parent.record.node if self.parent is not None else None,
            notes={**notes, **self._version_notes(sampled)},
        )
        end = TurnEnd(
            num_tokens=len(node.tokens),
            text_length=len(node.full_text),
            num_reply_ids=len(reply_ids),
            num_end_ids=len(end_ids),
            hides_specials=self.translator is None,
            end_text=text_of_end(self.tokenizer, end_ids),
            conversation=self._conversation_of(text, given),
            weight_version=sampled.weight_version,
            metadata=dict(node.metadata or {}),
        )
        return given, NodeRecord(node, (*self._earlier_ends(sampled.prompt_ids), end))

    def _earlier_ends(self, prompt_ids: Sequence[int]) -> tuple[TurnEnd, ...]:
        """Return the ends of the continued sequence; empty if the engine read other tokens."""
        if self.parent is None:
            return ()
        record = self.parent.record
        known = record.node.tokens
        return record.ends if known == list(prompt_ids[: len(known)]) else ()

    @property
    def full_prompt(self) -> str:
        """Text of the ids sent; differs from `prompt` if the template renders turns differently."""
        if self.parent is None:
            return self.prompt
        return self.parent.record.node.full_text + self.parent.added_text

    async def notes_of_prompt(self) -> dict[str, Any]:
        """Return metadata on why a continued prompt differs from a fresh rendering."""
        if self.parent is None or self.tokenizer is None:
            return {}
        record = self.parent.record
        reasons = set(self._metadata.get("extended_by_tokens", ()))
        if self.parent.is_rerendered:
            reasons.add("template")
        if record.last is not None and not await self._is_shortest(record.node, record.last):
            reasons.add("tokenisation")
        return {"extended_by_tokens": sorted(reasons)} if reasons else {}

    async def _is_shortest(self, node: SequenceNode, end: TurnEnd) -> bool:
        """Whether encoding a reply's text after the opening of its turn gives its sampled ids."""
        stop = end.num_tokens - end.num_end_ids - end.num_reply_ids
        start = max(0, stop - _OPENING_TOKENS)
        specials = [i for i in range(start, stop) if is_hidden(self.tokenizer, node.tokens[i])]
        opening = node.tokens[specials[-1] + 1 : stop] if specials else []
        reply_ids = node.tokens[stop : stop + end.num_reply_ids]
        return await has_ids_of_text(
            self.tokenizer, opening + reply_ids, hides_specials=end.hides_specials
        )

    async def _text_of(self, ids: Sequence[int], reply_ids: Sequence[int]) -> str:
        """Return a completion's text, keeping special tokens that may mark tool calls."""
        if self.tokenizer is None:
            return text_of(None, ids)
        if self.translator is None:
            return await decode_long(self.tokenizer, ids, skip_special_tokens=True)
        return await decode_long(self.tokenizer, reply_ids, skip_special_tokens=False)

    def _end_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids at the end that are left out of the text; the template writes them."""
        if self.tokenizer is None:
            return []
        tail = hidden_tail(self.tokenizer, ids)
        if self.translator is None:
            return tail
        start = len(tail)  # marks of tool calls may be special tokens as well
        while start and tail[start - 1] == tail[-1]:
            start -= 1
        return tail[start:]

    def _answer_of(self, answer: TextAnswer) -> TextAnswer | ToolAnswer:
        """Return an answer with its tool calls, or the answer unchanged if it has none."""
        if self.translator is None or self.chat is None:
            return answer
        choice = self.tool_choice if isinstance(self.tool_choice, str) else "auto"
        partial_text = self._partial_text
        content, calls, _ = self.translator.parse_model_output(
            partial_text + answer.text, choice, self.chat.tools
        )
        if not calls:
            return answer
        return ToolAnswer(
            content[len(partial_text) :] or None if content else None,
            [call.model_dump() for call in calls],
        )

    @property
    def _partial_text(self) -> str:
        """Part of this reply that is already in the prompt."""
        if self.parent is not None and self.parent.is_same_reply:
            last = self._last
            return last.conversation.reply.raw_text if last and last.conversation else ""
        return self.chat.partial_text if self.chat is not None else ""

    def _answer_with_calls(self, reply: TextReply) -> TextAnswer | ToolAnswer:
        """Return an answer with the server's structured calls, or those in its text."""
        if self.translator is None or self.chat is None or not reply.tool_calls:
            return self._answer_of(TextAnswer(reply.text, reply.finish_reason))
        self.translator.remember_answer(reply.text, reply.content, reply.tool_calls)
        return ToolAnswer(reply.content, reply.tool_calls)

    def _conversation_of(self, text: str, given: TextAnswer | ToolAnswer) -> RecordedTurns | None:
        if self.chat is None:
            return None
        calls = given.tool_calls if isinstance(given, ToolAnswer) else None
        content = given.content if isinstance(given, ToolAnswer) else given.text
        known = self._last.conversation if self._last is not None else None
        partial_text = self._partial_text
        reply = RecordedReply(
            partial_text + text,
            partial_text + (content or ""),
            calls,
            keeps_thinking=self.strips_thinking,
        )
        return RecordedTurns(
            earlier=earlier_turns(known, self.chat.keys),
            reply=reply,
            tools_key=self.chat.tools_key,
            has_thinking=THINKING_END in text or (known is not None and known.has_thinking),
        )

    def _version_notes(self, sampled: Sampled) -> dict[str, Any]:
        """Return metadata on the weights; empty if nothing is known."""
        ends = self.parent.record.ends if self.parent is not None else ()
        known = [end.weight_version for end in ends] or self._metadata.get("weight_versions", ())
        versions = [*known, sampled.weight_version]
        notes: dict[str, Any] = {}
        if any(version is not None for version in versions):
            notes["weight_versions"] = versions
        earlier = self._metadata.get("policy_version")
        policies = [v for v in (earlier, sampled.policy_version) if v is not None]
        if notes:
            notes |= self._token_version_notes(sampled)
        return notes | ({"policy_version": min(policies)} if policies else {})

    def _token_version_notes(self, sampled: Sampled) -> dict[str, Any]:
        """Return the versions of all tokens; those of the continued sequence keep theirs."""
        runs: list[VersionRun] = []
        if self.parent is not None:
            shared = _common_length(self.parent.record.node.tokens, sampled.prompt_ids)
            runs = cut_runs(self._metadata.get(TOKEN_VERSIONS, ()), shared)
        num_new = len(sampled.prompt_ids) - sum(length for _, length in runs)
        runs = join_runs([*runs, (None, num_new), *sampled.version_runs])
        is_known = any(version is not None for version, _ in runs)
        return {TOKEN_VERSIONS: runs} if is_known else {}
