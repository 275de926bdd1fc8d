"""gzip piece by piece, in threads: zlib lets other threads run while it works.

No call handles more than a piece, so a bomb is noticed at the cap and a client that left is noticed
within milliseconds.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from starlette.datastructures import Headers

__all__ = ["BodyTooLargeError", "Deflater", "GzipError", "Inflater", "accepts_gzip"]

_T = TypeVar("_T")

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_INLINE_BYTES = 32 * 1024
"""Shorter pieces cost less than the way to a thread and back."""
_INFLATED_PIECE_BYTES = 1024 * 1024


class GzipError(Exception):
    """The body is not one or more complete gzip members."""


class BodyTooLargeError(Exception):
    """The body exceeds the cap."""


class Inflater:
    """Inflates one gzip stream of any number of members up to a cap.

    Args:
        max_bytes: cap on what comes out.
        threads: where pieces are inflated; None: the threads of the event loop.
    """

    def __init__(self, max_bytes: int, threads: Executor | None = None) -> None:
        self._member = zlib.decompressobj(_GZIP_WINDOW)
        self._is_member_open = False
        self._unread = b""
        self._room = max_bytes
        self._threads = threads

    async def inflate(self, data: bytes) -> list[bytes]:
        """Return the next pieces that come out of `data`, no more than about 1 MiB together.

        Must be called again with `b""` until nothing comes out before there is more data.

        Raises:
            GzipError: the data is not gzip.
            BodyTooLargeError: more than the cap came out.
        """
        self._unread += data
        if not self._unread:
            return []
        return await _in_thread(self._threads, len(self._unread), self._step)

    def _step(self) -> list[bytes]:
        pieces: list[bytes] = []
        wanted = min(self._room + 1, _INFLATED_PIECE_BYTES)
        while self._unread and wanted > 0:
            self._is_member_open = True
            try:
                piece = self._member.decompress(self._unread, wanted)
            except zlib.error as error:
                raise GzipError from error
            self._unread = self._member.unconsumed_tail
            if self._member.eof:
                # Members may be padded with zeros.
                self._unread = self._member.unused_data.lstrip(b"\0")
                self._member = zlib.decompressobj(_GZIP_WINDOW)
                self._is_member_open = False
            if not piece:
                continue
            pieces.append(piece)
            wanted -= len(piece)
            self._room -= len(piece)
            if self._room < 0:
                raise BodyTooLargeError
        return pieces

    def finish(self) -> None:
        """Check that the stream is complete.

        Raises:
            GzipError: it is cut short.
        """
        if self._is_member_open:
            raise GzipError


class Deflater:
    """Compresses the bodies of responses.

    Args:
        min_bytes: shorter bodies are not worth it.
        level: 1 (fastest) to 9.
        threads: where pieces are compressed; None: the threads of the event loop.
    """

    def __init__(self, *, min_bytes: int, level: int, threads: Executor | None = None) -> None:
        self._min_bytes = min_bytes
        self._level = level
        self._threads = threads

    def applies_to(self, request_headers: Headers, num_bytes: int) -> bool:
        """Whether a body of this length is compressed for the sender of these headers."""
        return num_bytes >= self._min_bytes and accepts_gzip(request_headers)

    def start(self) -> DeflaterStream:
        """Begin a body."""
        return DeflaterStream(zlib.compressobj(self._level, zlib.DEFLATED, _GZIP_WINDOW), self)

    async def deflate(self, pieces: Iterable[bytes], is_gone: Callable[[], bool]) -> list[bytes]:
        """Compress a body; what is returned is incomplete if the client left meanwhile."""
        stream = self.start()
        compressed: list[bytes] = []
        for piece in pieces:
            if is_gone():
                break
            compressed.append(await stream.feed(piece))
        compressed.append(await stream.feed(b"", is_last=True))
        return compressed

    async def run(self, num_bytes: int, work: Callable[[], bytes]) -> bytes:
        """Call `work` where a piece of this length is best compressed."""
        return await _in_thread(self._threads, num_bytes, work)


class DeflaterStream:
    """One body that is being compressed."""

    def __init__(self, stream: zlib._Compress, deflater: Deflater) -> None:
        self._stream = stream
        self._deflater = deflater

    async def feed(self, piece: bytes, *, is_last: bool = False) -> bytes:
        """Compress a piece; returns what is ready to be sent, everything after the last one."""

        def work() -> bytes:
            ready = self._stream.compress(piece)
            return ready + self._stream.flush() if is_last else ready

        return await self._deflater.run(len(piece), work)


def accepts_gzip(headers: Headers) -> bool:
    """Whether the sender of these headers reads gzip."""
    for choice in headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = choice.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


async def _in_thread(threads: Executor | None, num_bytes: int, work: Callable[[], _T]) -> _T:
    if num_bytes <= _INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(threads, work)
