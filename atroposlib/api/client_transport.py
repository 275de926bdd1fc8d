"""One HTTP connection pool to the trajectory service: attempts, repetitions, their log lines."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from atroposlib.api.client_bodies import Body, ServiceTraits
from atroposlib.api.client_rules import RetryRule, auth_headers, read_answer, unreachable
from atroposlib.api.client_wait_notes import WaitNotes
from atroposlib.errors import TrajectoryApiError

__all__ = ["AsyncTransport"]

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2**18
_MAX_INLINE_BYTES = 2**16
_OUTAGE_STATUSES = (None, 502, 504)


class AsyncTransport:
    """Sends requests until there is an answer, or none is to be expected.

    Args:
        base_url: address of the service, without a slash at the end.
        timeout_s: limit on one attempt.
        retry: when failed requests are repeated.
        post_retry: the same for posted groups.
        token: shown to the service; no error or log line holds it.

    Attributes:
        traits: what the answers told of the service.
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
        """Send until there is an answer; return it decoded.

        Args:
            method: of the request.
            path: of the request, from the first slash.
            body: of the request.
            headers: of the request, besides those of the body.
            is_repeatable: whether doing it twice is the same as doing it once.
            is_post: whether it brings groups, which have a rule of their own.

        Raises:
            TrajectoryApiError: it was refused, or not answered within what the rule allows.
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
    """Cut a long body up: other tasks run between the pieces."""
    view = memoryview(content)
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]
