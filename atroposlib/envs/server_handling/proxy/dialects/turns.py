"""The assistant turns a session gave out, and finding them again in a history sent back.

A dialect shows a turn in its own shape: thinking apart, arguments as an object, texts cut at a
stop sequence. A client sends it back in that shape, often re-serialised. The model's next prompt
must hold the turn as it was sampled, so the session keeps the chat message behind every turn:

    chat message given --> items or blocks with ids --> client --> the same ids --> chat message

A turn is known by an id it carries: of a call, an item, a signature. One without ids, such as a
plain text, is known by its place: the same text after the same messages. Space around thoughts and
text, spacing and the order of keys in arguments make no difference, nor does thinking that is left
out or repeated, or text left out in front of calls. A turn the client changed otherwise, or took
calls out of, is not recognised: it is taken as it was sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.proxy.dialects.bounded import Bounded
from atroposlib.envs.server_handling.proxy.thinking import with_thinking
from atroposlib.envs.server_handling.turn_matching import (
    THINKING_END,
    calls_of,
    reply_forms,
    said_form,
)

__all__ = [
    "ChatMessage",
    "GivenTurn",
    "GivenTurns",
    "SentTurn",
    "leading_systems_joined",
    "whole_turn",
]

ChatMessage = Mapping[str, Any]
Call = tuple[str, str, str]

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

    @cached_property
    def calls(self) -> frozenset[Call]:
        """Id, name and canonical arguments of each tool call."""
        return frozenset(calls_of(self.message.get("tool_calls")))

    @cached_property
    def forms(self) -> frozenset[str]:
        """What its text may come back as, in the form texts are compared in."""
        has_calls = bool(self.calls)
        whole = reply_forms(self.message.get("content") or "", has_calls=has_calls)
        return whole | reply_forms(self.text, has_calls=has_calls)

    def is_meant_by(self, sent: SentTurn) -> bool:
        """Whether a client that names this turn sent it, or some of its calls, unchanged."""
        if bool(self.calls) != bool(sent.calls) or said_form(sent.text) not in self.forms:
            return False
        return self.calls.issuperset(calls_of(sent.calls))


class GivenTurns:
    """The turns of one session.

    Args:
        max_remembered: Ids, and places, beyond which the ones longest unused are forgotten.
    """

    def __init__(self, *, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._by_id: Bounded[str, GivenTurn] = Bounded(max_remembered)
        self._by_place: Bounded[bytes, GivenTurn] = Bounded(max_remembered)

    def remember(
        self, turn: GivenTurn, *, ids: Iterable[str], conversation: Sequence[ChatMessage]
    ) -> None:
        """Keep a turn under its ids and its calls' ids, or its place where its text alone is sent.

        Args:
            turn: What was given out.
            ids: Ids its items or blocks carry.
            conversation: Chat messages in front of it.
        """
        for turn_id in [*ids, *(call_id for call_id, _, _ in turn.calls)]:
            self._by_id.keep(turn_id, turn)
        if not turn.calls and turn.text != turn.message.get("content"):
            place = _Conversation()
            place.extend(conversation)
            self._by_place.keep(place.key(turn.text), turn)

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
        num_read = index = 0
        while index < len(entries):
            entry = entries[index]
            index += 1
            if not isinstance(entry, SentTurn):
                messages.append(entry)
                continue
            if entry.calls:
                found = self._with_results(entries, index - 1)
                messages.extend(found.messages)
                index = found.end
                continue
            turn = self._turn_with_id_of(entry)
            if turn is None and self._by_place:
                conversation.extend(messages[num_read:])
                num_read = len(messages)
                turn = self._by_place.recall(conversation.key(entry.text))
                if turn is not None and not turn.is_meant_by(entry):
                    turn = None
            messages.append(entry.as_message() if turn is None else turn.message)
        return messages

    def _with_results(self, entries: Sequence[ChatMessage | SentTurn], start: int) -> _Restored:
        """Return the turn that calls tools at `start`, with results found between its calls."""
        first = entries[start]
        assert isinstance(first, SentTurn)
        alone = _Restored([first.as_message()], start + 1)
        turn = self._turn_with_id_of(first)
        if turn is None:
            return alone
        calls = set(calls_of(first.calls))
        results: list[ChatMessage] = []
        for index in range(start + 1, len(entries) + 1):
            if calls == turn.calls:
                return _Restored([turn.message, *results], index)
            entry = entries[index] if index < len(entries) else None
            if isinstance(entry, SentTurn) and self._turn_with_id_of(entry) is turn:
                calls.update(calls_of(entry.calls))
            elif isinstance(entry, Mapping) and entry["role"] == "tool":
                results.append(entry)
            else:
                break
        return alone

    def _turn_with_id_of(self, sent: SentTurn) -> GivenTurn | None:
        """Return the turn one of the ids belongs to, unless the client made another of it."""
        for turn_id in [*(str(call["id"]) for call in sent.calls), *sent.ids]:
            turn = self._by_id.recall(turn_id)
            if turn is not None and turn.is_meant_by(sent):
                return turn
        return None


class _Restored(NamedTuple):
    """Chat messages made of some entries."""

    messages: list[ChatMessage]
    end: int
    """Index behind the entries."""


def whole_turn(
    turn: GivenTurn, conversation: Sequence[ChatMessage]
) -> tuple[GivenTurn, Sequence[ChatMessage]]:
    """Return a turn with the text that its request began it with, and what stands before it.

    Args:
        turn: What was given out.
        conversation: Chat messages of the request; the last may be the assistant's.
    """
    if not conversation or conversation[-1]["role"] != "assistant":
        return turn, conversation
    begun = conversation[-1].get("content") or ""
    message = {**turn.message, "content": begun + (turn.message.get("content") or "")}
    return GivenTurn(message, begun + turn.text), conversation[:-1]


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
    """A running digest of messages, so that each is read once however many turns are looked up.

    Of the assistant's messages it holds the calls and what is said behind the thinking: clients
    leave thinking out of a history at one time and not at another.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def extend(self, messages: Iterable[ChatMessage]) -> None:
        for message in messages:
            text = message.get("content") or ""
            calls = [call[1:] for call in calls_of(message.get("tool_calls"))]
            if message["role"] == "assistant":
                text = "" if calls else _said(text)
            head = [message["role"], len(text), calls]
            self._digest.update(json.dumps(head).encode())
            self._digest.update(_bytes_of(text))  # not as JSON: histories are long

    def key(self, text: str) -> bytes:
        digest = self._digest.copy()
        digest.update(_bytes_of(_said(text)))
        return digest.digest()


def _said(text: str) -> str:
    return said_form(text.rpartition(THINKING_END)[2])


def _bytes_of(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
