"""Which server a conversation goes back to: pure rules over its messages and the servers' load.

An engine that has read the earlier turns of a conversation keeps what it computed of them, so the
next turn is cheapest there. A conversation is recognised by what it begins with: the messages of
an earlier request and the reply to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.routing import HasSlots

__all__ = ["ConversationMemory", "is_overloaded"]

OVERLOAD_RATIO = 2.0
OVERLOAD_MARGIN = 16
"""A server is overloaded with more requests than `OVERLOAD_RATIO` times those of the least loaded
one and this many; below, reading the conversation anew elsewhere would cost more than waiting."""

MAX_CONVERSATIONS = 32_768


def is_overloaded(
    server: HasSlots, servers: Sequence[HasSlots], *, is_training: bool = True
) -> bool:
    """Whether a conversation should leave `server` for a less loaded one of `servers`."""
    loads = [_in_flight(other, is_training) for other in servers if other.server_healthy]
    least = min(loads, default=0)
    return _in_flight(server, is_training) > OVERLOAD_RATIO * least + OVERLOAD_MARGIN


def _in_flight(server: HasSlots, is_training: bool) -> int:
    sem = server.sem if is_training else server.eval_sem
    return sem.max_val - sem._value


class ConversationMemory:
    """Where the newest conversations were answered, by the number of the server.

    A request without a reply of an assistant in it is a new conversation: many rollouts of one
    item begin alike, and are to spread.
    """

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max = max_conversations
        self._server_of: OrderedDict[int, int] = OrderedDict()

    def find(self, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the server that answered the longest known beginning of a chat."""
        keys = _prefix_keys(messages)
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") != "assistant":
                continue
            for key in (keys[i], keys[i - 1]):  # with the reply; its caller may have rewritten it
                if key in self._server_of:
                    return self._server_of[key]
        return None

    def remember(
        self, messages: Sequence[Mapping[str, Any]], replies: Sequence[str | None], server: int
    ) -> None:
        """Note that `server` answered a chat with these texts."""
        beginning = _prefix_keys(messages)[-1] if messages else 0
        ends = [_key(beginning, {"role": "assistant", "content": reply}) for reply in replies]
        for key in (beginning, *ends):
            self._server_of[key] = server
            self._server_of.move_to_end(key)
        while len(self._server_of) > self._max:
            self._server_of.popitem(last=False)


def _prefix_keys(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return [M] a key of the messages up to and with each."""
    keys, key = [], 0
    for message in messages:
        key = _key(key, message)
        keys.append(key)
    return keys


def _key(before: int, message: Mapping[str, Any]) -> int:
    # A collision sends a conversation to a server that has not read it, which costs time only.
    content = message.get("content")
    text = content if isinstance(content, str) else repr(content)
    return hash((before, message.get("role"), text))
