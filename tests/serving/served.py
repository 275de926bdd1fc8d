"""Hosts and servers of environments, in the event loop of a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from atroposlib.cli.serve_env import PROTOCOLS, listening, make_host
from atroposlib.serving.sessions import EpisodeHost, ServingSettings, protect

__all__ = ["OWN", "WORD_SUMS", "Served", "opened", "serving", "until_closed"]

OWN = "tests.serving.own_environments"
WORD_SUMS = "environments/word_sums.py"


@contextlib.asynccontextmanager
async def opened(
    target: str,
    *words: str,
    offers_tools: bool = True,
    clock: Callable[[], float] | None = None,
    **settings: Any,
) -> AsyncIterator[EpisodeHost]:
    """Open the host of an environment."""
    host = make_host(target, words, ServingSettings(**settings), offers_tools=offers_tools)
    if clock is not None:
        host.clock = clock
    try:
        await host.open()
        yield host
    finally:
        await host.close()


class Served:
    """A server in this process."""

    def __init__(self, host: EpisodeHost, port: int, app: Any) -> None:
        self.host = host
        self.url = f"http://127.0.0.1:{port}"
        self.app = app


@contextlib.asynccontextmanager
async def serving(
    protocol: str, target: str, *words: str, **settings: Any
) -> AsyncIterator[Served]:
    """Serve an environment on a free port."""
    entry = PROTOCOLS[protocol]
    page = __import__(entry.page, fromlist=[entry.function])
    async with opened(target, *words, offers_tools=entry.offers_tools, **settings) as host:
        app = getattr(page, entry.function)(host)
        async with listening(
            protect(app, host.settings, address="127.0.0.1"),
            host,
            address="127.0.0.1",
            port=0,
            has_websockets=entry.has_websockets,
        ) as port:
            yield Served(host, port, app)
            await host.close_episodes()


async def until_closed(host: EpisodeHost, *, limit_s: float = 120.0) -> None:
    """Wait until no episode is open."""

    async def wait() -> None:
        while host.num_open:  # noqa: ASYNC110 - an episode that is closed has no event
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), limit_s)
