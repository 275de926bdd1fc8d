"""The synchronous client of the trajectory service, for trainers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, overload

import httpx

from atroposlib.api.client_bodies import BATCH_HEADERS, Body, plain
from atroposlib.api.client_rules import (
    LeasedBatch,
    RetryRule,
    auth_headers,
    batch_path,
    delivered_groups,
    leased_batch,
    read_answer,
    unreachable,
)
from atroposlib.errors import TrajectoryApiError

__all__ = ["TrainerClient"]

_ROUTE_MISSING = (404, 405)


class TrainerClient:
    """Synchronous client for trainers; raises and repeats like `TrajectoryApiClient`.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on connecting, and on every pause while a batch arrives.
        retry: when failed requests are repeated.
        token: shown to a service that asks for one; never logged.
        sleep: waits; replaced in tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
        token: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._auth_headers = auth_headers(token)
        self._client = httpx.Client(timeout=timeout_s, headers=self._auth_headers)
        self._retry = retry or RetryRule()
        self._sleep = sleep

    def __enter__(self) -> TrainerClient:
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

    def wait_until_up(
        self,
        timeout_s: float,
        on_wait: Callable[[float], None] | None = None,
        *,
        poll_s: float = 0.5,
    ) -> None:
        """Wait until the service answers.

        Args:
            timeout_s: how long to wait in total.
            on_wait: called with the seconds waited so far before every further attempt.
            poll_s: pause between attempts.

        Raises:
            TrajectoryApiError: it did not answer in time, or refuses the token; the message has
                the last reason.
        """
        started = time.monotonic()
        while True:
            try:
                self._attempt("GET", "/info")
                return
            except TrajectoryApiError as error:
                if error.status in (401, 403):
                    raise
                waited_s = time.monotonic() - started
                if waited_s >= timeout_s:
                    raise TrajectoryApiError(
                        f"no trajectory service after {waited_s:.0f} s: {error}",
                        status=error.status,
                    ) from error
            if on_wait is not None:
                on_wait(waited_s)
            self._sleep(min(poll_s, max(0.0, timeout_s - waited_s)))

    def register(self, **registration: Any) -> int:
        """Register with the fields of `POST /register`; return the trainer's id."""
        return int(self._send("POST", "/register", plain(registration))["uuid"])

    @overload
    def batch(
        self, *, lease_s: None = None, wait_s: float | None = None
    ) -> list[dict[str, Any]] | None: ...

    @overload
    def batch(self, *, lease_s: float, wait_s: float | None = None) -> LeasedBatch | None: ...

    def batch(
        self, *, lease_s: float | None = None, wait_s: float | None = None
    ) -> list[dict[str, Any]] | LeasedBatch | None:
        """Take the next batch, None when none is ready.

        Args:
            lease_s: seconds within which the batch is acknowledged, or else it is delivered again;
                None takes it for good.
            wait_s: seconds the service may wait for a batch. Services without this answer at once.

        Returns:
            The groups; with a lease, groups and the id to acknowledge.

        Raises:
            TrajectoryApiError: no trainer is registered, or the service is away.
        """
        path = batch_path(lease_s=lease_s, wait_s=wait_s)
        answer = self._send("GET", path, headers=BATCH_HEADERS, wait_s=wait_s or 0.0)
        if lease_s is None:
            return delivered_groups(answer, self.base_url)
        return leased_batch(answer, self.base_url)

    def ack(self, batch_id: str | None) -> None:
        """Acknowledge a leased batch: it will not be delivered again; may be repeated.

        Args:
            batch_id: of the lease; None, from a service without leases, needs no acknowledgement.

        Raises:
            TrajectoryApiError: the lease has run out: others may have got the batch.
        """
        if batch_id is not None:
            self._send("POST", f"/batch/{batch_id}/ack")

    def nack(self, batch_id: str | None) -> None:
        """Give a leased batch back: it is delivered next; arguments and errors as for `ack`."""
        if batch_id is not None:
            self._send("POST", f"/batch/{batch_id}/nack")

    def set_policy_version(self, version: int) -> bool:
        """Report which weights the engine serves now.

        Args:
            version: grows with every update, e.g. optimiser steps done.

        Returns:
            False when the service is an older one that does not ask for it.
        """
        try:
            self._send("POST", "/policy", plain({"version": version}))
        except TrajectoryApiError as error:
            if error.status in _ROUTE_MISSING:
                return False
            raise
        return True

    def status(self) -> dict[str, Any]:
        """Return `current_step` and `queue_size` (groups)."""
        return dict(self._send("GET", "/status"))

    def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`, -1 before a trainer registered."""
        return dict(self._send("GET", "/info"))

    def _send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Any:
        started = time.monotonic()
        attempt = 1
        while True:
            try:
                return self._attempt(
                    method, path, body, headers=headers, wait_s=wait_s, attempt=attempt
                )
            except TrajectoryApiError as error:
                # Everything a trainer sends may be repeated: a lost batch is delivered again.
                delay_s = self._retry.delay_s(
                    error,
                    attempt=attempt,
                    is_repeatable=True,
                    passed_s=time.monotonic() - started,
                )
                if delay_s is None:
                    raise
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
    ) -> Any:
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
            raise unreachable(method, url, error, attempt=attempt, sent=sent) from error
        return read_answer(
            method,
            url,
            status=reply.status_code,
            headers=reply.headers,
            content=reply.content,
            attempt=attempt,
            secrets=self._auth_headers,
        )
