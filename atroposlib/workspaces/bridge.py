"""Unix sockets of a remote container, carried by the input and output of one process there.

    command ─► relay ─► FOLDER/PORT ─► this program ═ stdin, stdout ═ `Bridge` ─► socket of the gate

It is run in the container as `python3 -I -S -B bridge.py FOLDER PORT ...`, over `kubectl exec`:
no route between the container and the environment is needed. Therefore it imports only the standard
library and supports Python 3.8. A piece of a connection is a frame: number of the connection, kind,
length, data. A connection whose reader stops delays the others of the same command.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import Awaitable, Callable, Dict, List, Tuple  # noqa: UP035 - Python 3.8

HEAD = struct.Struct("!IBI")
OPEN, DATA, END, ABORT = range(4)
PIECE_BYTES = 65536
MAX_CONNECTIONS = 256
BOTH = 2
READY = b"atropos-bridge\n"

Streams = Tuple[asyncio.StreamReader, asyncio.StreamWriter]  # noqa: UP006


class CarriedConnection:
    """One connection of this end; it is closed once both directions have ended."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.task: asyncio.Future[None] | None = None
        """Copies what this end writes."""
        self.num_ended = 0


class Multiplexer:
    """Connections that share one pair of streams; both ends of a bridge have one.

    Args:
        reader: frames of the other end.
        writer: frames for the other end.
        connect: returns the streams of a connection that the other end opened to a port; None if
            it may not open any.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connect: Callable[[int], Awaitable[Streams]] | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._connect = connect
        self._open: Dict[int, CarriedConnection] = {}  # noqa: UP006
        self._last = 0

    async def run(self) -> None:
        """Carry frames until the other end is gone; then close all connections."""
        try:
            while True:
                number, kind, length = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                if length > PIECE_BYTES:
                    raise ConnectionError("a frame exceeds its maximum length")
                data = await self._reader.readexactly(length)
                if kind == OPEN:
                    await self._accept(number, data)
                elif number in self._open:
                    await self._receive(number, kind, data)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for number in list(self._open):
                self._abort(number)

    async def carry(self, port: int, streams: Streams) -> None:
        """Carry a connection that was accepted at this end."""
        if len(self._open) >= MAX_CONNECTIONS:
            streams[1].transport.abort()
            return
        self._last = (self._last + 1) % 2**32
        self._writer.write(self._frame(self._last, OPEN, str(port).encode()))
        # Before anything is awaited: the answer of the other end may come at once.
        self._begin(self._last, streams)
        await self._writer.drain()

    async def _accept(self, number: int, data: bytes) -> None:
        try:
            if self._connect is None or number in self._open or len(self._open) >= MAX_CONNECTIONS:
                raise ConnectionRefusedError
            self._begin(number, await self._connect(int(data)))
        except (OSError, ValueError):
            await self._send(number, ABORT)

    async def _receive(self, number: int, kind: int, data: bytes) -> None:
        writer = self._open[number].writer
        try:
            if kind == DATA:
                writer.write(data)
                await writer.drain()
            elif kind == END:
                writer.write_eof()
                self._end_direction(number)
            else:
                self._abort(number)
        except (OSError, RuntimeError):
            self._abort(number)
            await self._send(number, ABORT)

    def _begin(self, number: int, streams: Streams) -> None:
        made = self._open[number] = CarriedConnection(streams[1])
        made.task = asyncio.ensure_future(self._copy(number, streams[0]))

    async def _copy(self, number: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                piece = await reader.read(PIECE_BYTES)
                if not piece:
                    break
                await self._send(number, DATA, piece)
            await self._send(number, END)
            self._end_direction(number)
        except OSError:
            self._abort(number)
            await self._send(number, ABORT)

    def _end_direction(self, number: int) -> None:
        connection = self._open[number]
        connection.num_ended += 1
        if connection.num_ended == BOTH:
            connection.writer.close()
            del self._open[number]

    def _abort(self, number: int) -> None:
        connection = self._open.pop(number, None)
        if connection is not None:
            connection.writer.transport.abort()
            if connection.task is not None and connection.task is not asyncio.current_task():
                connection.task.cancel()

    async def _send(self, number: int, kind: int, data: bytes = b"") -> None:
        self._writer.write(self._frame(number, kind, data))
        await self._writer.drain()

    def _frame(self, number: int, kind: int, data: bytes) -> bytes:
        return HEAD.pack(number, kind, len(data)) + data


async def serve(folder: str, ports: List[int]) -> None:  # noqa: UP006
    """Accept connections at the sockets of a folder, and carry them over stdin and stdout."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    ends = Multiplexer(reader, writer)
    for port in ports:
        path = f"{folder}/{port}"
        await asyncio.start_unix_server(_acceptor(ends, port), path)
        os.chmod(path, 0o666)  # noqa: PTH101 - a command may have another user
    writer.write(READY)
    await ends.run()


def _acceptor(
    ends: Multiplexer, port: int
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.carry(port, (reader, writer))

    return accept


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], [int(word) for word in sys.argv[2:]]))
