"""Parts of adapters of servers: addresses, requests, back-off, and the order of tasks.

    URL ─► server_address ─► HttpSession ─► request, repeated with back-off ─► JSON
    size of a split, seed ─► TaskOrder ─► task of item 0, 1, 2, ...

Requests are repeated only where that is safe: while a server is looked up, and while a session is
opened. A connection lost later fails the episode with `EpisodeConnectionError`, since the state on
the server is lost with it; `AdapterEnv` then starts another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import yaml
from pydantic import Field
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from atroposlib.adapters.interface import AdapterArgs
from atroposlib.errors import (
    ConfigError,
    EpisodeConnectionError,
    EpisodeFailedError,
    EpisodeTimeoutError,
)
from atroposlib.utils.text import near_name, shown_name, without_secrets
from atroposlib.utils.yaml_text import read_yaml

__all__ = [
    "OPEN_REQUEST_S",
    "TOO_MANY_REQUESTS",
    "HttpAnswer",
    "HttpSession",
    "RemoteArgs",
    "TaskOrder",
    "choose",
    "is_refusing",
    "numbers_of",
    "read_pairs",
    "repeat_until_connected",
    "server_address",
    "shown_value",
    "split_names",
]

logger = logging.getLogger(__name__)

OPEN_REQUEST_S = 30.0
"""Least time limit of a request before the first episode; a server may build its answer first."""
CONNECT_S = 10.0
"""Time limit of opening one connection."""
ATTEMPTS_BEFORE_LOG = 3
"""A server that does not answer this many attempts is named in the log."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_TEXT = 200_000
"""Characters of one value that are shown to the policy."""
MAX_TASKS = 10_000_000
"""Tasks of a split that are used."""
MAX_METRICS = 32
MAX_NUMBER = sys.float_info.max
REDIRECTIONS = (301, 302, 303, 307, 308)
TOO_MANY_REQUESTS = 429
"""Status of a request that was not handled, and may be repeated."""
BUSY_WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""Waits before its repetitions."""

Result = TypeVar("Result")


class RemoteArgs(AdapterArgs):
    """Arguments of every adapter of a server."""

    max_concurrent: int | None = Field(
        None, ge=1, le=4096, description="Number of sessions that are open at the same time."
    )
    reconnect_s: float = Field(
        20.0,
        ge=0,
        le=600,
        description="Time in seconds for which an unreachable server is tried again.",
    )


class Address(NamedTuple):
    """The name of an adapter of a server, `URL` or `URL#PART`."""

    url: str
    """URL without a slash at its end."""
    part: str | None


def server_address(name: str, kind: str) -> Address:
    """Parse the address of a server.

    Args:
        name: `URL` or `URL#PART`.
        kind: kind of the adapter, for the error message.

    Raises:
        ConfigError: it is not an http or https URL, or it has a user or a query.
    """
    shown = f"{kind}:{without_secrets(name)}"
    try:
        parts = urlsplit(name)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{shown}: not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{shown}: expected the URL of a server, such as http://127.0.0.1:8000")
    if "@" in parts.netloc or parts.query:
        raise ConfigError(
            f"{shown}: a URL is logged, so it may hold no user, password or query; use the "
            "argument for a file with keys or headers"
        )
    url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    return Address(url, parts.fragment or None)


def read_pairs(path: Path | None, argument: str) -> dict[str, str]:
    """Read a YAML file of names and texts, such as headers; empty without a path.

    Raises:
        ConfigError: the file cannot be read, or has other content; its content is not quoted.
    """
    if path is None:
        return {}
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{argument} {path}: cannot be read: {type(error).__name__}") from None
    if not isinstance(content, dict) or not all(
        isinstance(entry, str) for pair in content.items() for entry in pair
    ):
        raise ConfigError(f"{argument} {path}: expected lines of the form `Name: text`")
    return content


class HttpAnswer(NamedTuple):
    """The response to a request."""

    status: int
    text: str
    where: str
    """Request, for error messages."""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Return the content of a successful response.

        Raises:
            EpisodeFailedError: the server reported an error, or the content is not JSON.
        """
        if not self.is_ok:
            raise EpisodeFailedError(f"{self.where}: status {self.status}: {self.text[:300]}")
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            text = f"{self.where}: expected JSON, got {self.text[:100]!r}"
            raise EpisodeFailedError(text) from error


class HttpSession:
    """Requests to one server with cookies of their own; make it in a running event loop.

    Args:
        url: URL of the server.
        headers: headers of every request.
        timeout_s: time limit of one request.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], timeout_s: float) -> None:
        self._url = url
        self._client = aiohttp.ClientSession(
            headers=dict(headers),
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # servers are often given by their IP
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
        )

    async def get(self, path: str) -> HttpAnswer:
        return await self._request("GET", path)

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        return await self._request("POST", path, json=body, headers=headers)

    async def close(self) -> None:
        await self._client.close()

    async def _request(self, method: str, path: str, **content: Any) -> HttpAnswer:
        for wait_s in BUSY_WAITS_S:
            answer = await self._request_once(method, path, **content)
            if answer.status != TOO_MANY_REQUESTS:
                return answer
            await asyncio.sleep(wait_s)
        return await self._request_once(method, path, **content)

    async def _request_once(self, method: str, path: str, **content: Any) -> HttpAnswer:
        where = f"{method} {self._url}{path}"
        try:
            # A redirection could lead to any host that this machine reaches.
            async with self._client.request(
                method, self._url + path, allow_redirects=False, **content
            ) as response:
                body = await _read_limited(response, where)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise EpisodeTimeoutError(f"{where}: no response in time") from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{where}: {type(error).__name__}: {error}"
            raise EpisodeConnectionError(text) from error
        text = body.decode("utf-8", "replace")
        if response.status in REDIRECTIONS:
            target = shown_name(response.headers.get("Location", ""))
            text = f"the server redirects to {target}, which is not followed; give its own URL"
        answer = HttpAnswer(response.status, text, where)
        if answer.status in (502, 503, 504):  # a proxy in front of a server that does not answer
            raise EpisodeConnectionError(f"{where}: status {answer.status}: {answer.text[:300]}")
        return answer


async def _read_limited(response: aiohttp.ClientResponse, where: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise EpisodeFailedError(f"{where}: the response exceeds {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


async def repeat_until_connected(
    call: Callable[[], Awaitable[Result]], *, limit_s: float, where: str
) -> Result:
    """Await a call; repeat it with back-off while it raises `EpisodeConnectionError`.

    Args:
        call: may be repeated without harm; releases what a failed attempt has opened.
        limit_s: no attempt starts later than this.
        where: start of the error message.

    Raises:
        EpisodeConnectionError: the last attempt failed; the message has their number.
    """

    def log_waiting(state: RetryCallState) -> None:
        if state.attempt_number == ATTEMPTS_BEFORE_LOG:
            logger.warning("%s does not answer; waiting up to %g s for it", where, limit_s)

    attempts = AsyncRetrying(
        retry=retry_if_exception_type(EpisodeConnectionError),
        wait=wait_random_exponential(multiplier=0.2, max=3.0),
        stop=stop_after_delay(limit_s),
        before_sleep=log_waiting,
    )

    async def attempt() -> Result:
        return await call()

    try:
        return await attempts(attempt)
    except RetryError as error:
        count = error.last_attempt.attempt_number
        cause = error.last_attempt.exception()
        raise EpisodeConnectionError(
            f"{where}: no connection in {count} {'attempt' if count == 1 else 'attempts'}: {cause}"
        ) from cause


async def is_refusing(host: str, port: int, *, timeout_s: float) -> bool | None:
    """Whether no program listens on a port; None if that is unknown, as of a busy machine.

    A name such as localhost may have several addresses, on some of which nothing ever listens.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = sorted({str(info[4][0]) for info in found})
    tried = (asyncio.open_connection(address, port) for address in addresses)
    limited = (asyncio.wait_for(each, timeout_s) for each in tried)
    results = await asyncio.gather(*limited, return_exceptions=True)
    writers = [result[1] for result in results if isinstance(result, tuple)]
    for writer in writers:
        writer.close()
    if writers:
        return False
    is_late = any(isinstance(result, (TimeoutError, asyncio.TimeoutError)) for result in results)
    is_refused = any(isinstance(result, ConnectionRefusedError) for result in results)
    return True if is_refused and not is_late else None


def choose(wanted: str | None, known: list[str], preferred: str, what: str) -> str:
    """Return the wanted name, or without one the preferred name or the first that is known.

    Raises:
        ConfigError: the wanted name is unknown, or none is known.
    """
    if not known:
        raise ConfigError(f"{what}: the server has none")
    if wanted is None:
        return preferred if preferred in known else known[0]
    if wanted not in known:
        hint = near_name(wanted, known) or f"; expected one of: {', '.join(known)}"
        raise ConfigError(f"{what}: unknown name {wanted!r}{hint}")
    return wanted


class TaskOrder:
    """The order of a finite number of tasks: each pass over them has its own shuffle.

    Args:
        num_tasks: at least 1.
        seed: seed of the order.
    """

    def __init__(self, num_tasks: int, seed: int) -> None:
        self.num_tasks = min(num_tasks, MAX_TASKS)
        self._seed = seed
        self._epoch = -1
        self._order = np.arange(0)

    def at(self, index: int) -> int:
        """Return the task of item `index`."""
        epoch, position = divmod(index, self.num_tasks)
        if epoch != self._epoch:
            entropy = [self._seed % 2**32, epoch]
            self._order = np.random.default_rng(entropy).permutation(self.num_tasks)
            self._epoch = epoch
        return int(self._order[position])


def shown_value(value: Any) -> str:
    """Return a JSON value as text for the policy: strings as they are, others as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n({len(text) - MAX_TEXT} more characters are not shown)"


def split_names(answer: HttpAnswer) -> list[str]:
    """Return the names of the splits that a server lists.

    Raises:
        ConfigError: the answer is not a list of objects with a name.
    """
    listed = answer.json()
    is_list = isinstance(listed, list) and all(isinstance(split, Mapping) for split in listed)
    if not is_list or not all(isinstance(split.get("name"), str) for split in listed):
        raise ConfigError(
            f"{answer.where}: expected a list of objects with a name, got {listed!r:.100}"
        )
    return [split["name"] for split in listed]


def numbers_of(values: Any) -> dict[str, float]:
    """Return the finite numbers of a mapping, as metrics; other values are left out."""
    if not isinstance(values, Mapping):
        return {}
    numbers = {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, bool | int | float) and abs(value) <= MAX_NUMBER
    }
    return dict(list(numbers.items())[:MAX_METRICS])
