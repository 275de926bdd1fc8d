"""Batches on their way: a client that vanished gets the same batch again."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from atroposlib.api.delivery import Delivery
from atroposlib.api.queue import QueuedGroup
from atroposlib.api.run_state import RunState
from atroposlib.api.schemas import Registration
from atroposlib.api.server import create_app
from atroposlib.api.store.memory import MemoryStore
from atroposlib.wire import decode_group
from tests.api.helpers import REGISTRATION, make_group, serve


def group(group_id: int) -> QueuedGroup:
    return QueuedGroup(group_id, None, 1, 1, 0)


def test_returned_batches_leave_again_oldest_first():
    delivery = Delivery()
    first, second = delivery.hand_out([group(0)]), delivery.hand_out([group(1)])
    delivery.give_back(second)
    delivery.give_back(first)

    again = [delivery.next_returned(), delivery.next_returned(), delivery.next_returned()]

    assert again == [first, second, None]
    assert delivery.num_pending == 2


def test_acknowledge_counts_only_what_is_in_flight():
    delivery = Delivery()
    handout = delivery.hand_out([group(0)])

    assert [delivery.acknowledge(handout), delivery.acknowledge(handout)] == [True, False]
    assert delivery.give_back(handout) is False
    assert delivery.num_pending == 0


def test_acknowledge_after_clear_is_not_counted():
    delivery = Delivery()
    handout = delivery.hand_out([group(0)])

    delivery.clear()

    assert delivery.acknowledge(handout) is False
    assert delivery.hand_out([group(1)]).batch_id != handout.batch_id


class FailingStore(MemoryStore):
    """A store that cannot be read for a while."""

    is_failing = True

    async def fetch(self, group_ids):
        if self.is_failing:
            raise OSError("disk gone")
        return await super().fetch(group_ids)


async def test_next_batch_that_cannot_be_read_is_not_lost():
    store = FailingStore()
    run = RunState(store)
    run.register_trainer(Registration(**{**REGISTRATION, "batch_size": 1}))
    await run.admit([decode_group(json.dumps(make_group(1)).encode())])
    with pytest.raises(OSError, match="disk gone"):
        await run.next_batch()
    assert run.step == 0

    store.is_failing = False
    found = await run.next_batch()

    assert found is not None
    await run.acknowledge(found[0])
    assert (run.step, len(store), await run.next_batch()) == (1, 0, None)


async def test_acknowledge_after_reset_leaves_the_new_run_alone():
    run = RunState(MemoryStore())
    run.register_trainer(Registration(**{**REGISTRATION, "batch_size": 1}))
    await run.admit([decode_group(json.dumps(make_group(1)).encode())])
    found = await run.next_batch()
    await run.reset()

    await run.acknowledge(found[0])
    run.give_back(found[0])

    assert run.step == 0
    assert run.delivery.num_pending == 0


async def test_reset_while_a_group_is_written_drops_the_group():
    class ResettingStore(MemoryStore):
        async def append(self, groups):
            await super().append(groups)
            await run.reset()
            await super().append(groups)

    store = ResettingStore()
    run = RunState(store)

    await run.admit([decode_group(json.dumps(make_group(1)).encode())])

    assert (len(run.queue), len(store)) == (0, 0)


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
        deadline = time.monotonic() + 10
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
