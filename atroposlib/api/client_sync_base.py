"""What the synchronous clients share: one connection pool, attempts, repetitions, errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import httpx
from typing_extensions import Self

from atroposlib.api.client_address import service_address
from atroposlib.api.client_bodies import Body
from atroposlib.api.client_rules import RetryRule, auth_headers, read_answer, unreachable
from atroposlib.api.client_wait_notes import WaitNotes
from atroposlib.errors import TrajectoryApiError
from atroposlib.utils.secret_masking import hide_secrets_of_requests

__all__ = ["SyncClient"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class SyncClient:
    """A connection to the trajectory service; threads may share it.

    Its methods wait for the service and raise `TrajectoryApiError` when it refuses or cannot be
    reached.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on connecting, and on every pause while an answer arrives.
        retry: when failed requests are repeated.
        token: shown to a service that asks for one; never logged.
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
        """Repeat failed requests by another rule from here on."""
        self._retry = rule

    def status(self) -> dict[str, Any]:
        """Return `current_step`, `queue_size` (groups), and what else the service tells."""
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
        """Send until there is an answer; return it decoded.

        Args:
            method: of the request.
            path: of the request, from the first slash.
            body: of the request.
            headers: of the request, besides those of the body.
            wait_s: seconds the service was asked to wait itself, on top of the limit.
        """

        def attempt_once(attempt: int) -> Any:
            reply = self._attempt(
                method, path, body, headers=headers, wait_s=wait_s, attempt=attempt
            )
            return self._read(reply, method, path, attempt=attempt)

        return self._repeat(attempt_once)

    def _fetch(self, path: str, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Send a GET until there is a good answer; return it as it came."""
        return self._repeat(
            lambda attempt: self._attempt("GET", path, headers=headers, attempt=attempt)
        )

    def _repeat(self, attempt_once: Callable[[int], _T]) -> _T:
        """Call with 1, 2, ... until it succeeds or the rule gives up.

        Everything the synchronous clients send may be repeated: looking changes nothing, and a
        batch that was lost on its way is delivered again. Waits of a rule without a number of
        attempts are told in the log.
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
        """Send once; return a good answer, raise on any other."""
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
