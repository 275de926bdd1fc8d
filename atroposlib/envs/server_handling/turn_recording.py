"""One request of a tracked session: its prompt, and the record of each completion.

Turn.input_ids ─► engine ─► Sampled ─► Turn.record ─► what the caller gets, and a NodeRecord
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from atroposlib.envs.server_handling.completion_objects import Answer, FinishReason, ToolAnswer
from atroposlib.envs.server_handling.continuation import ChatRequest
from atroposlib.envs.server_handling.node_records import Continuation, NodeRecord
from atroposlib.envs.server_handling.sequence_tracker import continue_ids, make_node
from atroposlib.envs.server_handling.token_texts import (
    encode_added,
    encode_prompt,
    hidden_tail,
    is_hidden,
    text_of,
)
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.turn_matching import (
    THINKING_END,
    Conversation,
    calls_of,
    continued_turns,
    reply_keys,
)
from atroposlib.utils.long_decode import decode_long

__all__ = ["Sampled", "Turn"]


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

    async def record(self, sampled: Sampled) -> tuple[Answer | ToolAnswer, NodeRecord]:
        """Return what the caller gets for a completion, and its sequence.

        Other sessions go on while the text of a long one is decoded.
        """
        end_ids = self._end_ids(sampled.ids)
        reply_ids = list(sampled.ids[: len(sampled.ids) - len(end_ids)])
        text = await self._text_of(sampled.ids, reply_ids)
        given = self._answer_of(Answer(text, sampled.finish_reason))
        parent = self.parent.record if self.parent is not None else None
        versions = (*(parent.weight_versions if parent else ()), sampled.weight_version)
        node = make_node(
            full_text=self._full_prompt + text,
            prompt_ids=sampled.prompt_ids,
            completion_ids=sampled.ids,
            completion_logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            parent=parent.node if parent else None,
            notes=self._reasons | _version_notes(versions, sampled.policy_version, parent),
        )
        return given, NodeRecord(
            node=node,
            conversation=self._conversation_of(text, given),
            reply_text=text,
            reply_ids=reply_ids,
            end_text=self.tokenizer.decode(end_ids, skip_special_tokens=False) if end_ids else "",
            weight_versions=versions,
        )

    @property
    def _full_prompt(self) -> str:
        """The text of the ids sent, which is the prompt unless that renders turns differently."""
        if self.parent is None:
            return self.prompt
        return self.parent.record.node.full_text + self.parent.added_text

    @cached_property
    def _reasons(self) -> dict[str, Any]:
        """Why a continued prompt is not what the template and the tokenizer would make."""
        if self.parent is None or self.tokenizer is None:
            return {}
        record = self.parent.record
        reasons = set((record.node.metadata or {}).get("extended_by_tokens", ()))
        if self.parent.is_rerendered:
            reasons.add("template")
        if encode_added(self.tokenizer, record.reply_text) != record.reply_ids:
            reasons.add("tokenisation")
        return {"extended_by_tokens": sorted(reasons)} if reasons else {}

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
        content, calls, _ = self.translator.parse_model_output(answer.text, choice, self.chat.tools)
        return ToolAnswer(content, [call.model_dump() for call in calls]) if calls else answer

    def _conversation_of(self, text: str, given: Answer | ToolAnswer) -> Conversation | None:
        if self.chat is None:
            return None
        calls = given.tool_calls if isinstance(given, ToolAnswer) else None
        content = given.content if isinstance(given, ToolAnswer) else given.text
        known = self.parent.record.conversation if self.parent is not None else None
        return Conversation(
            turns=continued_turns(
                known,
                self.chat.keys,
                reply_keys(text, content, calls, keeps_thinking=self.strips_thinking),
            ),
            tools_key=self.chat.tools_key,
            call_ids=tuple(call[0] for call in calls_of(calls)),
            has_thinking=THINKING_END in text or (known is not None and known.has_thinking),
        )


def _version_notes(
    versions: Sequence[str | None], policy_version: int | None, parent: NodeRecord | None
) -> dict[str, Any]:
    """Return what metadata says of the weights; nothing where nothing is known."""
    notes: dict[str, Any] = {}
    if any(version is not None for version in versions):
        notes["weight_versions"] = list(versions)
    earlier = (parent.node.metadata or {}).get("policy_version") if parent else None
    known = [version for version in (earlier, policy_version) if version is not None]
    if known:
        notes["policy_version"] = min(known)
    return notes
