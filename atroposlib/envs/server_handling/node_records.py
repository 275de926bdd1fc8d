"""What a tracked session knows of its sequences beyond their tokens, and which one goes on.

    messages ─► keys ─► the recorded conversation they begin with ─► NodeRecord
    prompt of a completion ─► the longest recorded text it begins with ─► NodeRecord

A sequence may also go on from an earlier turn: a caller that asks again, or takes another way, gets
the recorded tokens up to there. Of several conversations the longest counts, then the one whose
calls have the ids in the request, then the one with exactly its content, then the one whose text
the prompt begins with, then a whole sequence before the beginning of one, then the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.sequence_tracker import SequenceNode
from atroposlib.envs.server_handling.turn_matching import (
    Conversation,
    calls_of,
    matched_length,
    text_of_content,
)

__all__ = ["Continuation", "NodeRecord", "NodeRecords", "TurnEnd"]


@dataclass(frozen=True)
class TurnEnd:
    """Where one sampled reply ends in its sequence."""

    num_tokens: int
    """Tokens up to there, the sampled end of the turn included."""
    text_length: int
    """Length of the sequence's text up to there."""
    num_reply_ids: int
    """Sampled tokens of the reply without the end of its turn."""
    num_end_ids: int
    """Sampled tokens that end the turn."""
    hides_specials: bool
    """Whether its text leaves special tokens out."""
    end_text: str
    """The sampled end of the turn as a template writes it; empty when it was cut off."""
    conversation: Conversation | None
    """Its turns; None when it was sampled for a bare prompt."""
    weight_version: str | None
    """What the engine called its weights."""
    metadata: Mapping[str, Any]
    """Of the node that ended here."""


@dataclass(frozen=True)
class NodeRecord:
    """A sequence, or the beginning of one."""

    node: SequenceNode
    """The tokens."""
    ends: tuple[TurnEnd, ...] = ()
    """Its sampled replies, oldest first; empty for a node from elsewhere."""

    @property
    def last(self) -> TurnEnd | None:
        """The end of the sequence."""
        return self.ends[-1] if self.ends else None

    def up_to(self, num_ends: int) -> NodeRecord:
        """Return the sequence up to one of its ends."""
        if num_ends >= len(self.ends):
            return self
        end = self.ends[num_ends - 1]
        node = SequenceNode.model_construct(  # of what was checked
            full_text=self.node.full_text[: end.text_length],
            tokens=self.node.tokens[: end.num_tokens],
            masked_tokens=self.node.masked_tokens[: end.num_tokens],
            logprobs=self.node.logprobs[: end.num_tokens],
            metadata=dict(end.metadata),
        )
        return NodeRecord(node, self.ends[:num_ends])


@dataclass(frozen=True)
class Continuation:
    """A recorded sequence, and what a request adds to it."""

    record: NodeRecord
    """The sequence that goes on."""
    added_text: str
    """Text behind it, the end of its last turn included."""
    is_rerendered: bool
    """Whether the chat template would write the recorded turns in another way."""
    is_same_reply: bool = False
    """Whether the last recorded reply itself goes on, rather than the conversation behind it."""


class NodeRecords:
    """Records by node; a node without one is treated as a bare text."""

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
            only_bare: Leave out what was sampled for messages.
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
        """Return the record of the conversation that these messages go on.

        Args:
            nodes: The session's sequences.
            messages: [M] those of the request.
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
        """Yield every record with the number of ends up to which it may go on."""
        for node in nodes:
            record = self._of(node)
            for num_ends in range(len(record.ends), min(1, len(record.ends)) - 1, -1):
                yield record, num_ends

    def _of(self, node: SequenceNode) -> NodeRecord:
        record = self._records.get(id(node))
        return record if record is not None and record.node is node else NodeRecord(node)
