"""An application served on a local port, inside the event loop that runs anyway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

__all__ = ["KEEP_ALIVE_S", "serving"]

KEEP_ALIVE_S = 120
"""How long an unused connection stays open: longer than agents usually keep theirs, so that none
is closed in the moment it is used again."""

_POLL_S = 0.005
_GRACE_S = 1


class _EmbeddedServer(uvicorn.Server):
    """Leaves the signals of the process to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: FastAPI, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app` and yield its port; at the end every connection is closed.

    Args:
        app: The application; its lifespan is run.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=2048) as listener:
        config = uvicorn.Config(
            app,
            access_log=False,
            lifespan="on",
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            ws="none",
        )
        server = _EmbeddedServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not task.done():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(_POLL_S)
            if task.done():
                raise RuntimeError("the proxy ended while it started; its log says why")
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task
