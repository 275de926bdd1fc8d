"""Delivery of batches: lease, acknowledgement, return, and redelivery after a timeout.

          next_batch ──► in flight ── acknowledge ──► done
                            │  ▲
    return_batch, expiry    ▼  │ next_batch, before a new batch is formed
                          returned

A leased batch must be acknowledged before its lease expires. A batch without a lease is being sent
by one replica, and is returned if that replica stops. Requests that wait for a batch are served in
the order of their arrival, and woken one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count

from atroposlib.api import records
from atroposlib.api.journal import RunLog
from atroposlib.api.queue import BusyError, QueuedGroup
from atroposlib.api.records import PayloadFlaw, Record, ReturnReason
from atroposlib.api.state import AckResult, BatchToken, DeliveredBatch, parse_token
from atroposlib.api.store.base import DamagedPayloadError
from atroposlib.wire import StoredPayload

logger = logging.getLogger(__name__)


class Waiters:
    """A queue of waiting coroutines; a ticket keeps the place of one that must wait again."""

    def __init__(self) -> None:
        self._tickets = count()
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def ticket(self) -> int:
        """Return a place at the end of the queue."""
        return next(self._tickets)

    def wake(self) -> None:
        """Wake the coroutine that has waited longest; cancelled ones are skipped."""
        while self._waiting:
            future = self._waiting.pop(min(self._waiting))
            if not future.done():
                future.set_result(True)
                return

    def close(self) -> None:
        """End all current and later waits as if their time had run out."""
        self._is_closed = True
        for ticket in list(self._waiting):
            self._time_out(ticket)

    async def wait(self, ticket: int, *, timeout_s: float) -> bool:
        """Wait to be woken; return False after a timeout.

        Safe to cancel: if the coroutine was already woken, the next one is woken instead.
        """
        if timeout_s <= 0 or self._is_closed:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting[ticket] = future
        timer = loop.call_later(timeout_s, self._time_out, ticket)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.wake()
            raise
        finally:
            timer.cancel()
            self._waiting.pop(ticket, None)

    def _time_out(self, ticket: int) -> None:
        future = self._waiting.pop(ticket, None)
        if future is not None and not future.done():
            future.set_result(False)


_RETRY_AFTER_S = 5.0


def _require_less(number: int, limit: int, text: str, *, status: int) -> None:
    if limit and number >= limit:
        raise BusyError(
            f"{limit} {text} retry in {_RETRY_AFTER_S:g} s",
            status=status,
            retry_after_s=_RETRY_AFTER_S,
        )


class Deliveries:
    """Delivers the batches of a run and records whether they arrived.

    `report_stall` is called when enough sequences are queued but form no batch.
    """

    def __init__(
        self,
        log: RunLog,
        clock: Callable[[], float],
        *,
        replica: str,
        report_stall: Callable[[], None],
    ) -> None:
        self._log = log
        self._state = log.state
        self._store = log.store
        self._replica = replica
        self._clock = clock
        self._waiters = Waiters()
        self._leased_since: dict[str, float] = {}
        """Token of a leased batch → start of its lease, by the clock of this process."""
        self._unwritten: dict[BatchToken, bool] = {}
        """Outcomes that are not written yet: token → whether the batch arrived."""
        self._sending: set[BatchToken] = set()
        """Deliveries of this process; it is unaware of one whose writing failed after all."""
        self._background: set[asyncio.Task[None]] = set()
        self._report_stall = report_stall
        log.on_loaded.append(self.wake)

    def start(self) -> None:
        """Restart the leases of batches that were in flight when the run was opened."""
        self._leased_since = {
            batch.token: self._clock()
            for batch in self._state.delivery.in_flight.values()
            if batch.lease_s is not None
        }

    def note(self, record: Record) -> None:
        """Record when the lease of a batch started, by the clock of this process.

        The clocks of other replicas and of earlier processes may be hours off.
        """
        if isinstance(record, records.BatchFormed | records.BatchHandedOut):
            batch = self._state.delivery.in_flight.get(record.batch_id)
            if batch is not None and batch.lease_s is not None:
                self._leased_since[batch.token] = self._clock()

    async def next_batch(
        self, *, lease_s: float | None = None, wait_s: float = 0.0, key: str | None = None
    ) -> tuple[DeliveredBatch, list[StoredPayload]] | None:
        """Deliver the oldest batch that can be formed, returned ones first.

        The caller must `acknowledge` or return the batch. It is returned here if its payloads
        cannot be read or the caller is cancelled. Groups whose payloads are missing or damaged are
        set aside and replaced by others.

        Args:
            lease_s: duration of the lease; None if this process acknowledges once the body is sent.
            wait_s: seconds to wait for a batch; callers are served in the order of their calls.
            key: idempotency key. If a batch was sent to a request with this key, also by an earlier
                process of the service, it did not arrive, and is returned first.

        Returns:
            The batch and its payloads in order of delivery; None without a batch.

        Raises:
            BusyError: too many requests wait for a batch, or too many batches are unacknowledged.
        """
        if self._state.registration is None:
            await self._store.sync()  # another replica may have registered the trainer
        if self._state.registration is None:
            return None
        if not self._state.is_started:
            await self._log.append(records.TrainerStarted(self._state.epoch))
        earlier = None if key is None else self._state.delivery.sent_for(key)
        if earlier is not None:
            await self.return_batch(earlier.token)
        deadline = asyncio.get_running_loop().time() + wait_s
        ticket = self._waiters.ticket()
        while True:
            try:
                found = await self._try_batch(lease_s, key)
            except BaseException:
                self.wake()
                raise
            if found is not None:
                self.wake()
                return found
            left = deadline - asyncio.get_running_loop().time()
            if left > 0:
                _require_less(
                    len(self._waiters),
                    self._state.limits.max_waiting_requests,
                    "requests wait for a batch already (--max-waiting-requests);",
                    status=503,
                )
            if not await self._waiters.wait(ticket, timeout_s=left):
                return None

    async def _try_batch(
        self, lease_s: float | None, key: str | None
    ) -> tuple[DeliveredBatch, list[StoredPayload]] | None:
        while self._state.may_form_batch:
            token = await self._deliver(lease_s, key)
            if token is None:
                self._report_stall()
                return None
            batch = self._state.delivery.find(token)
            if batch is None:
                continue  # reset by another replica
            try:
                contents = await self._read(token, batch.groups)
            except asyncio.CancelledError:
                self._abandon(token)
                raise
            except Exception:
                if await self.return_batch(str(token)) == "unknown":
                    continue  # reset while it was read
                raise
            if contents is None:
                continue
            wire_formats = (group.wire_format for group in batch.groups)
            return batch, list(map(StoredPayload, wire_formats, contents))
        return None

    async def _read(self, token: BatchToken, groups: Sequence[QueuedGroup]) -> list[bytes] | None:
        """Return the payloads of a batch; None after setting aside missing or damaged ones."""
        try:
            return await self._store.fetch(
                [group.group_id for group in groups], [group.is_payload for group in groups]
            )
        except (KeyError, DamagedPayloadError):
            pass
        # Fetch one by one, to find which ones are missing or damaged.
        contents: list[bytes] = []
        flaws: dict[int, PayloadFlaw] = {}
        for group in groups:
            try:
                contents += await self._store.fetch([group.group_id], [group.is_payload])
            except KeyError:
                flaws[group.group_id] = "missing"
            except DamagedPayloadError:
                flaws[group.group_id] = "damaged"
        if flaws:
            await self.set_aside(str(token), flaws)
        return None if flaws else contents

    async def set_aside(self, text: str, flaws: Mapping[int, PayloadFlaw]) -> AckResult:
        """Remove groups of a batch in flight from the run, and queue its other groups again.

        `flaws` maps the ids of these groups to the flaw of their payload.
        """
        token = parse_token(text)
        if token is None:
            return "unknown"

        def decide() -> tuple[Record | None, AckResult]:
            if self._state.delivery.find(token) is None:
                return None, "unknown"
            return records.GroupsSetAside(*token, list(flaws.items()), self._clock()), "returned"

        result = await self._settle(token, decide, has_arrived=False)
        if result == "returned":
            for group_id, flaw in flaws.items():
                logger.error(
                    "group %d is removed from the run: its payload is %s in the store",
                    group_id,
                    flaw,
                )
        return result

    async def _deliver(self, lease_s: float | None, key: str | None) -> BatchToken | None:
        """Put a batch in flight and return its token; if cancelled, the batch is returned."""
        delivering = asyncio.ensure_future(self._write_delivery(lease_s, key))
        try:
            return await asyncio.shield(delivering)
        except asyncio.CancelledError:
            delivering.add_done_callback(self._abandon_result)
            raise

    async def _write_delivery(self, lease_s: float | None, key: str | None) -> BatchToken | None:
        token = await self._log.guarded(partial(self._plan_delivery, lease_s, key))
        if token is not None:
            self._sending.add(token)  # before anything else is decided
        return token

    def _plan_delivery(
        self, lease_s: float | None, key: str | None
    ) -> tuple[Record | None, BatchToken | None]:
        now = self._clock()
        lease_until = None if lease_s is None else now + lease_s
        delivery = self._state.delivery
        again = delivery.oldest_returned
        groups = None
        if again is None:
            groups = None if self._state.registration is None else self._state.plan_batch()
            if groups is None:
                return None, None
        _require_less(
            len(delivery.in_flight),
            self._state.limits.max_batches_in_flight,
            "batches are with trainers and not acknowledged (--max-batches-in-flight); "
            "acknowledge some, or",
            status=429,
        )
        if again is not None:
            token = BatchToken(again.batch_id, again.attempt + 1)
            return records.BatchHandedOut(*token, self._replica, now, lease_until, key), token
        token = BatchToken(delivery.next_id, 1)
        group_ids = [group.group_id for group in groups or ()]
        sent = (self._replica, now, lease_until, key)
        return records.BatchFormed(token.batch_id, group_ids, *sent), token

    async def acknowledge(self, text: str, *, steps_done: int | None = None) -> AckResult:
        """Acknowledge a batch; its groups are discarded later.

        Args:
            text: token of the batch.
            steps_done: steps of the trainer, including that of this batch if it made one. The batch
                counts as a step only if the run has fewer steps; None: it always counts.
        """
        token = parse_token(text)
        if token is None:
            return "unknown"

        def decide() -> tuple[Record | None, AckResult]:
            result = self._state.delivery.ack_result(token)
            if result != "acked":
                return None, result
            is_step = steps_done is None or steps_done > self._state.step
            kind = records.BatchAcknowledged if is_step else records.BatchPassedOver
            return kind(*token, self._clock()), result

        return await self._settle(token, decide, has_arrived=True)

    async def return_batch(self, text: str, *, reason: ReturnReason = "lost") -> AckResult:
        """Return a batch, to be redelivered to the next caller."""
        token = parse_token(text)
        if token is None:
            return "unknown"

        def decide() -> tuple[Record | None, AckResult]:
            result = self._state.delivery.return_result(token)
            returned = records.BatchesReturned([token], reason, self._clock())
            return (returned if result == "returned" else None), result

        result = await self._settle(token, decide, has_arrived=False)
        if result == "returned":
            logger.warning(
                "batch %s was returned (reason: %s) and will be redelivered next", token, reason
            )
        return result

    async def _settle(
        self,
        token: BatchToken,
        decide: Callable[[], tuple[Record | None, AckResult]],
        *,
        has_arrived: bool,
    ) -> AckResult:
        """Write the outcome of a batch; if the store fails, the next ticks retry."""
        try:
            result = await self._log.guarded(decide)
            if result == "unknown":
                # Another replica may have delivered the batch.
                await self._store.sync()
                result = await self._log.guarded(decide)
        except OSError:
            batch = self._state.delivery.find(token)
            if batch is not None and batch.lease_until is None:
                self._unwritten[token] = has_arrived  # only this process knows it
            raise
        self._unwritten.pop(token, None)
        return result

    async def return_expired(self) -> None:
        """Return every batch whose lease has expired."""
        now = self._clock()
        leased = [b for b in self._state.delivery.in_flight.values() if b.lease_s is not None]
        known = self._leased_since
        self._leased_since = {b.token: known.get(b.token, now) for b in leased}

        def has_expired(batch: DeliveredBatch) -> bool:
            if batch.lease_s is None:
                return False
            return now - self._leased_since.get(batch.token, now) >= batch.lease_s

        await self._return_all(has_expired, "expired")

    async def settle_unwritten(self) -> None:
        """Retry outcomes that could not be written, and return batches of cancelled callers."""
        for token, has_arrived in list(self._unwritten.items()):
            if has_arrived:
                await self.acknowledge(str(token))
            else:
                await self.return_batch(str(token))

    async def return_orphans(self, alive: Collection[str] | None) -> None:
        """Return batches that no process is sending.

        Their replica has stopped, or did not learn that its delivery was written: the store may
        write a record after it failed to confirm it.

        Args:
            alive: names of the replicas that serve the run; None: only this one.
        """
        in_flight = self._state.delivery.in_flight
        self._sending = {token for token in self._sending if token.batch_id in in_flight}

        def is_orphan(batch: DeliveredBatch) -> bool:
            if batch.lease_until is not None:
                return False
            if batch.owner == self._replica:
                return BatchToken(batch.batch_id, batch.attempt) not in self._sending
            return alive is None or batch.owner not in alive

        await self._return_all(is_orphan, "owner_gone")

    async def _return_all(
        self, is_lost: Callable[[DeliveredBatch], bool], reason: ReturnReason
    ) -> None:
        def decide() -> tuple[Record | None, list[BatchToken]]:
            in_flight = self._state.delivery.in_flight.values()
            tokens = [BatchToken(b.batch_id, b.attempt) for b in in_flight if is_lost(b)]
            record = records.BatchesReturned([*tokens], reason, self._clock()) if tokens else None
            return record, tokens

        if not any(map(is_lost, self._state.delivery.in_flight.values())):
            return
        for token in await self._log.guarded(decide):
            logger.warning(
                "batch %s was returned (reason: %s) and will be redelivered next", token, reason
            )

    def wake(self) -> None:
        """Wake the longest waiting request if there may be a batch."""
        if len(self._waiters) and self._state.may_form_batch:
            self._waiters.wake()

    def stop_waiting(self) -> None:
        self._waiters.close()

    async def close(self) -> None:
        """Wait until the batches of cancelled callers are returned."""
        if self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    def _abandon_result(self, delivering: asyncio.Future[BatchToken | None]) -> None:
        if delivering.cancelled() or delivering.exception() is not None:
            return
        token = delivering.result()
        if token is not None:
            self._abandon(token)

    def _abandon(self, token: BatchToken) -> None:
        """Return the batch of a cancelled caller; if the store fails, the next ticks retry."""
        self._unwritten[token] = False
        task = asyncio.ensure_future(self.settle_unwritten())
        self._background.add(task)
        task.add_done_callback(self._forget_background)

    def _forget_background(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a batch could not be returned yet, retrying: %s", task.exception())
