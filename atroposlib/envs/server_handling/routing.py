"""Choose the server of the next request, conversation or tracked session by load and health.

new request       ─► least_loaded
chat with replies ─► ConversationMemory ─► the server that holds its prefix in cache
tracked session   ─► SessionServer      ─► the same server while it is up and not overloaded

An engine caches the earlier turns of a conversation, so the next turn is cheapest there. A
conversation is recognized by its prefix: the messages of an earlier request and the reply to it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from atroposlib.envs.server_handling.managed_server import present_server
from atroposlib.envs.server_handling.semaphore import AsyncSemWithAdaptiveWeight, num_unused

__all__ = [
    "ConversationMemory",
    "HasSlots",
    "OpenSessions",
    "free_slots",
    "is_overloaded",
    "least_loaded",
    "parts_of",
]

OVERLOAD_RATIO = 2.0
OVERLOAD_MARGIN = 16
"""A server is overloaded if it has more requests in flight than `OVERLOAD_RATIO` times those of
the least loaded server plus this margin. Below that, prefilling the conversation on another server
would cost more than waiting."""

MAX_CONVERSATIONS = 32_768

class HasSlots(Protocol):
    """Attributes of a server that routing reads."""

    server_healthy: bool
    sem: AsyncSemWithAdaptiveWeight
    eval_sem: AsyncSemWithAdaptiveWeight


AnyServer = TypeVar("AnyServer", bound=HasSlots)


def free_slots(server: HasSlots, *, is_training: bool) -> float:
    """Return how many requests of a split may start at a healthy server now.

    While evaluation runs, training reserves the slots that evaluation could still use.
    """
    eval_free = server.eval_sem.num_free
    if not is_training:
        return eval_free
    reserved = eval_free if server.eval_sem.num_held else 0.0
    return max(0.0, server.sem.num_free - reserved)


def least_loaded(
    servers: Sequence[AnyServer],
    *,
    is_training: bool = True,
    open_sessions: Mapping[int, int] | None = None,
) -> AnyServer:
    """Return the healthy server with most unused slots of a split; the first if none is healthy.

    Args:
        servers: At least one.
        is_training: Whether training slots count, rather than evaluation slots.
        open_sessions: Sessions per `id(server)`; breaks ties between equally loaded servers, so
            that sessions opened together spread before their first request. The first wins ties.
    """
    sessions = open_sessions or {}
    healthy = [server for server in servers if server.server_healthy]
    if not healthy:
        return servers[0]
    return max(
        healthy,
        key=lambda server: (
            num_unused(server.sem if is_training else server.eval_sem),
            -sessions.get(id(server), 0),
        ),
    )


def parts_of(n: int, *, largest: int) -> list[int]:
    """Split `n` completions into requests of at most `largest`: 20 by 8 gives [8, 8, 4]."""
    full, rest = divmod(n, largest)
    return [largest] * full + ([rest] if rest else [])


def is_overloaded(
    server: HasSlots, servers: Sequence[HasSlots], *, is_training: bool = True
) -> bool:
    """Whether a conversation should leave `server` for a less loaded one of `servers`."""

    def in_flight(one: HasSlots) -> int:
        return (one.sem if is_training else one.eval_sem).num_held

    least = min((in_flight(other) for other in servers if other.server_healthy), default=0)
    return in_flight(server) > OVERLOAD_RATIO * least + OVERLOAD_MARGIN


class ConversationMemory:
    """Remembers which server answered the most recent conversations, by server index.

    A request without an assistant message is a new conversation: the rollouts of one item start
    with the same messages and should spread over the servers.
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
            for key in (keys[i], keys[i - 1]):  # the second, as callers may rewrite the reply
                if key in self._server_of:
                    return self._server_of[key]
        return None

    def remember(
        self, messages: Sequence[Mapping[str, Any]], replies: Sequence[str | None], server: int
    ) -> None:
        """Record that `server` answered a chat with these replies."""
        beginning = _prefix_keys(messages)[-1] if messages else 0
        ends = [_key(beginning, {"role": "assistant", "content": reply}) for reply in replies]
        for key in (beginning, *ends):
            self._server_of[key] = server
            self._server_of.move_to_end(key)
        while len(self._server_of) > self._max:
            self._server_of.popitem(last=False)


def _prefix_keys(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return [M] one key per message, for the messages up to and including it."""
    keys, key = [], 0
    for message in messages:
        key = _key(key, message)
        keys.append(key)
    return keys


def _key(before: int, message: Mapping[str, Any]) -> int:
    # A collision sends a conversation to a server without its prefix, which only costs time.
    content = message.get("content")
    text = content if isinstance(content, str) else repr(content)
    return hash((before, message.get("role"), text))


class OpenSessions:
    """Number of tracked sessions open at each server.

    Sessions opened at the same time have no requests in flight yet; counting them spreads them.
    """

    def __init__(self) -> None:
        self._num_at: Counter[int] = Counter()

    def least_busy(self, servers: Sequence[Any], *, is_training: bool = True) -> Any:
        """Return the least loaded server; between equals the one with fewer open sessions."""
        return least_loaded(servers, is_training=is_training, open_sessions=self._num_at)

    @contextmanager
    def counted(self, server: Any) -> Iterator[None]:
        """Count a session at its current server while the context is open."""
        self._num_at[id(present_server(server))] += 1
        try:
            yield
        finally:
            self._num_at[id(present_server(server))] -= 1

    def move(self, current: Any, chosen: Any) -> None:
        """Count a session at another server from now on."""
        self._num_at[id(current)] -= 1
        self._num_at[id(chosen)] += 1
