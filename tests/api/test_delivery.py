"""Batches on their way: a client that vanished gets the same batch again."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest

from atroposlib.api.queue import QueuedGroup
from atroposlib.api.records import BatchFormed, BatchHandedOut
from atroposlib.api.server import create_app
from atroposlib.api.state import BatchLedger, BatchToken, DeliveredBatch, parse_token
from atroposlib.api.store.base import MemoryRunStore
from atroposlib.api.store.sqlite import SqliteRunStore
from tests.api.helpers import REGISTRATION, make_group, serve
from tests.api.run_helpers import (
    Clock,
    UnwritableStore,
    decoded,
    open_run,
    started_run,
    take,
)

pytestmark = pytest.mark.slow


def deliver(delivery: BatchLedger, group_id: int = 0) -> BatchToken:
    groups = [QueuedGroup(group_id, None, 1, 1)]
    batch = delivery.deliver(groups, BatchFormed(delivery.next_id, [group_id], "", 0.0))
    return BatchToken(batch.batch_id, batch.attempt)


def redeliver(delivery: BatchLedger) -> DeliveredBatch | None:
    oldest = delivery.oldest_returned
    if oldest is None:
        return None
    return delivery.redeliver(BatchHandedOut(oldest.batch_id, oldest.attempt + 1, "", 1.0))


def test_returned_batches_leave_again_oldest_first_under_a_new_token():
    delivery = BatchLedger()
    first, second = deliver(delivery, 0), deliver(delivery, 1)
    delivery.return_batch(second)
    delivery.return_batch(first)

    again = [redeliver(delivery), redeliver(delivery), redeliver(delivery)]

    assert [batch and batch.token for batch in again] == ["0-2", "1-2", None]
    assert (len(delivery.pending()), delivery.num_sequences) == (2, 2)


def test_acknowledge_counts_once():
    delivery = BatchLedger()
    token = deliver(delivery)

    counted = [delivery.acknowledge(token) is not None for _ in range(2)]

    assert counted == [True, False]
    assert delivery.ack_result(token) == "repeated"
    assert delivery.return_batch(token) is None
    assert (len(delivery.pending()), delivery.num_sequences) == (0, 0)


def test_returned_batch_is_acknowledged_until_it_is_handed_out_again():
    delivery = BatchLedger()
    kept, moved = deliver(delivery, 0), deliver(delivery, 1)
    delivery.return_batch(kept)
    delivery.return_batch(moved)

    results = [delivery.ack_result(kept), delivery.return_result(moved)]
    assert delivery.acknowledge(kept) is not None
    redeliver(delivery)

    assert results == ["acked", "repeated"]
    assert delivery.ack_result(moved) == delivery.return_result(moved) == "expired"
    assert delivery.acknowledge(moved) is None


def test_acknowledge_after_clear_is_not_counted():
    delivery = BatchLedger()
    token = deliver(delivery)

    delivery.clear()

    assert delivery.ack_result(token) == "unknown"
    assert delivery.acknowledge(token) is None
    assert deliver(delivery, 1).batch_id != token.batch_id


def test_acknowledgements_are_remembered_in_bounded_number():
    delivery = BatchLedger()
    for number in range(5000):
        delivery.acknowledge(deliver(delivery, number))

    assert len(delivery.acknowledged) == 4096
    assert delivery.ack_result(BatchToken(4999, 1)) == "repeated"
    assert delivery.ack_result(BatchToken(0, 1)) == "unknown"


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("17-1", (17, 1)),
        ("17", None),
        ("-1-1", None),
        ("1-", None),
        ("1-1-1", None),
        ("\u0661-1", None),
        ("9" * 30 + "-1", None),
    ],
)
def test_parse_token(text, token):
    assert parse_token(text) == token


async def test_lease_that_ran_out_returns_the_batch_to_the_front():
    clock = Clock()
    run = await started_run(batch_size=1, clock=clock)
    await run.admit([decoded(), decoded()])
    batch, _ = await run.next_batch(lease_s=60)

    clock.now += 59
    await run.tick()
    assert run.state.delivery.in_flight == {0: batch}
    clock.now += 1
    await run.tick()

    again, _ = await run.next_batch(lease_s=60)
    assert (again.token, again.group_ids) == ("0-2", [0])
    assert await run.acknowledge(batch.token) == "expired"
    assert await run.acknowledge(again.token) == "acked"
    assert await run.acknowledge(again.token) == "repeated"
    assert run.state.step == 1


async def test_acknowledgement_after_expiry_counts_while_nobody_has_the_batch():
    clock = Clock()
    run = await started_run(batch_size=1, clock=clock)
    await run.admit([decoded()])
    batch, _ = await run.next_batch(lease_s=1)
    clock.now += 2
    await run.tick()

    assert await run.acknowledge(batch.token) == "acked"

    assert await run.next_batch() is None
    assert run.state.step == 1


async def test_batch_given_back_is_next():
    run = await started_run(batch_size=1)
    await run.admit([decoded(), decoded()])
    batch, _ = await run.next_batch(lease_s=60)

    assert await run.return_batch(batch.token, reason="refused") == "returned"
    assert await run.return_batch(batch.token) == "repeated"

    assert [await take(run), await take(run)] == [[0], [1]]
    assert await run.return_batch(batch.token) == "expired"
    assert await run.return_batch("nonsense") == await run.acknowledge("9-1") == "unknown"


async def test_returned_batch_of_another_size_is_packed_anew():
    run = await started_run(batch_size=2)
    await run.admit([decoded() for _ in range(5)])
    batch, _ = await run.next_batch()
    settings = run.state.registration.model_copy(update={"batch_size": 3, "replace": True})

    await run.register_trainer(settings)
    await run.return_batch(batch.token)

    assert [await take(run), await take(run)] == [[0, 1, 2], None]


class FailingStore(MemoryRunStore):
    """A store whose payloads cannot be read for a while."""

    is_failing = True

    async def fetch(self, group_ids, checks=()):
        if self.is_failing:
            raise OSError("disk gone")
        return await super().fetch(group_ids, checks)


async def test_next_batch_that_cannot_be_read_is_not_lost():
    store = FailingStore()
    run = await started_run(store, batch_size=1)
    await run.admit([decoded()])
    with pytest.raises(OSError, match="disk gone"):
        await run.next_batch()
    assert run.state.step == 0

    store.is_failing = False

    assert [await take(run), await take(run)] == [[0], None]


@pytest.mark.parametrize(("method", "step"), [("acknowledge", 1), ("return_batch", 0)])
async def test_word_of_a_batch_that_could_not_be_written_is_written_later(method, step):
    store = UnwritableStore()
    run = await started_run(store, batch_size=1)
    await run.admit([decoded()])
    batch, _ = await run.next_batch()
    store.is_failing = True
    with pytest.raises(OSError, match="disk full"):
        await getattr(run, method)(batch.token)

    store.is_failing = False
    await run.tick()

    assert run.state.step == step
    assert run.state.delivery.in_flight == {}
    assert await take(run) == (None if step else [0])


class UnconfirmedStore(MemoryRunStore):
    """A store that may write a record and then fail, as Redis does when its reply is late."""

    is_failing = False

    async def append(self, record, payloads=(), *, fence=None):
        is_written = await super().append(record, payloads, fence=fence)
        if self.is_failing:
            raise OSError("no reply")
        return is_written


async def test_delivery_that_was_written_without_a_reply_is_returned():
    store = UnconfirmedStore()
    run = await started_run(store, batch_size=1)
    await run.admit([decoded(), decoded()])
    store.is_failing = True
    with pytest.raises(OSError, match="no reply"):
        await run.next_batch()
    store.is_failing = False
    sent, _ = await run.next_batch()

    await run.tick()

    assert [batch.token for batch in run.state.delivery.in_flight.values()] == [sent.token]
    assert await take(run) == [0]


async def test_waiting_callers_are_served_in_the_order_they_came():
    run = await started_run(batch_size=2)
    callers = [asyncio.create_task(take(run, wait_s=5)) for _ in range(3)]
    await asyncio.sleep(0)

    for _ in range(6):
        await run.admit([decoded()])
        await asyncio.sleep(0)

    assert await asyncio.gather(*callers) == [[0, 1], [2, 3], [4, 5]]


async def test_waiting_ends_when_its_time_is_up():
    run = await started_run()

    assert await run.next_batch(wait_s=0.01) is None
    assert len(run._deliveries._waiters) == 0


async def test_cancelled_caller_leaves_its_batch_to_the_next():
    run = await started_run(batch_size=1)
    callers = [asyncio.create_task(take(run, wait_s=5)) for _ in range(2)]
    await asyncio.sleep(0)

    await run.admit([decoded()])  # wakes the first caller
    callers[0].cancel()

    assert await callers[1] == [0]


class SlowStore(MemoryRunStore):
    """A store that lets others run before it writes and before it reads."""

    async def append(self, record, payloads=(), *, fence=None):
        await asyncio.sleep(0)
        return await super().append(record, payloads, fence=fence)

    async def fetch(self, group_ids, checks=()):
        await asyncio.sleep(0)
        return await super().fetch(group_ids, checks)


@pytest.mark.parametrize("num_turns", range(8))
async def test_batch_of_a_caller_cancelled_at_any_moment_is_not_lost(num_turns):
    run = await started_run(SlowStore(), batch_size=1)
    await run.admit([decoded()])
    caller = asyncio.create_task(run.next_batch())
    for _ in range(num_turns):
        await asyncio.sleep(0)

    if not caller.done():
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        found = await run.next_batch(wait_s=1)
    else:
        found = caller.result()

    assert found is not None
    assert await run.acknowledge(found[0].token) == "acked"
    await run.close()
    assert (run.state.step, len(run.state.delivery.pending()), len(run.state.queue)) == (1, 0, 0)


def test_batch_that_a_client_did_not_read_is_delivered_again(free_port):
    big = make_group(64, length=20_000)  # far more than socket buffers hold
    with serve(create_app(), free_port) as url, httpx.Client(base_url=url, timeout=30) as client:
        client.post("/register", json={**REGISTRATION, "batch_size": 64})
        assert client.post("/scored_data", json=big).json() == {"status": "received"}
        with socket.create_connection(("127.0.0.1", free_port)) as vanishing:
            vanishing.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n")
            assert vanishing.recv(1000).startswith(b"HTTP/1.1 200")
            # In flight: nobody else gets it meanwhile.
            assert client.get("/batch").json() == {"batch": None}
            assert client.get("/status").json()["current_step"] == 0

        batch = None
        deadline = time.monotonic() + 60
        while batch is None and time.monotonic() < deadline:
            batch = client.get("/batch").json()["batch"]

        assert batch is not None
        assert batch[0]["tokens"] == big["tokens"]
        assert client.get("/status").json()["current_step"] == 1
        assert client.get("/batch").json() == {"batch": None}


def test_batches_over_http_are_counted_before_the_next_request(free_port):
    with serve(create_app(), free_port) as url, httpx.Client(base_url=url) as client:
        client.post("/register", json={**REGISTRATION, "batch_size": 1})
        client.post("/scored_data_list", json=[make_group(1, score=i) for i in range(20)])

        for step in range(1, 21):
            batch = client.get("/batch").json()["batch"]
            assert batch[0]["scores"] == [step - 1]
            assert client.get("/status").json()["current_step"] == step


async def test_request_repeated_with_its_key_gets_the_batch_that_did_not_arrive():
    run = await started_run(batch_size=1)
    await run.admit([decoded(), decoded()])

    first, _ = await run.next_batch(lease_s=600, key="one")
    again, _ = await run.next_batch(lease_s=600, key="one")
    other, _ = await run.next_batch(lease_s=600, key="two")

    assert again.group_ids == first.group_ids != other.group_ids
    assert (first.token, again.token) == ("0-1", "0-2")
    assert await run.acknowledge(first.token) == "expired"


async def test_repeated_key_does_not_redeliver_an_acknowledged_batch():
    run = await started_run(batch_size=1)
    await run.admit([decoded()])
    batch, _ = await run.next_batch(lease_s=600, key="one")
    await run.acknowledge(batch.token)

    assert await run.next_batch(lease_s=600, key="one") is None


async def test_key_of_a_sent_batch_is_known_after_a_restart(tmp_path):
    first = await started_run(SqliteRunStore(tmp_path / "run.sqlite3"), batch_size=1)
    await first.admit([decoded(), decoded()])
    await first.next_batch(lease_s=600, key="one")
    again, _ = await first.next_batch(lease_s=600, key="one")
    await first.close()

    second = await open_run(SqliteRunStore(tmp_path / "run.sqlite3"))
    after, _ = await second.next_batch(lease_s=600, key="one")
    await second.close()

    assert after.group_ids == again.group_ids
    assert (again.token, after.token) == ("0-2", "0-3")


async def test_retry_of_the_client_repeats_its_key_over_http():
    app = create_app()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post("/register", json={**REGISTRATION, "batch_size": 2})
        await client.get("/batch")
        await client.post("/scored_data", json=make_group(2))
        ask = {"headers": {"Idempotency-Key": "one"}, "params": {"lease": 600}}

        ids = [(await client.get("/batch", **ask)).json().get("batch_id") for _ in range(2)]
        invalid = await client.get("/batch", headers={"Idempotency-Key": "x" * 300})

    assert ids == ["0-1", "0-2"]
    assert invalid.status_code == 422
