"""Process one request of a tracked session: find the sequence it continues, record the result.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atroposlib.envs.server_handling.chat_rendering import (
    Answer,
    FinishReason,
    ToolAnswer,
    ToolCallTranslator,
    check_texts,
    encode_added,
    encode_prompt,
    has_ids_of_text,
    hidden_tail,
    is_hidden,
    render_added,
    tail_behind,
    text_of,
    text_of_end,
)
from atroposlib.envs.server_handling.server_baseline import FROM_TEXT
from atroposlib.envs.server_handling.text_sampling import TextReply
from atroposlib.envs.server_handling.turn_matching import (
    THINKING_END,
    Conversation,
    SampledReply,
    SequenceNode,
    as_mapping,
    calls_of,
    continue_ids,
    digest,
    earlier_turns,
    make_node,
    matched_length,
    message_key,
    text_of_content,
)
from atroposlib.errors import PromptError
from atroposlib.utils.aio import decode_long

__all__ = [
    "ChatRequest",
    "Continuation",
    "NodeRecord",
    "NodeRecords",
    "Sampled",
    "Turn",
    "TurnEnd",
    "continue_chat",
    "plain_messages",
]

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str]
"""Renders messages and tools as prompt text."""

_OPENING_TOKENS = 16
"""How many tokens before a reply are searched for a special token, where encoding can restart."""


@dataclass(frozen=True)
class TurnEnd:
    """Where one sampled reply ends in its sequence."""

    num_tokens: int
    """Number of tokens up to this end, the sampled end of turn included."""
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
    conversation: Conversation | None
    """Its turns; None if it was sampled for a bare prompt."""
    weight_version: str | None
    """The engine's name of its weights."""
    metadata: Mapping[str, Any]
    """Metadata of the node that ended here."""


@dataclass(frozen=True)
class NodeRecord:
    """A sequence, or a prefix of one."""

    node: SequenceNode
    """The tokens."""
    ends: tuple[TurnEnd, ...] = ()
    """Its sampled replies, oldest first; empty for a node not recorded here."""

    @property
    def last(self) -> TurnEnd | None:
        """The end of the sequence."""
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
    """The continued sequence."""
    added_text: str
    """Text after it, the end of its last turn included."""
    is_rerendered: bool
    """Whether the chat template would write the recorded turns differently."""
    is_same_reply: bool = False
    """Whether the request continues the last recorded reply itself, rather than adding a turn."""


class NodeRecords:
    """Records by node; a node without a record is treated as bare text."""

    def __init__(self) -> None:
        self._records: dict[int, NodeRecord] = {}

    def add(self, record: NodeRecord) -> None:
        """Keep a record as long as its node is kept."""
        self._records[id(record.node)] = record

    def forget_others(self, nodes: Iterable[SequenceNode]) -> None:
        """Drop the records of every node that is not among `nodes`."""
        kept = [self._of(node) for node in nodes]
        self._records = {id(record.node): record for record in kept if record.ends}

    def find_text(
        self, nodes: Sequence[SequenceNode], prompt: str, *, only_bare: bool = False
    ) -> Continuation | None:
        """Return the sequence whose text is the longest prefix of a prompt; the first wins ties.

        Args:
            nodes: The session's sequences.
            prompt: The text.
            only_bare: Exclude sequences sampled for messages.
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
        """Return the record of the conversation that these messages continue.

        Args:
            nodes: The session's sequences.
            messages: [M] messages of the request.
            keys: [M] `message_key` of each.
            prompt: Their prompt text.
        """
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
        """Yield every record with each number of replies after which it may be continued."""
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
        """The text of the partial reply."""
        return (
            "" if self.partial_reply is None else text_of_content(self.partial_reply.get("content"))
        )

    @property
    def all_messages(self) -> list[Mapping[str, Any]]:
        """The conversation with the partial reply."""
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

    Args:
        records: Records of the nodes.
        nodes: Candidates.
        request: The chat.
        render: Renders prompts.
        strips_thinking: Whether the template may drop earlier thinking.
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

    A prompt may start with the text and still be within the turn: `10` starts with `1`, and every
    prompt starts with the text of an empty reply.
    """
    if not request.prompt.startswith(record.node.full_text):
        return None
    rest = request.prompt[len(record.node.full_text) :]
    end_text = record.last.end_text if record.last is not None else ""
    if end_text and rest.startswith(end_text):
        return rest
    tail = tail_behind(lambda messages: render(messages, request.tools), history, added)
    return rest if tail is not None and tail + request.partial_text == rest else None


def plain_messages(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return messages as mappings with text content, as chat templates expect them.

    Objects of a client lose their unset fields; content made only of text parts becomes one text.
    Other messages are the same objects.
    """
    return [_plain_message(message) for message in messages]


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
    """Why sampling ended."""
    weight_version: str | None
    """The engine's name of its weights."""
    policy_version: int | None
    """The policy version of these weights."""
    reply: TextReply | None = None
    """Answer of a server without token ids; `ids` are then encoded from its text. None: `ids` were
    sampled."""
    num_end_ids: int = 0
    """Number of ids after the text of `reply`."""


@dataclass(frozen=True)
class Turn:
    """One request: its prompt, and the recorded sequence it continues."""

    tokenizer: Any
    """None if no tokenizer is known; then no ids are sent."""
    prompt: str
    """The prompt's text."""
    parent: Continuation | None
    """The continued sequence; None for a new one."""
    chat: ChatRequest | None = None
    """The messages; None for a bare prompt."""
    translator: ToolCallTranslator | None = None
    """Parses tool calls; None leaves them as text."""
    tool_choice: Any = None
    """Value given by the caller."""
    strips_thinking: bool = False
    """Whether a reply sent back without its thinking counts as a different one."""

    def input_ids(self) -> list[int]:
        """Return [P] ids to send, with the ids of the continued sequence unchanged."""
        if self.parent is None:
            return encode_prompt(self.tokenizer, self.prompt)
        added_ids = encode_added(self.tokenizer, self.parent.added_text)
        node = self.parent.record.node
        return continue_ids(node, added_ids, lambda i: is_hidden(self.tokenizer, i))

    def check_prompt(self) -> None:
        """Raise unless the prompt holds every new message; recorded ones were checked before.

        Raises:
            PromptError: the chat template left out the text of a message.
        """
        if self.chat is None:
            return
        last = self.parent.record.last if self.parent is not None else None
        if self.parent is None or last is None or last.conversation is None:
            text, start = self.full_prompt, 0
        else:
            text, start = self.parent.added_text, last.conversation.num_turns
        check_texts(text, self.chat.messages, start=start, keeps_thinking=not self.strips_thinking)

    async def record(
        self, sampled: Sampled, notes: Mapping[str, Any]
    ) -> tuple[Answer | ToolAnswer, NodeRecord]:
        """Return the caller's answer for a completion, and the record of its sequence.

        Long texts are decoded in a way that does not block other sessions.

        Args:
            sampled: The completion.
            notes: Result of `notes_of_prompt`.
        """
        if sampled.reply is None:
            end_ids = self._end_ids(sampled.ids)
            reply_ids = list(sampled.ids[: len(sampled.ids) - len(end_ids)])
            text = await self._text_of(sampled.ids, reply_ids)
            given = self._answer_of(Answer(text, sampled.finish_reason))
        else:
            num_reply_ids = len(sampled.ids) - sampled.num_end_ids
            reply_ids, end_ids = sampled.ids[:num_reply_ids], sampled.ids[num_reply_ids:]
            text = sampled.reply.text
            given = self._answer_with_calls(sampled.reply)
            notes = {**notes, FROM_TEXT: True}
        node = make_node(
            full_text=self.full_prompt + text,
            prompt_ids=sampled.prompt_ids,
            completion_ids=sampled.ids,
            completion_logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            parent=self.parent.record.node if self.parent is not None else None,
            notes={**self._inherited_notes(), **notes, **self._version_notes(sampled)},
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
        """The text of the ids sent; differs from `prompt` if that renders turns differently."""
        if self.parent is None:
            return self.prompt
        return self.parent.record.node.full_text + self.parent.added_text

    async def notes_of_prompt(self) -> dict[str, Any]:
        """Return metadata on why a continued prompt differs from a fresh rendering."""
        if self.parent is None or self.tokenizer is None:
            return {}
        record = self.parent.record
        reasons = set((record.node.metadata or {}).get("extended_by_tokens", ()))
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

    def _answer_of(self, answer: Answer) -> Answer | ToolAnswer:
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
        """The part of this reply that is already in the prompt."""
        if self.parent is not None and self.parent.is_same_reply:
            last = self.parent.record.last
            return last.conversation.reply.raw_text if last and last.conversation else ""
        return self.chat.partial_text if self.chat is not None else ""

    def _answer_with_calls(self, reply: TextReply) -> Answer | ToolAnswer:
        """Return an answer with the server's structured calls; without any, use `_answer_of`."""
        if self.translator is None or self.chat is None or not reply.tool_calls:
            return self._answer_of(Answer(reply.text, reply.finish_reason))
        self.translator.remember_answer(reply.text, reply.content, reply.tool_calls)
        return ToolAnswer(reply.content, reply.tool_calls)

    def _inherited_notes(self) -> dict[str, Any]:
        """Return the metadata that a continued sequence passes on."""
        metadata = (self.parent.record.node.metadata or {}) if self.parent is not None else {}
        return {FROM_TEXT: True} if metadata.get(FROM_TEXT) else {}

    def _conversation_of(self, text: str, given: Answer | ToolAnswer) -> Conversation | None:
        if self.chat is None:
            return None
        calls = given.tool_calls if isinstance(given, ToolAnswer) else None
        content = given.content if isinstance(given, ToolAnswer) else given.text
        last = self.parent.record.last if self.parent is not None else None
        known = last.conversation if last is not None else None
        partial_text = self._partial_text
        reply = SampledReply(
            partial_text + text,
            partial_text + (content or ""),
            calls,
            keeps_thinking=self.strips_thinking,
        )
        return Conversation(
            earlier=earlier_turns(known, self.chat.keys),
            reply=reply,
            tools_key=self.chat.tools_key,
            has_thinking=THINKING_END in text or (known is not None and known.has_thinking),
        )

    def _version_notes(self, sampled: Sampled) -> dict[str, Any]:
        """Return metadata on the weights; empty if nothing is known."""
        record = self.parent.record if self.parent is not None else None
        ends = record.ends if record is not None else ()
        versions = [*(end.weight_version for end in ends), sampled.weight_version]
        notes: dict[str, Any] = {}
        if any(version is not None for version in versions):
            notes["weight_versions"] = versions
        earlier = (record.node.metadata or {}).get("policy_version") if record else None
        known = [v for v in (earlier, sampled.policy_version) if v is not None]
        return notes | ({"policy_version": min(known)} if known else {})
