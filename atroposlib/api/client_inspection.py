"""The synchronous client for those who only look: groups, environments and figures of a run.

No method here takes, changes or resets anything; a run does not notice that it is looked at.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from atroposlib.api.client_bodies import BINARY_LANE_HEADERS, answer_lane
from atroposlib.api.client_sync_base import SyncClient
from atroposlib.errors import TrajectoryApiError
from atroposlib.wire import Lane

__all__ = ["GROUP_STATES", "GroupPayload", "InspectionClient"]

GROUP_STATES = ("past", "in_flight", "queued", "buffered")
"""Where groups are, those that leave the service first before the others."""

_PAGE_GROUPS = 1000
_ROUTE_MISSING = (404, 405)
_GONE = (404, 410)
_NUM_CONNECTIONS = 4


class GroupPayload(NamedTuple):
    """One group, encoded."""

    group_id: int
    lane: Lane
    """What `content` is encoded in, JSON or MessagePack."""
    content: bytes


class InspectionClient(SyncClient):
    """Looks into a trajectory service; methods raise `TrajectoryApiError` when it is away."""

    def metrics(self) -> str | None:
        """Return the figures in Prometheus' text format, None from a service without them."""
        try:
            return self._fetch("/metrics").text
        except TrajectoryApiError as error:
            if error.status in _ROUTE_MISSING:
                return None
            raise

    def envs(self) -> list[dict[str, Any]]:
        """Return the environments in order of registration."""
        return list(self._ask("GET", "/envs?limit=1000")["envs"])

    def groups(self, state: str, *, offset: int = 0, limit: int = _PAGE_GROUPS) -> dict[str, Any]:
        """Return one page of `GET /groups`: `groups`, `total` and `next_offset`.

        Args:
            state: one of `GROUP_STATES`.
            offset: position of the first group.
            limit: the most groups to list, 1 to 1000.
        """
        return dict(self._ask("GET", f"/groups?state={state}&offset={offset}&limit={limit}"))

    def new_groups(self, state: str, seen: Container[int]) -> list[dict[str, Any]]:
        """Return the entries of groups in a state whose ids are not in `seen`, by id.

        Pages are read from the end that is newest and only until one holds nothing new, so that a
        long queue is not walked again and again.
        """
        total = int(self.groups(state, limit=1)["total"] or 0)
        is_newest_last = state == "queued"
        starts = list(range(0, total, _PAGE_GROUPS))
        found: dict[int, dict[str, Any]] = {}
        for start in reversed(starts) if is_newest_last else starts:
            page = self.groups(state, offset=start)["groups"]
            new = {int(entry["id"]): entry for entry in page if int(entry["id"]) not in seen}
            found.update(new)
            if page and not new and is_newest_last:
                break
        return [found[group_id] for group_id in sorted(found)]

    def payload(self, group_id: int) -> GroupPayload | None:
        """Return one group, None when the service does not have it any more."""
        try:
            reply = self._fetch(f"/groups/{group_id}/payload", headers=BINARY_LANE_HEADERS)
        except TrajectoryApiError as error:
            if error.status in _GONE:
                return None
            raise
        return GroupPayload(group_id, answer_lane(reply.headers), reply.content)

    def payloads(self, group_ids: Sequence[int]) -> Iterator[GroupPayload | None]:
        """Yield groups in the order asked for, a few requests at a time."""
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            yield from pool.map(self.payload, group_ids)
