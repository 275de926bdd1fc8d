"""Connections that share one pair of streams, without a container."""

from __future__ import annotations

import asyncio
from typing import Any

from atroposlib.workspaces.bridge import ABORT, HEAD, Multiplexer


class SlowPipe:
    """The writing end of a pipe whose reader waits until `is_read` is set."""

    def __init__(self) -> None:
        self.is_read = asyncio.Event()
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        await self.is_read.wait()


async def test_refusal_that_comes_before_the_pipe_is_read_ends_the_connection() -> None:
    near, carried = asyncio.Queue[tuple[Any, Any]](), asyncio.StreamReader()
    server = await asyncio.start_server(lambda *ends: near.put_nowait(ends), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        pipe: Any = SlowPipe()
        ends = Multiplexer(carried, pipe)
        running = asyncio.create_task(ends.run())
        opening = asyncio.create_task(ends.carry(8000, await near.get()))

        while not pipe.written:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        number, _, _ = HEAD.unpack(pipe.written[: HEAD.size])
        carried.feed_data(HEAD.pack(number, ABORT, 0))
        carried.feed_eof()
        await running
        pipe.is_read.set()
        await opening

        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
