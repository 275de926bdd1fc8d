"""Clients of the trajectory service; the only code that knows its routes from outside.

`TrajectoryApiClient` is for environments (async), `TrainerClient` for trainers (sync). Neither
imports the service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import httpx
import msgspec

from atroposlib.api.client_rules import (
    Body,
    RetryRule,
    compressed,
    delivered_groups,
    plain,
    read_answer,
    unreachable,
    with_status_defaults,
)
from atroposlib.errors import TrajectoryApiError
from atroposlib.wire import encode_group, encode_groups

__all__ = ["TrainerClient", "TrajectoryApiClient"]

_GZIP_NOT_UNDERSTOOD = (400, 415, 422)


class TrajectoryApiClient:
    """Asynchronous client; one per event loop, safe for concurrent use.

    Every method waits for the service and raises `TrajectoryApiError` when it refuses or cannot be
    reached. Requests that may be repeated are, a few times; cancelling is safe, but a posted group
    may have arrived.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on one attempt.
        retry: when failed requests are repeated.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float = 60.0, retry: RetryRule | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._retry = retry or RetryRule()
        self._session: aiohttp.ClientSession | None = None
        self._sends_gzip = True

    async def __aenter__(self) -> TrajectoryApiClient:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the client may be used again and then opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def register_trainer(self, **registration: Any) -> int:
        """Register a trainer with the fields of `POST /register`; return its id."""
        answer = await self._call("POST", "/register", registration, is_repeatable=True)
        return int(answer["uuid"])

    async def register_env(
        self,
        *,
        max_token_length: int,
        desired_name: str,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None = None,
    ) -> dict[str, Any]:
        """Register an environment; `status` of the answer is `success` or asks to wait."""
        request = {
            "max_token_length": max_token_length,
            "desired_name": desired_name,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": min_batch_allocation,
        }
        return dict(await self._call("POST", "/register-env", request))

    async def disconnect_env(self, env_id: int) -> None:
        """Sign an environment off; raises when the service does not know it."""
        answer = await self._call("POST", "/disconnect-env", {"env_id": env_id}, is_repeatable=True)
        if answer.get("status") != "success":
            raise TrajectoryApiError(
                f"POST {self.base_url}/disconnect-env: {answer.get('error')}", status=200
            )

    async def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`, -1 before a trainer registered."""
        return dict(await self._get("/info"))

    async def wandb_info(self) -> dict[str, Any]:
        """Return `group` and `project`, None before a trainer registered."""
        return dict(await self._get("/wandb_info"))

    async def status(self) -> dict[str, Any]:
        """Return `current_step` and `queue_size` (groups)."""
        return dict(await self._get("/status"))

    async def status_env(self, env_id: int) -> dict[str, Any]:
        """Return the queue as one environment sees it; status 404 asks it to register again."""
        answer = await self._call("GET", "/status-env", {"env_id": env_id}, is_repeatable=True)
        return with_status_defaults(answer)

    async def batch(self) -> list[dict[str, Any]] | None:
        """Take the next batch, None when none is ready; raises when no trainer is registered."""
        return delivered_groups(await self._get("/batch"), self.base_url)

    async def latest_example(self) -> dict[str, Any]:
        """Return the group queued last."""
        return dict(await self._get("/latest_example"))

    async def post_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Post one group; a malformed one raises `GroupError` before anything is sent."""
        return await self._post_encoded("/scored_data", encode_group, group)

    async def post_groups(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Post groups together: stored all or none; raises like `post_group`."""
        return await self._post_encoded("/scored_data_list", encode_groups, groups)

    async def _post_encoded(
        self, path: str, encode: Callable[[Any], bytes], value: Any
    ) -> dict[str, Any]:
        # In a thread: a long group must not hold up the rollouts that share this event loop.
        content = await asyncio.to_thread(encode, value)
        if self._sends_gzip:
            body = await asyncio.to_thread(compressed, content)
            try:
                return dict(await self._send("POST", path, body))
            except TrajectoryApiError as error:
                if not body.is_compressed or error.status not in _GZIP_NOT_UNDERSTOOD:
                    raise
        answer = dict(await self._send("POST", path, plain(content)))
        if self._sends_gzip and body.is_compressed:
            # The same content was refused compressed and taken plain: an older service.
            self._sends_gzip = False
        return answer

    async def _get(self, path: str) -> Any:
        return await self._send("GET", path, None, is_repeatable=True)

    async def _call(
        self, method: str, path: str, request: Mapping[str, Any], *, is_repeatable: bool = False
    ) -> Any:
        body = plain(msgspec.json.encode(request))
        return await self._send(method, path, body, is_repeatable=is_repeatable)

    async def _send(
        self, method: str, path: str, body: Body | None, *, is_repeatable: bool = False
    ) -> Any:
        attempt = 1
        while True:
            try:
                return await self._attempt(method, path, body, attempt)
            except TrajectoryApiError as error:
                delay_s = self._retry.delay_s(error, attempt=attempt, is_repeatable=is_repeatable)
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)
            attempt += 1

    async def _attempt(self, method: str, path: str, body: Body | None, attempt: int) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        url = self.base_url + path
        data = body.content if body else None
        headers = body.headers if body else None
        try:
            async with self._session.request(method, url, data=data, headers=headers) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise unreachable(method, url, error, attempt=attempt, sent=sent) from error
        return read_answer(
            method,
            url,
            status=reply.status,
            headers=reply.headers,
            content=content,
            attempt=attempt,
        )


class TrainerClient:
    """Synchronous client for trainers; raises and repeats like `TrajectoryApiClient`.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on connecting, and on every pause while a batch arrives.
        retry: when failed requests are repeated.
        sleep: waits; replaced in tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._client = httpx.Client(timeout=timeout_s)
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
            TrajectoryApiError: it did not answer in time; the message has the last reason.
        """
        started = time.monotonic()
        while True:
            try:
                self._attempt("GET", "/info", None, 1)
                return
            except TrajectoryApiError as error:
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
        body = plain(msgspec.json.encode(registration))
        return int(self._send("POST", "/register", body)["uuid"])

    def batch(self) -> list[dict[str, Any]] | None:
        """Take the next batch, None when none is ready; raises when no trainer is registered."""
        return delivered_groups(self._send("GET", "/batch"), self.base_url)

    def status(self) -> dict[str, Any]:
        """Return `current_step` and `queue_size` (groups)."""
        return dict(self._send("GET", "/status"))

    def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`, -1 before a trainer registered."""
        return dict(self._send("GET", "/info"))

    def _send(self, method: str, path: str, body: Body | None = None) -> Any:
        attempt = 1
        while True:
            try:
                return self._attempt(method, path, body, attempt)
            except TrajectoryApiError as error:
                # Everything a trainer sends may be repeated: a lost batch is delivered again.
                delay_s = self._retry.delay_s(error, attempt=attempt, is_repeatable=True)
                if delay_s is None:
                    raise
            self._sleep(delay_s)
            attempt += 1

    def _attempt(self, method: str, path: str, body: Body | None, attempt: int) -> Any:
        url = self.base_url + path
        content = body.content if body else None
        headers = body.headers if body else None
        try:
            reply = self._client.request(method, url, content=content, headers=headers)
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
        )
