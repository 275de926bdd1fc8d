"""The transports of the clients: one connection pool each, attempts, retries and their log lines.

`AsyncTransport` serves `TrajectoryApiClient`; `SyncClient` is the base of `TrainerClient` and
`InspectionClient`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import httpx
from typing_extensions import Self

from atroposlib.api.client_protocol import (
    Body,
    RetryRule,
    ServiceTraits,
    WaitNotes,
    auth_headers,
    read_answer,
    service_address,
    unreachable,
)
from atroposlib.errors import TrajectoryApiError
from atroposlib.utils.text import hide_secrets_of_requests

__all__ = [
    "AsyncTransport",
    "SyncClient",
]

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2**18
_MAX_INLINE_BYTES = 2**16
_OUTAGE_STATUSES = (None, 502, 504)


class AsyncTransport:
    """Sends requests and retries them by a rule, until there is a response.

    Args:
        base_url: address of the service, without a slash at the end.
        timeout_s: limit on one attempt.
        retry: when failed requests are retried.
        post_retry: the same for posted groups.
        token: bearer token, sent to the service; not shown in errors or logs.

    Attributes:
        traits: traits of the service, learned from its responses.
        num_outages: attempts that reached no service, or only a proxy without one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        retry: RetryRule,
        post_retry: RetryRule,
        token: str | None,
    ) -> None:
        self.traits = ServiceTraits()
        self.num_outages = 0
        self._base_url = base_url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._retry = retry
        self._post_retry = post_retry
        self._auth_headers = auth_headers(token)
        self._session: aiohttp.ClientSession | None = None
        self._notes = WaitNotes(time.monotonic)

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool = False,
        is_post: bool = False,
    ) -> Any:
        """Send until there is a response; return it decoded.

        Args:
            method: of the request.
            path: of the request, from the first slash.
            body: of the request.
            headers: of the request, besides those of the body.
            is_repeatable: Whether the request is idempotent.
            is_post: Whether it posts groups, which use `post_retry`.

        Raises:
            TrajectoryApiError: it was refused, or there was no response within the limits of the
                rule.
        """
        rule = self._post_retry if is_post else self._retry
        started = time.monotonic()
        attempt = 1
        while True:
            try:
                answer = await self._attempt(method, path, body, headers or {}, attempt)
            except TrajectoryApiError as error:
                self.num_outages += error.status in _OUTAGE_STATUSES
                delay_s = rule.delay_s(
                    error,
                    attempt=attempt,
                    is_repeatable=is_repeatable or (is_post and self.traits.honours_keys),
                    passed_s=time.monotonic() - started,
                    jitter=random.random() if is_post else 0.0,
                )
                if delay_s is None:
                    raise
                if (is_post or rule.attempts is None) and (note := self._notes.due(error)):
                    what = "posting" if is_post else "asking"
                    until = "takes it" if is_post else "answers"
                    logger.warning("%s again until the service %s: %s", what, until, note)
            else:
                self._notes.end()
                return answer
            await asyncio.sleep(delay_s)
            attempt += 1

    async def _attempt(
        self, method: str, path: str, body: Body | None, headers: Mapping[str, str], attempt: int
    ) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._auth_headers)
        url = self._base_url + path
        sent: dict[str, Any] = {"headers": headers}
        if body is not None:
            sent = {"headers": {**headers, **body.headers}, "data": body.content}
            if len(body.content) > _PIECE_BYTES:
                sent["headers"]["Content-Length"] = str(len(body.content))
                sent["data"] = _pieces(body.content)
        try:
            async with self._session.request(method, url, **sent) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise unreachable(method, url, error, attempt=attempt, sent=was_sent) from None

        def read() -> Any:
            return read_answer(
                method,
                url,
                status=reply.status,
                headers=reply.headers,
                content=content,
                attempt=attempt,
                secrets=self._auth_headers,
            )

        answer = read() if len(content) <= _MAX_INLINE_BYTES else await asyncio.to_thread(read)
        self.traits.learn(path, reply.headers)
        return answer


async def _pieces(content: bytes) -> AsyncIterator[memoryview]:
    """Split a long body, so that other tasks run between the pieces."""
    view = memoryview(content)
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]


_T = TypeVar("_T")


class SyncClient:
    """A connection pool to the trajectory service; thread-safe.

    Its methods wait for the service and raise `TrajectoryApiError` if it refuses the request or
    cannot be reached.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on connecting, and on every pause while a response arrives.
        retry: when failed requests are retried.
        token: bearer token, sent to the service; never logged.
        sleep: waits; replaced in tests.
        clock: monotonic seconds; replaced in tests.

    Raises:
        ConfigError: the address or the token cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
        token: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base_url = service_address(base_url)
        self._timeout_s = timeout_s
        self._auth_headers = auth_headers(token)
        hide_secrets_of_requests()
        self._client = httpx.Client(timeout=timeout_s, headers=self._auth_headers)
        self._retry = retry or RetryRule()
        self._sleep = sleep
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the client cannot be used again."""
        self._client.close()

    def set_retry(self, rule: RetryRule) -> None:
        """Use another retry rule from now on."""
        self._retry = rule

    def status(self) -> dict[str, Any]:
        """Return the response of `GET /status`: `current_step`, `queue_size` (groups) and more."""
        return dict(self._ask("GET", "/status"))

    def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`, -1 before a trainer registered."""
        return dict(self._ask("GET", "/info"))

    def _ask(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Any:
        """Send until there is a response; return it decoded.

        Args:
            method: of the request.
            path: of the request, from the first slash.
            body: of the request.
            headers: of the request, besides those of the body.
            wait_s: seconds the service was asked to wait, added to the limit.
        """

        def attempt_once(attempt: int) -> Any:
            reply = self._attempt(
                method, path, body, headers=headers, wait_s=wait_s, attempt=attempt
            )
            return self._read(reply, method, path, attempt=attempt)

        return self._repeat(attempt_once)

    def _fetch(self, path: str, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Send a GET until it succeeds; return the raw response."""
        return self._repeat(
            lambda attempt: self._attempt("GET", path, headers=headers, attempt=attempt)
        )

    def _repeat(self, attempt_once: Callable[[int], _T]) -> _T:
        """Call with attempt number 1, 2, ... until it succeeds or the rule gives up.

        All requests of the synchronous clients may be retried: reading changes nothing, and a batch
        that was lost in transit is redelivered. Waits of a rule without a number of attempts are
        logged.
        """
        started = self._clock()
        notes = WaitNotes(self._clock)
        attempt = 1
        while True:
            try:
                answer = attempt_once(attempt)
            except TrajectoryApiError as error:
                delay_s = self._retry.delay_s(
                    error,
                    attempt=attempt,
                    is_repeatable=True,
                    passed_s=self._clock() - started,
                )
                if delay_s is None:
                    raise
                if self._retry.attempts is None and (note := notes.due(error)):
                    limit_s = self._retry.deadline_s
                    logger.warning("%s; trying again for up to %g s in all", note, limit_s)
            else:
                if notes.end():
                    logger.info("the trajectory service has answered; going on")
                return answer
            self._sleep(delay_s)
            attempt += 1

    def _attempt(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        attempt: int = 1,
    ) -> httpx.Response:
        """Send once; return a successful response, raise on any other."""
        url = self.base_url + path
        try:
            reply = self._client.request(
                method,
                url,
                content=body.content if body else None,
                headers={**(headers or {}), **(body.headers if body else {})},
                timeout=httpx.Timeout(self._timeout_s, read=self._timeout_s + wait_s),
            )
        except httpx.HTTPError as error:
            sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise unreachable(method, url, error, attempt=attempt, sent=sent) from None
        if not reply.is_success:
            self._read(reply, method, path, attempt=attempt)
        return reply

    def _read(self, reply: httpx.Response, method: str, path: str, *, attempt: int = 1) -> Any:
        return read_answer(
            method,
            self.base_url + path,
            status=reply.status_code,
            headers=reply.headers,
            content=reply.content,
            attempt=attempt,
            secrets=self._auth_headers,
        )
