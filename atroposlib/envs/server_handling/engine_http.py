"""HTTP to inference servers over aiohttp: token routes, and the transport of the OpenAI client.

    token ids    EngineHttp.post_json ─► body_of ─► decode_answer ─► reading_answer
    chat, text   openai.AsyncClient ─► _AiohttpTransport ─► _Stream

Answers have a maximum size after decompression, and of an error response only the beginning is
read, so that a server that sends without end costs one request. API keys do not get into errors.

The OpenAI client's own HTTP library scans all connections for each request, which takes
milliseconds with a thousand requests in flight. So its transport is replaced with aiohttp.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from atroposlib.envs.server_handling.retry import EngineStatusError, describe, without_key
from atroposlib.errors import InferenceError
from atroposlib.utils.aio import LoopTurns
from atroposlib.utils.io import body_chunks, open_socket, retry_after_s
from atroposlib.utils.json_text import STEP_BYTES, decode_in_steps
from atroposlib.utils.proxies import may_use_proxy
from atroposlib.utils.text import hide_secrets_of_requests, inert_block, without_secrets
from atroposlib.utils.tracing import trace_headers

_PROBE_TIMEOUT_S = 10.0
_ERROR_TEXT_LIMIT = 2000
_LONG_BYTES = 2**17

MAX_ANSWER_BYTES = 2**30
"""Limit on the size of an answer after decompression, far above that of any group."""
_HEADERS_OF_ENCODING = ("content-encoding", "content-length", "transfer-encoding")


def answer_cost_s(num_bytes: int) -> float:
    """Estimate the seconds to decode, check and record an answer."""
    return 0.0003 + num_bytes * 12e-9


def root_of(base_url: str) -> str:
    """Return the address of the server itself: `base_url` without a trailing `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


async def _open_while_used(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    async with session:
        yield


class _Connections:
    """An aiohttp session of the running event loop, opened on first use.

    A generator closes it, since `asyncio.run` closes those that have started: a script that
    closes nothing ends without complaints about its connections.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._use: AsyncGenerator[None, None] | None = None

    def open(self) -> aiohttp.ClientSession:
        # A session belongs to the loop on which it was created; another asyncio.run needs its own.
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            # The semaphores of the server bound the number of connections, not the connector.
            connector = aiohttp.TCPConnector(limit=0, socket_factory=open_socket)
            self._session = aiohttp.ClientSession(connector=connector, **self._options)
            self._use = _open_while_used(self._session)
            with suppress(StopIteration):  # how a coroutine returns, here without waiting
                self._use.__anext__().send(None)
        return self._session

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        use, self._use, self._session = self._use, None, None
        if use is not None:
            await use.aclose()


class EngineHttp:
    """Requests to one engine over persistent connections, opened on first use.

    Attributes:
        turns: Limits the answers decoded per pass of the event loop; shared by all servers on it.
    """

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.root_url = root_of(base_url)
        self.turns = LoopTurns()
        self._timeout_s = timeout_s
        self._api_key = api_key
        has_user = urlsplit(self.root_url).username is not None  # sent in place of the key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key and not has_user else {}
        self._connections = _Connections(headers=headers)

    @property
    def shown_url(self) -> str:
        return without_secrets(self.root_url)

    async def post_json(
        self,
        path: str,
        body: dict[str, Any],
        *,
        timeout_s: float | None = None,
        decoder: msgspec.json.Decoder[Any] | None = None,
    ) -> Any:
        """Return the decoded JSON answer of a POST.

        `decoder` decodes only the needed fields. Answers of another form, and very long ones, are
        decoded completely. The default timeout is that of the server.

        Raises:
            EngineStatusError: the engine answered an error status; its text is quoted.
            InferenceError: the answer is longer than `MAX_ANSWER_BYTES`, or cannot be decoded.
            aiohttp.ClientError, TimeoutError, json.JSONDecodeError: no usable answer.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        url = f"{self.root_url}{path}"
        sending = self._connections.open().post(
            url, json=body, timeout=timeout, headers=trace_headers()
        )
        async with sending as response:
            raw = await body_of(response)
        if len(raw) > STEP_BYTES and response.status < 400:
            try:
                return await decode_in_steps(raw, lambda n: self.turns.turn(answer_cost_s(n)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return _loads(raw)
        await self.turns.turn(answer_cost_s(len(raw)))
        answer = decode_answer(response, raw, decoder, api_key=self._api_key)
        if len(raw) > _LONG_BYTES:  # processing it takes about the same time again
            await asyncio.sleep(0)
        return answer

    async def get_json(self, path: str) -> Any:
        """Return the decoded JSON answer of a GET; raises like `post_json`."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        url = f"{self.root_url}{path}"
        async with self._connections.open().get(url, timeout=timeout) as response:
            raw = await body_of(response)
        return decode_answer(response, raw, api_key=self._api_key)

    async def ask_briefly(
        self, path: str, body: dict[str, Any] | None, *, timeout_s: float, max_bytes: int
    ) -> Any:
        """Return the decoded JSON answer of a GET, or of a POST with a body, if it is short.

        Raises:
            EngineStatusError: the engine answered an error status.
            InferenceError: the answer is longer than `max_bytes`, or cannot be decoded.
            json.JSONDecodeError: it is not JSON.
            aiohttp.ClientError, TimeoutError, OSError: no answer.
        """
        timeout = aiohttp.ClientTimeout(total=min(timeout_s, self._timeout_s))
        method = "GET" if body is None else "POST"
        url = f"{self.root_url}{path}"
        session = self._connections.open()
        async with session.request(method, url, json=body, timeout=timeout) as response:
            raw = await body_of(response, max_bytes=max_bytes)
        return decode_answer(response, raw, api_key=self._api_key)

    async def answers(self, path: str = "/health") -> bool:
        """Whether the server is up: it answers a GET with a status below 500.

        A reverse proxy without its engine answers 502 to 504. A server that lacks the path or
        requires a key answers 4xx and is up.
        """
        timeout = aiohttp.ClientTimeout(total=min(_PROBE_TIMEOUT_S, self._timeout_s))
        url = f"{self.root_url}{path}"
        try:
            async with self._connections.open().get(url, timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def close(self) -> None:
        await self._connections.close()


async def body_of(response: aiohttp.ClientResponse, *, max_bytes: int | None = None) -> bytes:
    """Return the decompressed body of an answer; only the beginning of an error response.

    Raises:
        InferenceError: the body is longer than `max_bytes`, by default `MAX_ANSWER_BYTES`.
    """
    return b"".join([chunk async for chunk in _chunks_of(response, max_bytes=max_bytes)])


def _chunks_of(
    response: aiohttp.ClientResponse, *, max_bytes: int | None = None
) -> AsyncIterator[bytes]:
    limit = MAX_ANSWER_BYTES if max_bytes is None else max_bytes
    text = f"the answer to {response.url.path} is longer than {limit} bytes"
    return body_chunks(response, max_bytes=limit, too_large=lambda: InferenceError(text))


def _loads(raw: bytes) -> Any:
    """Decode an answer; `msgspec` is eight times faster, but only `json` accepts NaN.

    Raises:
        json.JSONDecodeError: it is not JSON.
        InferenceError: it is not Unicode, nested too deeply, or has a number that is too long.
    """
    try:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(raw)
        return json.loads(raw)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise InferenceError(f"the engine's answer cannot be decoded: {describe(error)}") from error


def decode_answer(
    response: aiohttp.ClientResponse,
    raw: bytes,
    decoder: msgspec.json.Decoder[Any] | None = None,
    *,
    api_key: str | None = None,
) -> Any:
    """Return the JSON of an answer; an error status raises `EngineStatusError` with its text.

    The `api_key` is removed from that text, even if the server repeats it.
    """
    if response.status < 400:
        if decoder is not None:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return decoder.decode(raw)
        return _loads(raw)
    text = without_key(raw.decode(errors="replace"), api_key)[:_ERROR_TEXT_LIMIT]
    raise EngineStatusError(
        f"{response.url.path} answered {response.status}: {inert_block(text)}",
        status=response.status,
        wait_s=retry_after_s(response.headers),
    )


def make_http_client(base_url: str) -> Any:
    """Return an HTTP client for `openai.AsyncClient`; None for the client's default.

    Servers with an `http://` URL are engines in the local network. Others are providers on the
    internet, where certificates and proxies are more important than concurrency.
    """
    hide_secrets_of_requests()
    if not base_url.startswith("http://"):
        return None
    import openai

    client_type = openai.DefaultAsyncHttpxClient
    base = next(base for base in client_type.__mro__ if base.__name__ == "AsyncClient")
    # The HTTP library differs between versions of the client.
    library = importlib.import_module(base.__module__.partition(".")[0])
    transport: Any = _AiohttpTransport(library, uses_proxy=may_use_proxy(base_url))
    return client_type(transport=transport)


class _AiohttpTransport:
    """Implements the transport interface of the client's HTTP library."""

    def __init__(self, library: ModuleType, *, uses_proxy: bool) -> None:
        self._library = library
        self._connections = _Connections(trust_env=uses_proxy)
        # The library accepts only subclasses of its own stream class.
        self._stream_type = type("_Stream", (_Stream, library.AsyncByteStream), {})

    async def __aenter__(self) -> _AiohttpTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._connections.close()

    async def handle_async_request(self, request: Any) -> Any:
        limits = request.extensions.get("timeout") or {}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.get("connect"), sock_read=limits.get("read")
        )
        try:
            answer = await self._connections.open().request(
                request.method,
                # The client already sends user and password as a header; aiohttp rejects both.
                str(request.url.copy_with(username="", password="")),
                headers=[*request.headers.multi_items(), *trace_headers().items()],
                data=await request.aread(),
                timeout=timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _translated(self._library, error, request) from error
        return self._library.Response(
            answer.status,
            headers=[
                (name, value)
                for name, value in answer.headers.items()
                if name.lower() not in _HEADERS_OF_ENCODING  # aiohttp has decoded the body
            ],
            stream=self._stream_type(self._library, answer, request),
            request=request,
        )


class _Stream:
    """The body of one answer, as it arrives, within the limits of `body_of`."""

    def __init__(self, library: ModuleType, answer: aiohttp.ClientResponse, request: Any) -> None:
        self._library, self._answer, self._request = library, answer, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in _chunks_of(self._answer):
                yield chunk
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _translated(self._library, error, self._request) from error

    async def aclose(self) -> None:
        self._answer.release()


def _translated(library: ModuleType, error: Exception, request: Any) -> Exception:
    """Return the client library's equivalent of an aiohttp error."""
    if isinstance(error, asyncio.TimeoutError):
        kind = library.ReadTimeout
    elif isinstance(error, aiohttp.ClientConnectorError):
        kind = library.ConnectError
    else:
        kind = library.ReadError
    return kind(str(error) or type(error).__name__, request=request)  # type: ignore[no-any-return]


@contextmanager
def reading_answer() -> Iterator[None]:
    """Raise `InferenceError` for an answer whose values have other types than expected."""
    try:
        yield
    except InferenceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InferenceError(f"the engine's answer is malformed: {describe(error)}") from error


def list_of(mapping: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list field of an answer; InferenceError if it is missing."""
    value = mapping.get(name) if isinstance(mapping, Mapping) else None
    if not isinstance(value, list):
        raise InferenceError(f"the engine's answer has no {name}")
    return value
