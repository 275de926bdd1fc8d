"""What a protocol brings along to be served: its routes and the shape of its errors.

    request ─► session of the key or address ─► bounded JSON body ─► Exchange ─► route's handler
                                                                                    │
      HTTP response ◄── `Dialect.error_body` of anything raised ◄──────────────────┘

A handler translates the body to an OpenAI chat request, awaits `Exchange.complete_chat` and
translates the answer back. It needs no handling of keys, sessions, broken bodies, agents that
hang up, or failing engines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response

from atroposlib.envs.server_handling.proxy.exchange import RenderedPrompt, complete_chat, render
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.envs.server_handling.proxy.session import SessionState

__all__ = ["Dialect", "Exchange", "Handler", "Route"]


@dataclass(frozen=True)
class Exchange:
    """One request of an agent whose session is known."""

    session: SessionState
    body: dict[str, Any]
    """The JSON object the agent sent; empty for GET and DELETE."""
    path_params: Mapping[str, str]
    """Values of the `{names}` in the route's path, without the session's."""
    query: Mapping[str, str]
    """Parameters behind the `?`."""
    headers: Mapping[str, str]
    """Headers by lower-case name."""

    async def complete_chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer an OpenAI chat request; see `exchange.complete_chat`."""
        return await complete_chat(self.session, request)

    def render(self, request: Mapping[str, Any]) -> RenderedPrompt:
        """Return the prompt of an OpenAI chat request; see `exchange.render`."""
        return render(self.session, request)


Handler = Callable[[Exchange], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One route of a dialect."""

    path: str
    """Below `/v1`, as `/messages`. Served at `/v1/messages`, where the key names the session,
    and at `/{uuid}/v1/messages`."""
    handler: Handler
    method: Literal["GET", "POST", "DELETE"] = "POST"


@dataclass(frozen=True)
class Dialect:
    """A protocol.

    The key of a session is read from `Authorization: Bearer` and from `x-api-key`, whatever the
    dialect.
    """

    name: str
    """Also the key of its state in `SessionState.dialect_state`."""
    routes: tuple[Route, ...]
    error_body: Callable[[ProxyRefusal], dict[str, Any]]
    """Body of an error response; status and headers come from the refusal."""
