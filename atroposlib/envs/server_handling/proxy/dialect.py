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
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import Response

from atroposlib.envs.server_handling.proxy.exchange import RenderedPrompt, complete_chat, render
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.envs.server_handling.proxy.request_models import ChatCompletionProxyRequest
from atroposlib.envs.server_handling.proxy.session import SessionState

__all__ = ["IGNORED_HEADER", "Dialect", "Exchange", "Handler", "Route"]

IGNORED_HEADER = "X-Atropos-Ignored"
"""Names fields of the request that changed nothing."""


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
    ignored: set[str] = field(default_factory=set)
    """Fields of the body that are not honoured; handlers add to it, and the response names them
    in `IGNORED_HEADER`."""

    async def complete_chat(
        self, request: Mapping[str, Any] | ChatCompletionProxyRequest
    ) -> dict[str, Any]:
        """Answer an OpenAI chat request; see `exchange.complete_chat`."""
        return await complete_chat(self.session, request, ignored=self.ignored)

    def render(self, request: Mapping[str, Any] | ChatCompletionProxyRequest) -> RenderedPrompt:
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
    version_header: str | None = None
    """Header that every client of the protocol sends and no other one does."""
