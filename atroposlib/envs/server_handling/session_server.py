"""The server of a tracked session: always the same one, until that is down or overloaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from atroposlib.envs.server_handling.retry import ServerDownError
from atroposlib.envs.server_handling.routing import least_loaded
from atroposlib.envs.server_handling.server_baseline import RAISE_WHEN_DOWN

__all__ = ["OpenSessions", "SessionServer", "present_server"]

logger = logging.getLogger(__name__)

Choose = Callable[[Any, bool], Awaitable[Any]]
"""From the present server and whether the request is training to the one that takes it."""


class SessionServer:
    """Stands where a server is expected and sends each request to the session's present one.

    A request that finds its server down is sent again elsewhere: a session sends whole token
    sequences, so any server of the same model can go on with it. Everything else, such as
    `config` and `tokenizer`, is the present server's.

    Attributes:
        current: The server that took the last request.
    """

    def __init__(self, first: Any, choose: Choose) -> None:
        self.current = first
        self._choose = choose

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Return the answer to a chat; see `APIServer`."""
        return await self._send("chat_completion", kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        """Return the continuation of a `prompt`; see `APIServer`."""
        return await self._send("completion", kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        """Return ids and logprobs; see `APIServer`."""
        return await self._send("tokens_and_logprobs_completion", kwargs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return prompt logprobs; see `APIServer`."""
        rows: dict[str, Any] = await self._send("get_logprobs", kwargs)
        return rows

    async def _send(self, method: str, kwargs: dict[str, Any]) -> Any:
        is_training = kwargs.get("split", "train") == "train"
        while True:
            self.current = await self._choose(self.current, is_training)
            token = RAISE_WHEN_DOWN.set(True)
            try:
                return await getattr(self.current, method)(**kwargs)
            except ServerDownError as error:
                logger.debug("%s; its session goes on at another server", error)
            finally:
                RAISE_WHEN_DOWN.reset(token)


def present_server(server: Any) -> Any:
    """Return the server that a session's requests go to now; any other is itself."""
    return server.current if isinstance(server, SessionServer) else server


class OpenSessions:
    """How many tracked sessions are open at each server.

    Sessions that are opened together have made no request yet; their number spreads them.
    """

    def __init__(self) -> None:
        self._num_at: Counter[int] = Counter()

    def least_busy(self, servers: Sequence[Any], *, is_training: bool = True) -> Any:
        """Return the least loaded server; between equals the one with fewer open sessions."""
        return least_loaded(servers, is_training=is_training, open_sessions=self._num_at)

    @contextmanager
    def counted(self, server: Any) -> Iterator[None]:
        """Count a session, for the time of the context, at the server it is at."""
        self._num_at[id(present_server(server))] += 1
        try:
            yield
        finally:
            self._num_at[id(present_server(server))] -= 1

    def move(self, current: Any, chosen: Any) -> None:
        """Count a session at another server from now on."""
        self._num_at[id(current)] -= 1
        self._num_at[id(chosen)] += 1
