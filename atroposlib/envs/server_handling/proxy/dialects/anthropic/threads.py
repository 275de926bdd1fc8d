"""Conversations that a session holds for its clients, who then send only what is new.

{"thread": {"type": "create"}}                               the Message's id names what is held
{"thread": {"type": "continue", "previous_message_id": ID}}  goes on behind that Message
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.anthropic.requests import CountFields
from atroposlib.envs.server_handling.proxy.dialects.bounded import Bounded
from atroposlib.envs.server_handling.proxy.dialects.reading import refuse
from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage, GivenTurns
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal

__all__ = ["THREAD_NOT_FOUND", "HeldConversation", "MessagesState"]

THREAD_NOT_FOUND = "thread_not_found"
"""Code of the error upon which clients send the whole conversation again."""

_MAX_HELD = 1024


@dataclass(frozen=True)
class HeldConversation:
    """A conversation up to and with one Message."""

    messages: Sequence[ChatMessage] = ()
    """Chat messages, the system message included."""
    tools: list[dict[str, Any]] | None = None
    """Tools as the client defined them; requests that continue leave them out."""


class MessagesState:
    """What one session remembers for the Messages protocol.

    Args:
        max_held: Conversations beyond which the one longest unused is forgotten.
    """

    def __init__(self, *, max_held: int = _MAX_HELD) -> None:
        self.turns = GivenTurns()
        self._held: Bounded[str, HeldConversation] = Bounded(max_held)

    def hold(self, message_id: str, conversation: HeldConversation) -> None:
        """Keep a conversation under the id of its last Message."""
        self._held.keep(message_id, conversation)

    def continued(self, fields: CountFields) -> HeldConversation:
        """Return what a request continues, empty where it does not; raises the 404 if unknown."""
        if fields.thread is None or fields.thread.type == "create":
            return HeldConversation()
        message_id = fields.thread.previous_message_id
        if message_id is None:
            refuse("thread.previous_message_id", "expected the id of a Message, got nothing")
        held = self._held.recall(message_id)
        if held is None:
            raise ProxyRefusal(
                f"this session holds no conversation behind {message_id!r}; send the whole one",
                status=404,
                code=THREAD_NOT_FOUND,
            )
        return held
