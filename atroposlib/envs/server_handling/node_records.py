"""What a tracked session knows of its sequences beyond their tokens, and which one goes on.

    messages ─► keys ─► the recorded conversation they begin with ─► Continuation
    prompt of a completion ─► the longest recorded text it begins with ─► Continuation

Of several conversations the longest counts, then the one whose calls have the ids in the request,
then the one whose text the prompt begins with, then the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.sequence_tracker import SequenceNode, longest_prefix
from atroposlib.envs.server_handling.turn_matching import (
    Conversation,
    as_mapping,
    calls_of,
    matched_length,
)

__all__ = ["Continuation", "NodeRecord", "NodeRecords"]


@dataclass(frozen=True)
class NodeRecord:
    """What is kept beside one node."""

    node: SequenceNode
    """The sequence itself."""
    conversation: Conversation | None
    """Its turns; None when it was sampled for a bare prompt."""
    reply_text: str
    """Text of the last completion, without the end of its turn."""
    reply_ids: list[int]
    """[C] ids of that text."""
    end_text: str
    """The sampled end of the turn as a template writes it; empty when it was cut off."""
    weight_versions: tuple[str | None, ...]
    """What the engine called the weights of each completion in the node, oldest first."""


@dataclass(frozen=True)
class Continuation:
    """A recorded sequence, and what a request adds to it."""

    record: NodeRecord
    """The sequence that goes on."""
    added_text: str
    """Text behind it, the end of its last turn included."""
    is_rerendered: bool
    """Whether the chat template would write the recorded turns in another way."""


class NodeRecords:
    """Records by node; a node without one is treated as a bare text."""

    def __init__(self) -> None:
        self._records: dict[int, NodeRecord] = {}

    def add(self, record: NodeRecord) -> None:
        """Keep a record as long as its node is kept."""
        self._records[id(record.node)] = record

    def forget_others(self, nodes: Iterable[SequenceNode]) -> None:
        """Drop the records of every node that is not among `nodes`."""
        self._records = {id(node): self._records[id(node)] for node in nodes if self._has(node)}

    def of(self, node: SequenceNode) -> NodeRecord:
        """Return the record of a node."""
        if self._has(node):
            return self._records[id(node)]
        return NodeRecord(node, None, "", [], "", ())

    def find_text(self, nodes: Sequence[SequenceNode], prompt: str) -> Continuation | None:
        """Return the node whose text is the longest prefix of a prompt; the first wins ties."""
        node = longest_prefix(nodes, prompt)
        if node is None:
            return None
        return Continuation(self.of(node), prompt[len(node.full_text) :], is_rerendered=False)

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
        best: NodeRecord | None = None
        best_rank: tuple[int, bool, bool] = (0, False, False)
        for record in map(self.of, nodes):
            conversation = record.conversation
            length = matched_length(conversation, keys) if conversation else 0
            if conversation is None or not length:
                continue
            calls = calls_of(as_mapping(messages[length - 1]).get("tool_calls"))
            has_ids = tuple(call[0] for call in calls) == conversation.call_ids
            rank = (length, has_ids, prompt.startswith(record.node.full_text))
            if rank > best_rank:
                best, best_rank = record, rank
        return best

    def bare_texts(self, nodes: Sequence[SequenceNode]) -> list[SequenceNode]:
        """Return the nodes that were not sampled for messages."""
        return [node for node in nodes if self.of(node).conversation is None]

    def _has(self, node: SequenceNode) -> bool:
        record = self._records.get(id(node))
        return record is not None and record.node is node
