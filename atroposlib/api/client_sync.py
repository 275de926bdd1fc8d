"""The synchronous client of the trajectory service, for trainers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, overload

from atroposlib.api.client_bodies import BINARY_LANE_HEADERS, plain
from atroposlib.api.client_rules import (
    LeasedBatch,
    NoServiceError,
    ack_path,
    batch_path,
    delivered_groups,
    leased_batch,
)
from atroposlib.api.client_sync_base import SyncClient
from atroposlib.errors import TrajectoryApiError

__all__ = ["TrainerClient"]

_ROUTE_MISSING = (404, 405)


class TrainerClient(SyncClient):
    """Synchronous client for trainers; raises and repeats like `TrajectoryApiClient`."""

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
            NoServiceError: it did not answer in time, or something else answers at its address;
                the message has the last reason.
            TrajectoryApiError: it refuses the token.
        """
        started = time.monotonic()
        while True:
            try:
                self._read(self._attempt("GET", "/info"), "GET", "/info")
                return
            except NoServiceError:
                raise
            except TrajectoryApiError as error:
                if error.status in (401, 403):
                    raise
                waited_s = time.monotonic() - started
                if waited_s >= timeout_s:
                    raise NoServiceError(
                        f"no trajectory service after {waited_s:.0f} s: {error}",
                        status=error.status,
                    ) from None
            if on_wait is not None:
                on_wait(waited_s)
            self._sleep(min(poll_s, max(0.0, timeout_s - waited_s)))

    def register(self, **registration: Any) -> int:
        """Register with the fields of `POST /register`; return the trainer's id."""
        return int(self._ask("POST", "/register", plain(registration))["uuid"])

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
        answer = self._ask("GET", path, headers=BINARY_LANE_HEADERS, wait_s=wait_s or 0.0)
        if lease_s is None:
            return delivered_groups(answer, self.base_url)
        return leased_batch(answer, self.base_url)

    def ack(self, batch_id: str | None, *, steps_done: int | None = None) -> None:
        """Acknowledge a leased batch: it will not be delivered again; may be repeated.

        Args:
            batch_id: of the lease; None, from a service without leases, needs no acknowledgement.
            steps_done: optimizer steps done, with that of this batch if it was trained on: the
                step of the run grows by one only where it is smaller; 0 never lets it grow. None,
                and services that do not know it, count every batch as a step.

        Raises:
            TrajectoryApiError: the lease has run out: others may have got the batch.
        """
        if batch_id is not None:
            self._ask("POST", ack_path(batch_id, steps_done=steps_done))

    def nack(self, batch_id: str | None) -> None:
        """Give a leased batch back: it is delivered next; arguments and errors as for `ack`."""
        if batch_id is not None:
            self._ask("POST", f"/batch/{batch_id}/nack")

    def set_policy_version(self, version: int) -> bool:
        """Report which weights the engine serves now.

        Args:
            version: grows with every update, e.g. optimiser steps done.

        Returns:
            False when the service is an older one that does not ask for it.
        """
        try:
            self._ask("POST", "/policy", plain({"version": version}))
        except TrajectoryApiError as error:
            if error.status in _ROUTE_MISSING:
                return False
            raise
        return True
