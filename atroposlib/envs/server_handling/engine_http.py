"""JSON over HTTP to the native routes of an engine: status checked, key sent, time bounded."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from atroposlib.envs.server_handling.loop_turns import LoopTurns, answer_cost_s
from atroposlib.envs.server_handling.retry import EngineStatusError
from atroposlib.utils.inert_text import inert_block
from atroposlib.utils.io import retry_after_s
from atroposlib.utils.long_json import STEP_BYTES, decode_in_steps
from atroposlib.utils.secret_masking import without_secrets

__all__ = ["EngineHttp", "decode_answer", "decode_raw", "root_of"]

_PROBE_TIMEOUT_S = 10.0
_ERROR_TEXT_LIMIT = 2000
_LONG_BYTES = 2**17


def root_of(base_url: str) -> str:
    """Return the address of the server itself: `base_url` without a trailing `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


class EngineHttp:
    """Requests to one engine over kept connections; they are opened on first use.

    Args:
        base_url: Address of the engine, with or without a trailing `/v1`.
        api_key: Sent as a bearer token when not empty.
        timeout_s: Longest time for a whole request.

    Attributes:
        turns: Where answers wait for their turn to be decoded; shared by servers on one loop.
    """

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.root_url = root_of(base_url)
        self.turns = LoopTurns()
        self._timeout_s = timeout_s
        has_user = urlsplit(self.root_url).username is not None  # sent in place of the key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key and not has_user else {}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def shown_url(self) -> str:
        """The address for messages, without user and password."""
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

        Args:
            path: Route, from the root of the server.
            body: What is sent.
            timeout_s: Longest time for the request; default: the server's.
            decoder: Reads only what is of use in answers of the expected form; others, and very
                long ones, are read whole.

        Raises:
            EngineStatusError: the engine answered an error status; its own text is quoted.
            aiohttp.ClientError, TimeoutError, json.JSONDecodeError: no usable answer.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        url = f"{self.root_url}{path}"
        async with self._open().post(url, json=body, timeout=timeout) as response:
            raw = await response.read()
        if len(raw) > STEP_BYTES and response.status < 400:
            return await self._decode_long(raw)
        await self.turns.turn(answer_cost_s(len(raw)))
        answer = _decode_with(decoder, response, raw)
        if len(raw) > _LONG_BYTES:  # what is done with it takes as long again
            await asyncio.sleep(0)
        return answer

    async def _decode_long(self, raw: bytes) -> Any:
        try:
            return await decode_in_steps(raw, lambda n: self.turns.turn(answer_cost_s(n)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _loads(raw)

    async def get_json(self, path: str) -> Any:
        """Return the decoded JSON answer of a GET; raises as `post_json`."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with self._open().get(f"{self.root_url}{path}", timeout=timeout) as response:
            return await decode_answer(response)

    async def ask_briefly(
        self, path: str, body: dict[str, Any] | None, *, timeout_s: float, max_bytes: int
    ) -> Any:
        """Return the decoded JSON answer of a GET, or of a POST with a body, if it is short.

        Raises:
            EngineStatusError: the engine answered an error status.
            ValueError: the answer is longer than `max_bytes`, or not JSON.
            aiohttp.ClientError, TimeoutError, OSError: no answer.
        """
        timeout = aiohttp.ClientTimeout(total=min(timeout_s, self._timeout_s))
        method = "GET" if body is None else "POST"
        url = f"{self.root_url}{path}"
        async with self._open().request(method, url, json=body, timeout=timeout) as response:
            raw = bytearray()
            async for chunk in response.content.iter_chunked(2**16):
                raw += chunk
                if len(raw) > max_bytes:
                    raise ValueError(f"{path} answered more than {max_bytes} bytes")
            return decode_raw(response, bytes(raw))

    async def answers(self, path: str = "/health") -> bool:
        """Whether the server is there: any answer below 500 to a GET counts.

        A reverse proxy in front of a dead engine answers 502 to 504; a server that lacks the
        path or wants a key answers 4xx and is up.
        """
        timeout = aiohttp.ClientTimeout(total=min(_PROBE_TIMEOUT_S, self._timeout_s))
        try:
            async with self._open().get(f"{self.root_url}{path}", timeout=timeout) as response:
                return response.status < 500
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        # A session belongs to the loop it was made on; a second asyncio.run needs a new one.
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            # The semaphores of the server bound the number of connections, not the connector.
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0)
            )
        return self._session


def _decode_with(
    decoder: msgspec.json.Decoder[Any] | None, response: aiohttp.ClientResponse, raw: bytes
) -> Any:
    if decoder is not None and response.status < 400:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return decoder.decode(raw)
    return decode_raw(response, raw)


def _loads(raw: bytes) -> Any:
    """Decode an answer; `msgspec` takes an eighth of the time, `json` also reads NaN."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(raw)


async def decode_answer(response: aiohttp.ClientResponse) -> Any:
    """Return the JSON of an answer; an error status raises `EngineStatusError` with its text."""
    return decode_raw(response, await response.read())


def decode_raw(response: aiohttp.ClientResponse, raw: bytes) -> Any:
    """Return the JSON of an answer whose body was read; raises as `decode_answer`."""
    if response.status < 400:
        return _loads(raw)
    text = inert_block(raw.decode(errors="replace")[:_ERROR_TEXT_LIMIT])
    raise EngineStatusError(
        f"{response.url.path} answered {response.status}: {text}",
        status=response.status,
        wait_s=retry_after_s(response.headers),
    )
