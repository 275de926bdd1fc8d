"""What a session remembers for the Responses protocol: its turns, and the stored responses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.proxy.dialects.turns import ChatMessage, GivenTurns
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, bad_request

__all__ = ["ResponsesState", "StoredResponse"]

_MAX_STORED = 1024


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation it ends."""

    response: Mapping[str, Any]
    """The Response object."""
    messages: Sequence[ChatMessage]
    """Chat messages up to and with the answer, without the request's instructions."""
    input_items: Sequence[Mapping[str, Any]] = ()
    """Items of the request's input, each with an id."""


class ResponsesState:
    """State of one session.

    Args:
        max_stored: Responses beyond which the oldest are forgotten.
    """

    def __init__(self, *, max_stored: int = _MAX_STORED) -> None:
        self.turns = GivenTurns()
        self.max_stored = max_stored
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, Mapping[str, Any]] = {}

    def keep(self, stored: StoredResponse) -> None:
        """Store a response, so that its id and its items' ids are known."""
        self._stored[stored.response["id"]] = stored
        self._items.update({item["id"]: item for item in stored.response["output"]})
        while len(self._stored) > self.max_stored:
            self.forget(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse:
        """Return a stored response; raises the 404 for an unknown one."""
        try:
            return self._stored[response_id]
        except KeyError:
            raise ProxyRefusal(
                f"this session has no stored response with id {response_id!r}",
                status=404,
                code="response_not_found",
            ) from None

    def previous(self, response_id: str) -> StoredResponse:
        """Return the response a request continues; raises the 400 for an unknown one."""
        if response_id not in self._stored:
            raise bad_request(
                f"this session has no stored response with id {response_id!r}; it may have been "
                "made with store=false, deleted, or be older than the ones kept",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._stored[response_id]

    def find_item(self, item_id: str) -> Mapping[str, Any] | None:
        """Return an output item of a stored response."""
        return self._items.get(item_id)

    def forget(self, response_id: str) -> None:
        """Delete a stored response; raises the 404 for an unknown one."""
        for item in self.get(response_id).response["output"]:
            self._items.pop(item["id"], None)
        del self._stored[response_id]
