"""HTTP clients: reading of responses, and options of their connections."""

from __future__ import annotations

import logging
import socket
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

__all__ = [
    "DEAD_PEER_S",
    "body_chunks",
    "gunzipped",
    "keepalive_options",
    "open_socket",
    "parse_http_response",
    "pieces",
    "retry_after_s",
    "socket_options",
]

DEAD_PEER_S = 30
"""Seconds after which a connection is closed whose peer confirms nothing."""
_PROBE_AFTER_S = 10
_PROBE_INTERVAL_S = 5


class HttpResponse(Protocol):
    """The members of an asynchronous HTTP response that are used here."""

    def raise_for_status(self) -> Any: ...

    async def json(self) -> Any: ...

    async def text(self) -> str: ...


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `Retry-After`, at least 0; None if it is missing or a date."""
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None


def keepalive_options() -> list[tuple[int, int, int]]:
    """Return options by which an idle TCP connection ends if its peer is gone.

    A host that lost power, or whose packets are dropped on the way, ends no connection. With these
    options the kernel asks the peer now and then. A peer that is stopped or slow still confirms.
    """
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":
        probes = (DEAD_PEER_S - _PROBE_AFTER_S) // _PROBE_INTERVAL_S
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
        ]
    return options


def socket_options() -> list[tuple[int, int, int]]:
    """Return options of a client's TCP connection, which fails soon if its peer is gone.

    By default, a request waits for such a peer until its own timeout, and the kernel sends data for
    about 15 minutes. With these options both end after `DEAD_PEER_S` seconds.
    """
    options = keepalive_options()
    if sys.platform == "linux":
        options.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_PEER_S))
    return options


def open_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket with `socket_options` for an entry of `getaddrinfo`, not yet connected.

    This is the `socket_factory` of an `aiohttp.TCPConnector`.
    """
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    for option in socket_options():
        opened.setsockopt(*option)
    return opened


_CHUNK_BYTES = 2**16
_MAX_ERROR_BYTES = 2**20
"""Length of the beginning that is read of an error response."""


async def body_chunks(
    response: Any, *, max_bytes: int, too_large: Callable[[], Exception]
) -> AsyncIterator[bytes]:
    """Yield the decompressed body of an aiohttp response; only the beginning of an error response.

    Raises the exception that `too_large` returns if the body is longer than `max_bytes`.
    """
    num_bytes = 0
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large()
        yield chunk
        if response.status >= 400 and num_bytes >= _MAX_ERROR_BYTES:
            return


def gunzipped(chunks: Iterable[bytes], failed: Callable[[str], Exception]) -> Iterator[bytes]:
    """Yield the chunks of a gzip stream decompressed.

    Raises the exception that `failed` returns for a fault: it is not gzip, or incomplete.
    """
    gunzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    is_empty = True
    for chunk in chunks:
        is_empty = False
        try:
            yield gunzip.decompress(chunk)
        except zlib.error as error:
            raise failed(f"the response is not gzip: {error}") from None
    if not gunzip.eof and not is_empty:
        raise failed("the response ends within its gzip stream")


async def pieces(content: bytes, *, num_bytes: int) -> AsyncIterator[memoryview]:
    """Split a long body into pieces of `num_bytes`, so that other tasks run between them."""
    view = memoryview(content)
    for start in range(0, len(view), num_bytes):
        yield view[start : start + num_bytes]


async def parse_http_response(resp: HttpResponse, logger: logging.Logger | None = None) -> Any:
    """Return the decoded JSON body of a successful response, which was not read yet.

    Raises:
        Exception: any exception of `resp`; status and body are logged first.
    """
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        body = await resp.text()
        (logger or logging.getLogger(__name__)).error(
            "HTTP reply refused: %s; body: %s", error, body
        )
        raise
