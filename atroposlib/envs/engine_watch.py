"""When the inference servers of a serving environment were last up, requests or none.

    look ──► a request was answered since the last look, or a probe is ──► last seen now
         └─► neither ──► away since it was last seen

A server that is down holds its requests until it is back (`server_handling`). This says for how
long all of them have been away, which ends the wait for an engine that has left for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServer

__all__ = ["EngineWatch"]


class EngineWatch:
    """How long no inference server of an environment has been up.

    Args:
        servers: Those of its `ServerManager`.
        now: Clock, monotonic seconds.

    Attributes:
        away_s: Seconds for which no server was up, as of the last look. 0 while one is, and where
            that cannot be known: no server has answered yet, or one is not probed.
    """

    def __init__(
        self, servers: Sequence[Any], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.away_s = 0.0
        self._servers = servers
        self._now = now
        self._last_seen: float | None = None
        self._num_answered = 0

    @property
    def names(self) -> str:
        """The addresses of the servers, for messages."""
        return ", ".join(server.health.name for server in self._servers)

    async def look(self) -> None:
        """Look whether a server is up; probes those of which nothing was heard."""
        asked_at = self._now()
        if await self._is_one_up():
            self._last_seen = asked_at
            self.away_s = 0.0
        elif self._last_seen is not None:
            self.away_s = self._now() - self._last_seen

    async def _is_one_up(self) -> bool:
        servers = [server for server in self._servers if isinstance(server, APIServer)]
        if len(servers) < len(self._servers) or not all(s.is_probed for s in servers):
            return True
        num_answered = sum(server.num_answered for server in servers)
        has_answered_since = num_answered > self._num_answered
        self._num_answered = num_answered
        if has_answered_since:
            return True
        known = [server for server in servers if server.num_answered or server.health.has_answered]
        for server in known:
            if await server.probe():
                return True
        return False
