"""Groups of a live service, by its inspection routes: nothing is taken or reset.

    /metrics, /status          every two seconds
    /groups?state=...          what came since the last look
    /groups/ID/payload         the latest groups one by one, gently, and any that is opened

What was read stays readable after the service let go of it, in a file without a name.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from atroposlib.api.client_consumer import GROUP_STATES, Consumer, InspectionClient
from atroposlib.api.client_protocol import RetryRule
from atroposlib.errors import GroupError, TrajectoryApiError
from atroposlib.utils.text import without_secrets
from atroposlib.viewer.group_index import GroupIndex
from atroposlib.viewer.sources.base import GroupGoneError, Problems, ServiceFigures
from atroposlib.viewer.sources.payloads import decode_payload
from atroposlib.viewer.sources.service_page import FigureLog
from atroposlib.viewer.summaries import GroupSummary, searchable_text, summarise

__all__ = ["LiveSource"]

_POLL_S = 2.0
_READ_AHEAD_GROUPS = 2000
"""Of a long queue only the latest groups are read in full; others when they are opened."""
_SPOOL_BYTES = 2**30
_TIMEOUT_S = 10.0
_NOT_ALLOWED = (401, 403)


class LiveSource:
    """A running service.

    Args:
        base_url: its address.
        token: shown to a service that asks for one; never logged. Payloads need one of an admin.
        consumer: stands in for a trainer while there is none, so that environments start; closed
            with the source.
    """

    def __init__(
        self, base_url: str, *, token: str | None = None, consumer: Consumer | None = None
    ) -> None:
        # Asked again every two seconds anyway, and a person waits for what is opened.
        self._client = InspectionClient(
            base_url, timeout_s=_TIMEOUT_S, retry=RetryRule(attempts=1), token=token
        )
        self.base_url = self._client.base_url
        self._consumer = consumer
        self.title = f"service {without_secrets(self.base_url)}"
        self.problems = Problems()
        self._log = FigureLog()
        self._position_of: dict[int, int] = {}
        self._listed: list[dict[str, Any]] = []
        self._unread: deque[int] = deque(maxlen=_READ_AHEAD_GROUPS)
        self._polled_at = float("-inf")
        self._problem: str | None = None
        self._may_read = True
        self._spool = _Spool()

    def advance(self, index: GroupIndex, budget_s: float) -> bool:
        """Ask what is new every two seconds; in between read the latest groups in full."""
        deadline = time.monotonic() + budget_s
        if time.monotonic() - self._polled_at >= _POLL_S:
            self._poll(index)
            self._polled_at = time.monotonic()
        while self._unread and self._may_read and time.monotonic() < deadline:
            self._read(self._unread.pop(), index)
        return bool(self._unread) and self._may_read

    def load(self, position: int) -> Mapping[str, Any]:
        """Return a group as it was read before, or ask the service for it."""
        group_id = int(self._listed[position]["id"])
        content = self._spool.get(group_id)
        try:
            if content is None:
                content = self._fetch(group_id)
                self._spool.put(group_id, content)
            return decode_payload(content)
        except TrajectoryApiError as error:
            raise GroupGoneError(_refusal(error, group_id)) from error
        except GroupError as error:
            raise GroupGoneError(f"group {group_id} could not be read: {error}") from error

    def figures(self) -> ServiceFigures:
        """Return what the service told last."""
        return self._log.figures(self._problem)

    def close(self) -> None:
        """Leave the place of the trainer, if this has it, and close the connections."""
        if self._consumer is not None:
            self._consumer.close()
        self._client.close()

    def _poll(self, index: GroupIndex) -> None:
        try:
            metrics = self._client.metrics()
            if metrics is not None:  # older services have none
                self._log.note_metrics(metrics)
            self._log.note_status(self._client.status())
            for state in GROUP_STATES:
                self._list(state, index)
            if self._consumer is not None:
                self._consumer.attend()
            if self._may_read:
                self._problem = None
        except TrajectoryApiError as error:
            self._problem = self._listing_refusal(error)
        except ValueError as error:  # metrics that are none
            self._problem = f"{without_secrets(self.base_url)}/metrics cannot be read: {error}"

    def _list(self, state: str, index: GroupIndex) -> None:
        """Add the groups in one state that were not seen before, oldest first."""
        for row in self._client.new_groups(state, self._position_of):
            self._position_of[row["id"]] = index.add(_summary_of(row))
            self._listed.append(row)
            self._unread.append(len(self._listed) - 1)

    def _listing_refusal(self, error: TrajectoryApiError) -> str:
        if error.status is None:
            url = without_secrets(self.base_url)
            return f"{url} does not answer ({error}); what was read stays here"
        if error.status in _NOT_ALLOWED:
            return (
                "this service asks for a token; put one of a trainer (lists) or an admin (lists "
                "and groups) in ATROPOS_API_TOKEN and start again"
            )
        if error.status == 404:
            return "this service has no routes to look at groups: it is an older one"
        return str(error)

    def _fetch(self, group_id: int) -> bytes:
        payload = self._client.payload(group_id)
        if payload is None:
            raise GroupGoneError(f"group {group_id} left the service before it was read here")
        return payload.content

    def _read(self, position: int, index: GroupIndex) -> None:
        """Read one group in full; what the listing did not say is added to the index."""
        row = self._listed[position]
        try:
            fields = self.load(position)
        except GroupGoneError as error:
            cause = error.__cause__
            if isinstance(cause, TrajectoryApiError) and cause.status in _NOT_ALLOWED:
                self._may_read = False
                self._problem = str(error)
            return
        text = searchable_text(fields)
        if text:
            index.texts.add(position, text)
        listed = _summary_of(row)
        index.replace(
            position,
            summarise(fields, label=listed.label, environment=listed.environment, step=listed.step),
        )


class _Spool:
    """Payloads by id in a file that goes with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the source
        self._places: dict[int, tuple[int, int]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def get(self, group_id: int) -> bytes | None:
        with self._lock:
            place = self._places.get(group_id)
            if place is None:
                return None
            self._file.seek(place[0])
            return self._file.read(place[1])

    def put(self, group_id: int, content: bytes) -> None:
        with self._lock:
            if group_id in self._places or self._size + len(content) > _SPOOL_BYTES:
                return
            self._file.seek(self._size)
            self._file.write(content)
            self._places[group_id] = (self._size, len(content))
            self._size += len(content)


def _summary_of(row: Mapping[str, Any]) -> GroupSummary:
    """Describe a group that was listed and not read: two of its scores are known."""
    name = row.get("env_name")
    count = int(row.get("num_sequences") or 0)
    return GroupSummary(
        label=f"group {row['id']}",
        environment=str(name) if name is not None else f"env {row.get('env_id')}",
        step=row.get("policy_version"),
        num_rollouts=count,
        longest=int(row.get("num_tokens") or 0) // max(1, count),
        num_tokens=int(row.get("num_tokens") or 0),
        scores=(float(row.get("min_score") or 0.0), float(row.get("max_score") or 0.0)),
        excerpt="",
    )


def _refusal(error: TrajectoryApiError, group_id: int) -> str:
    if error.status in _NOT_ALLOWED:
        return (
            "this service shows groups to admins only; put an admin token in ATROPOS_API_TOKEN "
            "and start again"
        )
    return f"group {group_id} could not be read: {error}"
