"""The synchronous client for those who only look: groups, environments and figures of a run.

No method here takes, changes or resets anything; a run does not notice that it is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from atroposlib.api.client_bodies import answer_lane
from atroposlib.api.client_rules import RetryRule, auth_headers, read_answer, unreachable
from atroposlib.errors import TrajectoryApiError
from atroposlib.wire import MEDIA_TYPES, Lane

__all__ = ["GROUP_STATES", "GroupPayload", "InspectionClient"]

GROUP_STATES = ("past", "in_flight", "queued", "buffered")
"""Where groups are, those that leave the service first before the others."""

_PAGE = 1000
_GONE = (404, 410)
_NUM_CONNECTIONS = 4
_PAYLOAD_HEADERS = {
    "Accept": f"{MEDIA_TYPES['msgpack']};zstd=1, {MEDIA_TYPES['json']};q=0.5",
}


class GroupPayload(NamedTuple):
    """One group as it was posted."""

    group_id: int
    lane: Lane
    content: bytes


class InspectionClient:
    """Looks into a trajectory service; methods raise `TrajectoryApiError` when it is away.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on connecting, and on every pause while an answer arrives.
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
        self._auth_headers = auth_headers(token)
        self._client = httpx.Client(timeout=timeout_s, headers=self._auth_headers)
        self._retry = retry or RetryRule()
        self._sleep = sleep

    def __enter__(self) -> InspectionClient:
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

    def status(self) -> dict[str, Any]:
        """Return `current_step`, `queue_size` (groups), and what else the service tells."""
        return dict(self._get("/status"))

    def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`, -1 before a trainer registered."""
        return dict(self._get("/info"))

    def envs(self) -> list[dict[str, Any]]:
        """Return the environments in order of registration."""
        return list(self._get("/envs?limit=1000")["envs"])

    def groups(self, state: str, *, offset: int = 0, limit: int = _PAGE) -> dict[str, Any]:
        """Return one page of `GET /groups`: `groups`, `total` and `next_offset`."""
        return dict(self._get(f"/groups?state={state}&offset={offset}&limit={limit}"))

    def new_group_ids(self, state: str, seen: set[int] | frozenset[int]) -> list[int]:
        """Return ids of groups in a state that are not in `seen`, in order of arrival.

        Pages are read from the end that is newest and only until one holds nothing new, so that a
        long queue is not walked again and again.
        """
        total = int(self.groups(state, limit=1)["total"] or 0)
        is_newest_last = state == "queued"
        starts = list(range(0, total, _PAGE))
        found: set[int] = set()
        for start in reversed(starts) if is_newest_last else starts:
            page = [int(entry["id"]) for entry in self.groups(state, offset=start)["groups"]]
            new = [group_id for group_id in page if group_id not in seen]
            found.update(new)
            if page and not new and is_newest_last:
                break
        return sorted(found)

    def payload(self, group_id: int) -> GroupPayload | None:
        """Return one group, None when the service does not have it any more."""
        path = f"/groups/{group_id}/payload"
        try:
            reply = self._send(path)
        except TrajectoryApiError as error:
            if error.status in _GONE:
                return None
            raise
        return GroupPayload(group_id, answer_lane(reply.headers), reply.content)

    def payloads(self, group_ids: Sequence[int]) -> Iterator[GroupPayload | None]:
        """Yield groups in the order asked for, a few requests at a time."""
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            yield from pool.map(self.payload, group_ids)

    def _get(self, path: str) -> Any:
        reply = self._send(path)
        return read_answer(
            "GET",
            self.base_url + path,
            status=reply.status_code,
            headers=reply.headers,
            content=reply.content,
        )

    def _send(self, path: str) -> httpx.Response:
        """Wait for a good answer; GET requests may always be repeated."""
        started = time.monotonic()
        attempt = 1
        while True:
            try:
                return self._attempt(path, attempt)
            except TrajectoryApiError as error:
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

    def _attempt(self, path: str, attempt: int) -> httpx.Response:
        url = self.base_url + path
        headers = _PAYLOAD_HEADERS if path.endswith("/payload") else {}
        try:
            reply = self._client.get(url, headers=headers)
        except httpx.HTTPError as error:
            sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise unreachable("GET", url, error, attempt=attempt, sent=sent) from error
        if reply.status_code != 200:
            read_answer(
                "GET",
                url,
                status=reply.status_code,
                headers=reply.headers,
                content=reply.content,
                attempt=attempt,
                secrets=self._auth_headers,
            )
        return reply
