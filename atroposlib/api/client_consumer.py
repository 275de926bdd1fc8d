"""Clients of inspection tools: `InspectionClient` reads a run, `Consumer` stands in for a trainer.

Without a registered trainer, environments do not start. A tool that only reads groups through the
inspection routes therefore registers as consumer until a trainer registers:

    no trainer ──► register as consumer ──► take groups after reading ──► a trainer registers:
                           ▲                                              only read
                           └── another consumer has ended ◄── only read ◄┘
    close ──► unregister

A batch is leased, its groups are read with all others, and only then is it acknowledged, so that no
group leaves the service unread. `InspectionClient` does not change the run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from atroposlib.api.client_transport import (
    BINARY_FORMAT_HEADERS,
    SyncClient,
    assigned_id,
    batch_path,
    format_of_response,
    leased_batch,
    plain,
    says_unregistered,
)
from atroposlib.errors import TrajectoryApiError
from atroposlib.wire import WireFormat

PATIENCE_S = 30.0
"""Seconds without a request after which another consumer may be replaced, as in the service."""
_LEASE_S = 120.0
_NUM_STEPS = 1_000_000
_GROUPS_PER_BATCH = 64
_NOT_ALLOWED = (401, 403)
_HOST_CHARACTERS = 40
_MOVED_ON = (404, 409)


def consumer_registration(name: str, *, group_size: int, max_token_len: int) -> dict[str, Any]:
    """Return the request body with which a tool registers as consumer.

    Args:
        name: name of the tool; shown in logs with its process and machine.
        group_size: trajectories per group; a batch holds up to 64 such groups.
        max_token_len: maximum length of the trajectories that environments send, in tokens; 0: no
            limit.
    """
    return {
        "wandb_group": "test",
        "wandb_project": "test",
        "batch_size": group_size * _GROUPS_PER_BATCH,
        "max_token_len": max_token_len,
        "checkpoint_dir": "",
        "save_checkpoint_interval": -1,
        "starting_step": 0,
        "num_steps": _NUM_STEPS,
        "consumer": _full_name(name),
    }


def _full_name(tool: str) -> str:
    """Return a name in printable characters that is unique among concurrent tools."""
    host = "".join(filter(str.isprintable, socket.gethostname()))[:_HOST_CHARACTERS]
    return f"{tool} (process {os.getpid()} on {host})"


class Consumer(SyncClient):
    """A registration in place of a trainer, held while no trainer is registered.

    Args:
        base_url: address of the service.
        settings: return value of `consumer_registration`.
        report: called with a line of text when the registered client changes.
        takes: Whether batches are taken, so that environments continue; otherwise they pause once
            the queue is full.
        **options: arguments of `SyncClient`.
    """

    def __init__(
        self,
        base_url: str,
        settings: Mapping[str, Any],
        report: Callable[[str], None],
        *,
        takes: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(base_url, **options)
        self._settings = settings
        self._report = report
        self._takes = takes
        self._uuid: int | None = None
        self._was_registered = False
        self._can_hand_over = True
        """Whether the service replaces a consumer when a trainer registers."""
        self._may_register = True
        self._other: str | None = None
        """Name of the last reported other consumer."""
        self._leased: str | None = None

    @property
    def is_registered(self) -> bool:
        """Whether this tool is registered in place of a trainer, by the last response."""
        return self._uuid is not None

    def attend(self) -> bool:
        """Check which client is registered, register if none is, and lease a batch.

        Call it every second or two.

        Returns:
            Whether a batch was leased; `settle` acknowledges it.

        Raises:
            TrajectoryApiError: the service is unreachable.
        """
        consumer = self.status().get("consumer")
        if consumer is None and int(self.info()["batch_size"]) < 0:
            self.register()
        elif consumer is None and self._can_hand_over:
            self._note_trainer()
        elif consumer is not None and self._uuid is None:
            self._note_other(str(consumer["name"]), consumer.get("idle_s"))
        return self._uuid is not None and self._takes and self._lease()

    def settle(self) -> None:
        """Acknowledge the leased batch, after its groups were read."""
        self._finish("ack")

    def release(self) -> None:
        """Return the leased batch; if the service does not respond, its lease expires."""
        try:
            self._finish("nack")
        except TrajectoryApiError:
            self._leased = None

    def close(self) -> None:
        """Unregister, and close the connections."""
        uuid, self._uuid = self._uuid, None
        if uuid is not None and self._can_hand_over:
            # An unreachable service replaces a silent consumer after a while.
            with suppress(TrajectoryApiError):
                self._ask("DELETE", f"/register?consumer={uuid}")
        super().close()

    def register(self) -> None:
        """Register as consumer, if the service allows it."""
        if not self._may_register:
            return
        full_name = self._settings["consumer"]
        name = full_name.partition(" (")[0]
        try:
            answer = self._ask("POST", "/register", plain(dict(self._settings)))
        except TrajectoryApiError as error:
            if error.status == 409:  # another client was faster; the next check finds out which
                return
            if error.status not in _NOT_ALLOWED:
                raise
            self._may_register = False
            self._report(
                f"no trainer is registered, so environments do not start, and {name} may not "
                "stand in for one: set ATROPOS_API_TOKEN to a trainer's or admin's token"
            )
            return
        self._uuid, self._other = assigned_id(answer, self.base_url), None
        self._was_registered = True
        self._can_hand_over = answer.get("consumer") == full_name
        if not self._can_hand_over:
            self._report(
                f"no trainer is registered: {name} registers as one, so that environments start. "
                "This service is an older one that cannot hand over: reset it, by GET "
                "/reset_data, before a trainer starts"
            )
            if not self._takes and self._lease():  # it starts with the first request
                self.release()
        elif self._takes:
            self._report(
                f"no trainer is registered: {name} stands in and takes the groups, so that "
                "environments go on; a trainer that registers takes over"
            )
        else:
            self._report(
                f"no trainer is registered: {name} stands in, so that environments start; groups "
                "stay in the queue for a trainer, and environments pause once it is full"
            )

    def _note_trainer(self) -> None:
        if self._was_registered:
            self._report(
                "a trainer has registered and takes the groups from here on; this command goes on "
                "by looking at them"
            )
        self._was_registered = False
        self._uuid = self._leased = self._other = None

    def _note_other(self, name: str, idle_s: float | None) -> None:
        """Replace a consumer that takes nothing; report one that takes groups."""
        if not self._takes:
            return
        if idle_s is None or idle_s > PATIENCE_S:
            self.register()
        elif self._other != name:
            self._other = name
            self._report(
                f"{name} already takes the groups of this run, so that environments go on; this "
                "command looks at the same groups and takes none"
            )

    def _lease(self) -> bool:
        path = batch_path(lease_s=_LEASE_S, wait_s=None, consumer=self._uuid)
        try:
            answer = self._ask("GET", path, headers=BINARY_FORMAT_HEADERS)
            batch = leased_batch(answer, self.base_url)
        except TrajectoryApiError as error:
            if error.status != 409 and not says_unregistered(error):
                raise
            self._uuid = None  # the next check finds out which client is registered now
            return False
        if batch is None:
            return False
        self._leased = batch.batch_id
        return True

    def _finish(self, verb: str) -> None:
        leased, self._leased = self._leased, None
        if leased is None:
            return
        try:
            self._ask("POST", f"/batch/{leased}/{verb}")
        except TrajectoryApiError as error:
            if error.status not in _MOVED_ON:  # a trainer has registered meanwhile
                raise


GROUP_STATES = ("past", "in_flight", "queued", "buffered")
"""States of groups, in the order in which groups leave the service."""

_PAGE_ENTRIES = 1000
_ROUTE_MISSING = (404, 405)
_GONE = (404, 410)
_NUM_CONNECTIONS = 4


class GroupKey(NamedTuple):
    """The identity of a group; a service that restarts without a stored run repeats its ids."""

    group_id: int
    received_at: float | None


def group_key(entry: Mapping[str, Any]) -> GroupKey:
    """Return the identity of a listed group."""
    return GroupKey(int(entry["id"]), entry.get("received_at"))


class GroupPayload(NamedTuple):
    """One group, encoded."""

    group_id: int
    wire_format: WireFormat
    """Format of `content`."""
    content: bytes


class InspectionClient(SyncClient):
    """Reads the state of a trajectory service; methods raise `TrajectoryApiError`."""

    def metrics(self) -> str | None:
        """Return the metrics in Prometheus text format; None from a service without them."""
        try:
            return self._fetch("/metrics").text
        except TrajectoryApiError as error:
            if error.status in _ROUTE_MISSING:
                return None
            raise

    def envs(self) -> list[dict[str, Any]]:
        """Return the environments in order of registration."""
        envs: list[dict[str, Any]] = []
        while True:
            page = self._ask("GET", f"/envs?limit={_PAGE_ENTRIES}&offset={len(envs)}")
            envs += page["envs"]
            if page.get("next_offset") is None:
                return envs

    def groups(self, state: str, *, offset: int = 0, limit: int = _PAGE_ENTRIES) -> dict[str, Any]:
        """Return one page of `GET /groups`: `groups`, `total` and `next_offset`.

        `state` is one of `GROUP_STATES`; a page lists 1 to 1000 groups.
        """
        return dict(self._ask("GET", f"/groups?state={state}&offset={offset}&limit={limit}"))

    def new_groups(self, state: str, seen: Container[GroupKey]) -> list[dict[str, Any]]:
        """Return the entries of groups in a state whose keys are not in `seen`, by id.

        Reads pages from the newest end, until a page holds nothing new, so that a long queue is not
        read repeatedly.
        """
        total = int(self.groups(state, limit=1)["total"] or 0)
        is_newest_last = state == "queued"
        starts = list(range(0, total, _PAGE_ENTRIES))
        found: dict[int, dict[str, Any]] = {}
        for start in reversed(starts) if is_newest_last else starts:
            page = self.groups(state, offset=start)["groups"]
            new = {int(entry["id"]): entry for entry in page if group_key(entry) not in seen}
            found.update(new)
            if page and not new and is_newest_last:
                break
        return [found[group_id] for group_id in sorted(found)]

    def payload(self, group_id: int) -> GroupPayload | None:
        """Return one group; None if the service no longer has it."""
        try:
            reply = self._fetch(f"/groups/{group_id}/payload", headers=BINARY_FORMAT_HEADERS)
        except TrajectoryApiError as error:
            if error.status in _GONE:
                return None
            raise
        return GroupPayload(group_id, format_of_response(reply.headers), reply.content)

    def payloads(self, group_ids: Sequence[int]) -> Iterator[GroupPayload | None]:
        """Yield groups in the order of the ids, with a few concurrent requests."""
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            yield from pool.map(self.payload, group_ids)
