"""The OpenAI client's requests over aiohttp, whose cost does not grow with those in flight.

The client's own HTTP library looks through every connection for every request: with a thousand in
flight that takes milliseconds each. Its transport is replaced, everything above it stays.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import aiohttp

from atroposlib.utils.secret_masking import hide_secrets_of_requests

__all__ = ["make_http_client"]

_CHUNK_BYTES = 1 << 16


def make_http_client(base_url: str) -> Any:
    """Return an HTTP client for `openai.AsyncClient`; None for what its own does better.

    Servers with an `http://` address are engines near by. Others are providers on the internet,
    where certificates and proxies matter more than a thousand requests at a time.
    """
    hide_secrets_of_requests()
    if not base_url.startswith("http://"):
        return None
    import openai

    library = _library_of(openai.DefaultAsyncHttpxClient)
    transport: Any = _AiohttpTransport(library)
    return openai.DefaultAsyncHttpxClient(transport=transport)


def _library_of(client_type: type[Any]) -> ModuleType:
    """Return the library the client is built on, which differs between its versions."""
    base = next(base for base in client_type.__mro__ if base.__name__ == "AsyncClient")
    return importlib.import_module(base.__module__.partition(".")[0])


class _AiohttpTransport:
    """What the client's library expects of a transport."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The library takes only streams of its own family.
        self._stream_type = type("_Stream", (_Stream, library.AsyncByteStream), {})

    async def __aenter__(self) -> _AiohttpTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request; the body of the answer is read by whoever wants it."""
        limits = request.extensions.get("timeout") or {}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.get("connect"), sock_read=limits.get("read")
        )
        try:
            answer = await self._open().request(
                request.method,
                # The client has made a header of user and password; aiohttp takes one of the two.
                str(request.url.copy_with(username="", password="")),
                headers=request.headers.multi_items(),
                data=await request.aread(),
                timeout=timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _translated(self._library, error, request) from error
        return self._library.Response(
            answer.status,
            headers=[(name, value) for name, value in answer.headers.items() if _is_kept(name)],
            stream=self._stream_type(self._library, answer, request),
            request=request,
        )

    def _open(self) -> aiohttp.ClientSession:
        # A session belongs to the loop it was made on; a second asyncio.run needs a new one.
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=True
            )
        return self._session


class _Stream:
    """The body of one answer, as it arrives."""

    def __init__(self, library: ModuleType, answer: aiohttp.ClientResponse, request: Any) -> None:
        self._library, self._answer, self._request = library, answer, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._answer.content.iter_chunked(_CHUNK_BYTES):
                yield chunk
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _translated(self._library, error, self._request) from error

    async def aclose(self) -> None:
        """Give the connection back if everything was read, else close it."""
        self._answer.release()


def _is_kept(header: str) -> bool:
    """Whether a header still holds: aiohttp has decompressed the body."""
    return header.lower() not in ("content-encoding", "content-length", "transfer-encoding")


def _translated(library: ModuleType, error: Exception, request: Any) -> Exception:
    """Return the client library's own error for what went wrong."""
    if isinstance(error, asyncio.TimeoutError):
        kind = library.ReadTimeout
    elif isinstance(error, aiohttp.ClientConnectorError):
        kind = library.ConnectError
    else:
        kind = library.ReadError
    return kind(str(error) or type(error).__name__, request=request)  # type: ignore[no-any-return]
