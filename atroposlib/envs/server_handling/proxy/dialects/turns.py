"""The assistant turns a session gave out, and finding them again in a history sent back.

A dialect shows a turn in its own shape: thinking apart, arguments as an object, texts cut at a
stop sequence. A client sends it back in that shape, often re-serialised. The model's next prompt
must hold the turn as it was sampled, so the session keeps the chat message behind every turn:

    chat message given --> items or blocks with ids --> client --> the same ids --> chat message

A turn is known by an id it carries. One without ids, such as a plain text, is known by its place:
the same text after the same messages. What the client changed is not recognised and is taken as
the client sent it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.thinking import with_thinking

__all__ = ["ChatMessage", "GivenTurn", "GivenTurns", "SentTurn", "leading_systems_joined"]

ChatMessage = Mapping[str, Any]

_MAX_REMEMBERED = 8192


@dataclass(frozen=True)
class SentTurn:
    """One assistant turn as a client sent it back."""

    text: str
    """What the client says was said."""
    ids: tuple[str, ...] = ()
    """Ids of the turn's items or blocks, without those of its calls."""
    calls: tuple[ChatMessage, ...] = ()
    """Tool calls in the form of the chat APIs."""
    thinking: str = ""
    """Thinking as the client sent it."""

    def as_message(self) -> dict[str, Any]:
        """Return the turn as a chat message made of what the client sent alone."""
        content = with_thinking(self.thinking, self.text)
        if not self.calls:
            return {"role": "assistant", "content": content}
        calls = [dict(call) for call in self.calls]
        return {"role": "assistant", "content": content or None, "tool_calls": calls}


@dataclass(frozen=True)
class GivenTurn:
    """One assistant turn as it was given out."""

    message: ChatMessage
    """The chat message behind it, as the chat completion had it."""
    text: str
    """What of it the client was shown as text."""

    @property
    def call_ids(self) -> frozenset[str]:
        """Ids of the tool calls."""
        return frozenset(str(call["id"]) for call in self.message.get("tool_calls") or ())


class GivenTurns:
    """The turns of one session.

    Args:
        max_remembered: Ids, and places, beyond which the ones longest unused are forgotten.
    """

    def __init__(self, *, max_remembered: int = _MAX_REMEMBERED) -> None:
        self.max_remembered = max_remembered
        self._by_id: OrderedDict[str, GivenTurn] = OrderedDict()
        self._by_place: OrderedDict[bytes, GivenTurn] = OrderedDict()

    def remember(
        self, turn: GivenTurn, *, ids: Iterable[str], conversation: Sequence[ChatMessage]
    ) -> None:
        """Keep a turn under its ids and its calls' ids, or its place where its text alone is sent.

        Args:
            turn: What was given out.
            ids: Ids its items or blocks carry.
            conversation: Chat messages in front of it.
        """
        for turn_id in [*ids, *turn.call_ids]:
            _keep(self._by_id, turn_id, turn, self.max_remembered)
        if not turn.call_ids and turn.text != turn.message.get("content"):
            place = _Conversation()
            place.extend(conversation)
            _keep(self._by_place, place.key(turn.text), turn, self.max_remembered)

    def restore(
        self, entries: Sequence[ChatMessage | SentTurn], before: Sequence[ChatMessage] = ()
    ) -> list[ChatMessage]:
        """Return the chat messages of a history, recognised turns as they were sampled.

        Clients may list the calls of one turn each with its result behind it; such a turn becomes
        one message again.

        Args:
            entries: Chat messages, and the assistant's turns as the client sent them.
            before: Chat messages in front, restored earlier.
        """
        messages = list(before)
        conversation = _Conversation()
        num_read = 0
        last_turn: GivenTurn | None = None
        for entry in entries:
            if not isinstance(entry, SentTurn):
                messages.append(entry)
                last_turn = last_turn if entry["role"] == "tool" else None
                continue
            turn = self._turn_with_id_of(entry)
            if turn is None and self._by_place and not entry.calls:
                conversation.extend(messages[num_read:])
                num_read = len(messages)
                turn = _recall(self._by_place, conversation.key(entry.text))
            if turn is None:
                messages.append(entry.as_message())
            elif turn is not last_turn:
                messages.append(turn.message)
            last_turn = turn
        return messages

    def _turn_with_id_of(self, sent: SentTurn) -> GivenTurn | None:
        """Return the turn one of the ids belongs to, unless the client made another of it."""
        sent_call_ids = [str(call["id"]) for call in sent.calls]
        for turn_id in [*sent_call_ids, *sent.ids]:
            turn = _recall(self._by_id, turn_id)
            if turn is not None and _is_same(turn, sent, sent_call_ids):
                return turn
        return None


def leading_systems_joined(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with the system messages at the front as one; templates take one."""
    num_systems = 0
    while num_systems < len(messages) and messages[num_systems]["role"] == "system":
        num_systems += 1
    if num_systems < 2:
        return list(messages)
    joined = "\n\n".join(str(message["content"]) for message in messages[:num_systems])
    return [{"role": "system", "content": joined}, *messages[num_systems:]]


class _Conversation:
    """A running digest of messages, so that each is read once however many turns are looked up."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def extend(self, messages: Iterable[ChatMessage]) -> None:
        for message in messages:
            self._digest.update(json.dumps(message, sort_keys=True, default=str).encode() + b"\n")

    def key(self, text: str) -> bytes:
        digest = self._digest.copy()
        digest.update(json.dumps(text).encode())
        return digest.digest()


def _is_same(turn: GivenTurn, sent: SentTurn, sent_call_ids: Sequence[str]) -> bool:
    if turn.call_ids or sent_call_ids:
        return not turn.call_ids.isdisjoint(sent_call_ids)
    return turn.text == sent.text


def _keep(known: OrderedDict[Any, GivenTurn], key: Any, turn: GivenTurn, limit: int) -> None:
    known[key] = turn
    known.move_to_end(key)
    while len(known) > limit:
        known.popitem(last=False)


def _recall(known: OrderedDict[Any, GivenTurn], key: Any) -> GivenTurn | None:
    if key in known:
        known.move_to_end(key)
    return known.get(key)
