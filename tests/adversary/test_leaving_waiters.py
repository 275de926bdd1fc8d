"""Clients that leave while they wait for a batch take nothing with them, and hurt nobody."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from atroposlib.api.run import Run
from atroposlib.api.run_delivery import Waiters
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.api.store.base import RunStore
from atroposlib.api.store.open import open_store
from tests.api.helpers import REGISTRATION, make_group, serve
from tests.api.run_helpers import decoded, registration
from tests.api.soak.service_process import Replica

pytestmark = pytest.mark.slow

STORES = ("memory", "sqlite", "redis")
NUM_LEAVERS, NUM_POSTERS, NUM_COLLECTORS = 200, 8, 2
GROUPS_PER_BATCH = 4
LONGEST_PATIENCE_S = 1.0
TOGETHER_S = 0.05
"""Clients leave at multiples of this, many at the same moment."""
DRAIN_S = 120.0


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest) -> str:
    if request.param != "redis":
        return str(request.param)
    return str(request.getfixturevalue("redis_server").url)


async def test_waking_passes_over_those_who_gave_up():
    waiters = Waiters()
    waits = [asyncio.create_task(waiters.wait(waiters.ticket(), timeout_s=60)) for _ in range(3)]
    await asyncio.sleep(0)
    waits[0].cancel()

    waiters.wake()

    assert await waits[1] is True
    assert (waits[0].cancelled(), waits[2].done()) == (True, False)
    waiters.close()
    assert await waits[2] is False


async def open_run(url: str, folder: Path) -> Run:
    store: RunStore = open_store(url, data_dir=folder, run_name=uuid.uuid4().hex)
    run = Run(store)
    await run.open()
    await run.register_trainer(registration(batch_size=1))
    return run


async def test_groups_of_others_are_stored_while_waiters_leave(store_url, tmp_path):
    run = await open_run(store_url, tmp_path)
    rng = random.Random(0)

    for _ in range(20):
        waits = [asyncio.create_task(run.next_batch(wait_s=60)) for _ in range(20)]
        await asyncio.sleep(0.01)
        posts = [asyncio.create_task(run.admit([decoded()])) for _ in range(5)]
        for _ in range(rng.randint(0, 60)):
            await asyncio.sleep(0)
        for wait in rng.sample(waits, 15):
            wait.cancel()
        await asyncio.wait_for(asyncio.gather(*posts), 60)
        for wait in waits:
            wait.cancel()
        for found in await asyncio.gather(*waits, return_exceptions=True):
            if not isinstance(found, BaseException):
                assert await run.acknowledge(found[0].token) == "acked"

    while (found := await run.next_batch(wait_s=0.5)) is not None:
        assert await run.acknowledge(found[0].token) == "acked"
    assert run.state.counters["groups/delivered"] == 100
    assert (run.state.step, len(run.state.queue), len(run.state.delivery.pending())) == (100, 0, 0)
    await run.close()


async def test_listener_that_fails_keeps_no_record_from_its_writer(store_url, tmp_path, caplog):
    run = await open_run(store_url, tmp_path)
    run._log._on_applied = lambda record: 1 / 0

    posts = [run.admit([decoded()]) for _ in range(5)]
    await asyncio.wait_for(asyncio.gather(*posts), 60)

    assert len(run.state.queue) == 5
    assert "ZeroDivisionError" in caplog.text
    await run.close()


async def test_store_goes_on_behind_a_record_that_cannot_be_applied(store_url, tmp_path):
    applied: list[bytes] = []

    def apply(position: int, record: bytes) -> None:
        assert record != b"bad"
        applied.append(record)

    store = open_store(store_url, data_dir=tmp_path, run_name=uuid.uuid4().hex)
    await store.open(apply, lambda content: None)

    appends = [store.append(record) for record in (b"one", b"bad", b"two")]
    assert await asyncio.wait_for(asyncio.gather(*appends), 60) == [True] * 3

    assert applied == [b"one", b"two"]
    await store.close()


class Crowd:
    """Clients of one service: some post, some collect, and many leave before they are answered."""

    def __init__(self, url: str, *, seconds: float, seed: int) -> None:
        self._url = url
        self._address = ("127.0.0.1", httpx.URL(url).port)
        self._ends_at = time.monotonic() + seconds
        self._rng = random.Random(seed)
        self.num_posted = 0
        self.num_left = 0
        self.collected: Counter[int] = Counter()
        self.num_acknowledged = 0

    async def run(self) -> None:
        """Let everybody do their part; ends when every group was collected."""
        limits = httpx.Limits(max_connections=NUM_POSTERS + NUM_COLLECTORS)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits) as client:
            collectors = [asyncio.create_task(self._collect(client)) for _ in range(NUM_COLLECTORS)]
            leavers = [asyncio.create_task(self._leave_early()) for _ in range(NUM_LEAVERS)]
            await asyncio.gather(*(self._post(client) for _ in range(NUM_POSTERS)))
            while self.num_posted % GROUPS_PER_BATCH:
                await self._post_one(client)
            await asyncio.gather(*leavers)
            await asyncio.wait_for(asyncio.gather(*collectors), DRAIN_S)
            status = (await client.get("/status")).raise_for_status().json()
        assert self.collected == Counter(range(self.num_posted))
        assert status["current_step"] == self.num_acknowledged == self.num_posted / GROUPS_PER_BATCH
        assert status["queue_size"] == 0
        assert not status.keys() & {"in_flight_batches", "returned_batches", "set_aside_records"}

    async def _post(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self._ends_at:
            await self._post_one(client)
            await asyncio.sleep(self._rng.uniform(0, 0.01))

    async def _post_one(self, client: httpx.AsyncClient) -> None:
        number, self.num_posted = self.num_posted, self.num_posted + 1
        answer = await client.post("/scored_data", json=make_group(1, score=float(number)))
        assert answer.json() == {"status": "received"}, answer.text

    async def _collect(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self._ends_at or sum(self.collected.values()) < self.num_posted:
            answer = await client.get("/batch", params={"wait": 0.5, "lease": 300})
            if answer.status_code == 429:  # those who left have as many as may be in flight
                await asyncio.sleep(float(answer.headers["Retry-After"]))
                continue
            got = answer.raise_for_status().json()
            if got["batch"] is None:
                continue
            acknowledged = await client.post(f"/batch/{got['batch_id']}/ack")
            assert acknowledged.status_code == 200, acknowledged.text
            self.num_acknowledged += 1
            self.collected.update(int(group["scores"][0]) for group in got["batch"])

    async def _leave_early(self) -> None:
        """Ask for a batch and go away, again and again; never acknowledges one."""
        host, port = self._address
        head = f"GET /batch?wait=60&lease=1 HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        while time.monotonic() < self._ends_at:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head)
            patience = self._rng.uniform(0, LONGEST_PATIENCE_S)
            leaves_at = (time.monotonic() + patience) // TOGETHER_S * TOGETHER_S + TOGETHER_S
            with suppress(asyncio.TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(1), leaves_at - time.monotonic())
            writer.transport.abort()
            self.num_left += 1


def leave_and_account(url: str, *, seconds: float) -> None:
    """Let a crowd at a service, then compare its account with that of the service."""
    register = {**REGISTRATION, "batch_size": GROUPS_PER_BATCH}
    httpx.post(f"{url}/register", json=register).raise_for_status()
    crowd = Crowd(url, seconds=seconds, seed=0)
    asyncio.run(crowd.run())
    counters = httpx.get(f"{url}/health/ready").raise_for_status().json()["counters"]
    returned = counters.get("batches/returned", 0)
    print(f"{crowd.num_left} left, {crowd.num_posted} groups posted, {returned} batches came back")
    assert crowd.num_left > NUM_LEAVERS
    assert counters["groups/received"] == counters["groups/delivered"] == crowd.num_posted


@pytest.mark.long
def test_two_hundred_clients_leave_and_every_group_is_accounted_for(store_url, tmp_path, free_port):
    settings = ApiSettings(store=store_url, data_dir=tmp_path, run_name=uuid.uuid4().hex)
    with serve(create_app(settings), free_port) as url:
        leave_and_account(url, seconds=3)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_hundred_clients_leave_for_a_minute(store_url, tmp_path):
    service = Replica(tmp_path, store_url, run=uuid.uuid4().hex)
    service.start()
    try:
        leave_and_account(service.url, seconds=60)
    finally:
        service.stop()
