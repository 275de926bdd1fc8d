"""One request of a tracked session: its prompt, and the record of each completion.

Turn.input_ids ─► engine ─► Sampled ─► Turn.record ─► what the caller gets, and a NodeRecord
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.chat_rendering import check_texts
from atroposlib.envs.server_handling.completion_objects import Answer, FinishReason, ToolAnswer
from atroposlib.envs.server_handling.continuation import ChatRequest
from atroposlib.envs.server_handling.node_records import Continuation, NodeRecord, TurnEnd
from atroposlib.envs.server_handling.sequence_tracker import SequenceNode, continue_ids, make_node
from atroposlib.envs.server_handling.text_sampling import TextReply
from atroposlib.envs.server_handling.token_texts import (
    encode_added,
    encode_prompt,
    has_ids_of_text,
    hidden_tail,
    is_hidden,
    text_of,
    text_of_end,
)
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.turn_matching import (
    THINKING_END,
    Conversation,
    SampledReply,
    earlier_turns,
)
from atroposlib.envs.server_handling.weight_versions import FROM_TEXT
from atroposlib.utils.long_decode import decode_long

__all__ = ["Sampled", "Turn"]

_OPENING_TOKENS = 16
"""How far before a reply a special token is looked for, at which ids always start anew."""


@dataclass(frozen=True)
class Sampled:
    """One completion as the engine gave it."""

    prompt_ids: list[int]
    """[P] what the engine read."""
    ids: list[int]
    """[C] what it sampled."""
    logprobs: list[float]
    """[C] their logprobs."""
    finish_reason: FinishReason
    """Why it stopped."""
    weight_version: str | None
    """What the engine calls its weights."""
    policy_version: int | None
    """The policy version they stand for."""
    reply: TextReply | None = None
    """What a server without token ids answered; `ids` are then its text's. None: `ids` were
    sampled."""
    num_end_ids: int = 0
    """Ids behind the text of `reply`."""


@dataclass(frozen=True)
class Turn:
    """One request: what it asks, and which recorded sequence it continues."""

    tokenizer: Any
    """None if there is none; then nothing is sent as ids."""
    prompt: str
    """The prompt's text."""
    parent: Continuation | None
    """The sequence that goes on; None for a new one."""
    chat: ChatRequest | None = None
    """The messages; None for a bare prompt."""
    translator: ToolCallTranslator | None = None
    """Reads tool calls; None leaves them text."""
    tool_choice: Any = None
    """As the caller gave it."""
    strips_thinking: bool = False
    """Whether a reply that comes back without its thinking is another one."""

    def input_ids(self) -> list[int]:
        """Return [P] ids to send, those of the sequence that goes on taken as they were."""
        if self.parent is None:
            return encode_prompt(self.tokenizer, self.prompt)
        added_ids = encode_added(self.tokenizer, self.parent.added_text)
        node = self.parent.record.node
        return continue_ids(node, added_ids, lambda i: is_hidden(self.tokenizer, i))

    def check_prompt(self) -> None:
        """Raise unless the prompt holds every message; the recorded ones were checked before.

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
        """Return what the caller gets for a completion, and its sequence.

        Other sessions go on while the text of a long one is decoded.

        Args:
            sampled: The completion.
            notes: Those of the prompt.
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
        """Return the ends of the sequence that goes on, none if the engine read other tokens."""
        if self.parent is None:
            return ()
        record = self.parent.record
        known = record.node.tokens
        return record.ends if known == list(prompt_ids[: len(known)]) else ()

    @property
    def full_prompt(self) -> str:
        """The text of the ids sent, which is the prompt unless that renders turns differently."""
        if self.parent is None:
            return self.prompt
        return self.parent.record.node.full_text + self.parent.added_text

    async def notes_of_prompt(self) -> dict[str, Any]:
        """Say why a continued prompt is not what the template and the tokenizer would make."""
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
        """Whether a reply has the ids that its text is given behind the opening of its turn."""
        stop = end.num_tokens - end.num_end_ids - end.num_reply_ids
        start = max(0, stop - _OPENING_TOKENS)
        specials = [i for i in range(start, stop) if is_hidden(self.tokenizer, node.tokens[i])]
        opening = node.tokens[specials[-1] + 1 : stop] if specials else []
        reply_ids = node.tokens[stop : stop + end.num_reply_ids]
        return await has_ids_of_text(
            self.tokenizer, opening + reply_ids, hides_specials=end.hides_specials
        )

    async def _text_of(self, ids: Sequence[int], reply_ids: Sequence[int]) -> str:
        """Return a completion's text; special tokens that may mark tool calls stay in."""
        if self.tokenizer is None:
            return text_of(None, ids)
        if self.translator is None:
            return await decode_long(self.tokenizer, ids, skip_special_tokens=True)
        return await decode_long(self.tokenizer, reply_ids, skip_special_tokens=False)

    def _end_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids at the end that the text leaves out: the template writes them itself."""
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
        """Return an answer with its calls; as it is, its finish reason too, without any."""
        if self.translator is None or self.chat is None:
            return answer
        choice = self.tool_choice if isinstance(self.tool_choice, str) else "auto"
        begun = self._begun_text
        content, calls, _ = self.translator.parse_model_output(
            begun + answer.text, choice, self.chat.tools
        )
        if not calls:
            return answer
        return ToolAnswer(
            content[len(begun) :] or None if content else None,
            [call.model_dump() for call in calls],
        )

    @property
    def _begun_text(self) -> str:
        """The text of this reply that stands in the prompt."""
        if self.parent is not None and self.parent.is_same_reply:
            last = self.parent.record.last
            return last.conversation.reply.raw_text if last and last.conversation else ""
        return self.chat.begun_text if self.chat is not None else ""

    def _answer_with_calls(self, reply: TextReply) -> Answer | ToolAnswer:
        """Return an answer with the calls that the server returned, else as `_answer_of`."""
        if self.translator is None or self.chat is None or not reply.tool_calls:
            return self._answer_of(Answer(reply.text, reply.finish_reason))
        self.translator.remember_answer(reply.text, reply.content, reply.tool_calls)
        return ToolAnswer(reply.content, reply.tool_calls)

    def _inherited_notes(self) -> dict[str, Any]:
        """Return what stays true of a sequence that goes on."""
        metadata = (self.parent.record.node.metadata or {}) if self.parent is not None else {}
        return {FROM_TEXT: True} if metadata.get(FROM_TEXT) else {}

    def _conversation_of(self, text: str, given: Answer | ToolAnswer) -> Conversation | None:
        if self.chat is None:
            return None
        calls = given.tool_calls if isinstance(given, ToolAnswer) else None
        content = given.content if isinstance(given, ToolAnswer) else given.text
        last = self.parent.record.last if self.parent is not None else None
        known = last.conversation if last is not None else None
        begun = self._begun_text
        reply = SampledReply(
            begun + text, begun + (content or ""), calls, keeps_thinking=self.strips_thinking
        )
        return Conversation(
            earlier=earlier_turns(known, self.chat.keys),
            reply=reply,
            tools_key=self.chat.tools_key,
            has_thinking=THINKING_END in text or (known is not None and known.has_thinking),
        )

    def _version_notes(self, sampled: Sampled) -> dict[str, Any]:
        """Return what metadata says of the weights; nothing where nothing is known."""
        record = self.parent.record if self.parent is not None else None
        ends = record.ends if record is not None else ()
        versions = [*(end.weight_version for end in ends), sampled.weight_version]
        notes: dict[str, Any] = {}
        if any(version is not None for version in versions):
            notes["weight_versions"] = versions
        earlier = (record.node.metadata or {}).get("policy_version") if record else None
        known = [v for v in (earlier, sampled.policy_version) if v is not None]
        return notes | ({"policy_version": min(known)} if known else {})
