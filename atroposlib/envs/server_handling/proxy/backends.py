"""Which inference server a session gets, and the managed server in front of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, upstream_unavailable
from atroposlib.envs.server_handling.proxy.request_models import SessionCreateRequest
from atroposlib.envs.server_handling.proxy.session_server import SampledServer
from atroposlib.envs.server_handling.routing import least_loaded
from atroposlib.envs.server_handling.server_manager import wants_placeholders
from atroposlib.utils.secret_masking import without_secrets

__all__ = ["Backend", "HasServers", "address_of", "choose_server", "open_backend"]


class HasServers(Protocol):
    """What the proxy needs of a `ServerManager`; its `policy_version` is used where it has one."""

    servers: list[Any]


class Backend(NamedTuple):
    """What a new session stands on."""

    managed_server: ManagedServer | DummyManagedServer
    base_url: str | None


def address_of(server: Any) -> str | None:
    """Return the address of a server as it was configured, None when it has none."""
    # Servers of tests have a config with a model name and no more.
    return getattr(server.config, "base_url", None) or None


def choose_server(servers: list[Any], base_url: str | None, open_sessions: Counter[int]) -> Any:
    """Return the server with an address, or the healthy one with most free training slots.

    Args:
        servers: To choose from.
        base_url: Wanted address, a trailing slash aside; None for any.
        open_sessions: Sessions per `id(server)`; fewer wins between equally loaded servers.

    Raises:
        ProxyRefusal: there is no server (503), or none with this address (404).
    """
    if not servers:
        raise upstream_unavailable("no server is configured; POST /setup names some")
    if base_url is None:
        return least_loaded(servers, open_sessions=open_sessions)
    known = {(address_of(server) or "").rstrip("/"): server for server in servers}
    if base_url.rstrip("/") not in known:
        shown = ", ".join(sorted(without_secrets(address) for address in known if address))
        raise ProxyRefusal(
            f"no inference server has the address {without_secrets(base_url)!r}; there are: "
            f"{shown or 'none with an address'}",
            status=404,
            code="server_not_found",
            param="base_url",
        )
    return known[base_url.rstrip("/")]


def open_backend(
    servers: list[Any],
    tokenizer: Any,
    request: SessionCreateRequest,
    *,
    open_sessions: Counter[int],
    policy_version: Callable[[], int | None],
    wait_s: float,
) -> Backend:
    """Return a managed server for a new session.

    A server without token ids has its texts tokenized; without a tokenizer, or where the
    environment variable asks for it, the session holds placeholder tokens.

    A session that named its server stays there; others move when theirs is down, to a server of
    the same kind and model.

    Args:
        servers: To choose from.
        tokenizer: Of the served model; None takes the server's.
        request: What the session was asked for with.
        open_sessions: Sessions per `id(server)`.
        policy_version: What the service last called the policy, for engines that do not name
            their weights.
        wait_s: Longest wait of a request for a server that is down, in seconds.
    """
    server = choose_server(servers, request.base_url, open_sessions)
    others = [] if request.base_url is not None else _replacements(server, servers)
    face = SampledServer(server, others, wait_s=wait_s)
    managed: ManagedServer | DummyManagedServer
    has_no_ids = isinstance(server, OpenAIServer)
    if has_no_ids and wants_placeholders():
        managed = DummyManagedServer(face, tokenizer, track_tree=request.track_tree)
        return Backend(managed, address_of(server))
    managed = ManagedServer(
        face,
        tokenizer,
        track_tree=request.track_tree,
        tool_parser=request.tool_parser,
        policy_version=policy_version,
    )
    if has_no_ids and managed.tokenizer is None:
        managed = DummyManagedServer(face, track_tree=request.track_tree)
    return Backend(managed, address_of(server))


def _replacements(server: Any, servers: list[Any]) -> list[Any]:
    return [
        other
        for other in servers
        if type(other) is type(server) and other.config.model_name == server.config.model_name
    ]
