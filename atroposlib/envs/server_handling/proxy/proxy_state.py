"""What one proxy serves: inference servers, their model, and the sessions in front of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.proxy.backends import Backend, HasServers, open_backend
from atroposlib.envs.server_handling.proxy.refusals import bad_request
from atroposlib.envs.server_handling.proxy.request_models import (
    ServerEntry,
    SessionCreateRequest,
    SetupRequest,
)
from atroposlib.envs.server_handling.proxy.session import SessionState
from atroposlib.envs.server_handling.proxy.sessions import SessionStore
from atroposlib.envs.server_handling.proxy.settings import ProxySettings
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_manager import make_server
from atroposlib.envs.server_handling.token_server import load_tokenizer

__all__ = ["ProxyState", "config_of"]

logger = logging.getLogger(__name__)


def config_of(entry: ServerEntry, *, model_name: str, tokenizer_name: str) -> APIServerConfig:
    """Return the config of a server named in a setup; raises the 422 for an unknown type."""
    return APIServerConfig(
        **entry.model_dump(), model_name=model_name, tokenizer_name=tokenizer_name
    )


class ProxyState:
    """The state behind the routes.

    Args:
        server_manager: Its servers are used; its list is replaced by a setup.
        tokenizer: Of the served model; None takes the servers' own.
        model_name: Name in answers.
        settings: Limits and keys.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        server_manager: HasServers,
        tokenizer: Any,
        model_name: str,
        settings: ProxySettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._server_manager = server_manager
        self._tokenizer = tokenizer
        self._replaced: list[Any] = []
        self.model_name = model_name
        self.settings = settings
        self.sessions = SessionStore(settings, clock, self._backend_for)

    @property
    def servers(self) -> list[Any]:
        """The inference servers."""
        return self._server_manager.servers

    def open_session(self, request: SessionCreateRequest) -> SessionState:
        """Open a session at the server it names, or at the least loaded one.

        Raises:
            ProxyRefusal: 429 without room, 404 for an unknown address, 503 without servers.
        """
        self.sessions.check_room()
        return self.sessions.add(self._backend_for(request), request, model_name=self.model_name)

    def _backend_for(self, request: SessionCreateRequest) -> Backend:
        return open_backend(
            self.servers,
            self._tokenizer,
            request,
            open_sessions=self.sessions.sessions_per_server,
            # Asked for at every request; a proxy of its own has no service to tell it.
            policy_version=lambda: getattr(self._server_manager, "policy_version", None),
            wait_s=self.settings.upstream_wait_s,
        )

    async def set_up(self, request: SetupRequest) -> None:
        """Use other servers from now on, and another model and tokenizer where they are named.

        Sessions that are open keep their servers, which are closed with the proxy.

        Raises:
            ProxyRefusal: 400 when the tokenizer cannot be loaded, 422 for a wrong server.
        """
        model_name = request.model_name or self.model_name
        name = request.tokenizer_name or "none"
        configs = [
            config_of(entry, model_name=model_name, tokenizer_name=name)
            for entry in request.servers
        ]
        if request.tokenizer_name or (request.model_name not in (None, self.model_name)):
            self._tokenizer = await _load(model_name, name)
        self.model_name = model_name
        if configs:
            self._replaced += self.servers
            self._server_manager.servers = [
                make_server(config, APIServer, None)  # type: ignore[type-abstract]  # by type
                for config in configs
            ]

    async def close(self) -> None:
        """End every session, and the servers that were replaced."""
        self.sessions.close()
        for server in self._replaced:
            await server.close()
        self._replaced.clear()


async def _load(model_name: str, tokenizer_name: str) -> Any:
    config = APIServerConfig(model_name=model_name, tokenizer_name=tokenizer_name)
    try:
        return await asyncio.to_thread(load_tokenizer, config)
    except (OSError, ValueError) as error:
        raise bad_request(
            f"the tokenizer cannot be loaded: {error}", param="tokenizer_name"
        ) from error
