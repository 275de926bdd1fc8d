"""Bodies of requests: keys, limits, bombs, and how many bytes lie in memory at once."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import socket
import threading
import zlib
from types import SimpleNamespace

import httpx
import pytest

from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.api.store.base import MemoryRunStore
from atroposlib.errors import RunStoreError
from atroposlib.utils.request_limits import BodyBudget
from atroposlib.wire import encode_group, encode_groups
from tests.api.helpers import REGISTRATION, Service, make_group, serve

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
GZIP = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
BINARY = {"Content-Type": "application/msgpack"}


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list"])
def test_repeated_key_is_answered_as_before_and_stored_once(service, path):
    group = make_group(1, score=3)
    body = group if path == "/scored_data" else [group, group]
    key = {"Idempotency-Key": "a" * 255}

    first = service.post(path, json=body, headers=key)
    again = service.post(path, json=body, headers=key)

    assert again.json() == first.json()
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert service.status()["queue_size"] == (1 if path == "/scored_data" else 2)


def test_digest_of_a_large_body_is_computed_in_a_thread(service, monkeypatch):
    crc32, threads = zlib.crc32, []

    def noted(content):
        threads.append(threading.current_thread().name)
        return crc32(content)

    monkeypatch.setattr("atroposlib.api.routes.zlib", SimpleNamespace(crc32=noted))
    group = {**make_group(1), "images": "x" * MIB}

    for _ in range(2):
        answer = service.post("/scored_data", json=group, headers={"Idempotency-Key": "a"})
        assert answer.status_code == 200

    assert [name.partition("_")[0] for name in threads] == ["bodies", "bodies"]
    assert service.get("/status").json()["queue_size"] == 1


def test_large_bodies_are_read_in_every_lifespan_of_an_application(service):
    group = {**make_group(1), "images": "x" * MIB}
    with service:
        before = service.post("/scored_data", json=group)

    with service:
        after = service.post("/scored_data", json=group)
        compressed = service.post("/scored_data", content=gzip.compress(MIB * b"x"), headers=GZIP)

    assert (before.status_code, after.status_code, compressed.status_code) == (200, 200, 422)


def test_repeated_key_with_another_body_is_422(service):
    key = {"Idempotency-Key": "one"}
    service.post("/scored_data", json=make_group(1), headers=key)

    answer = service.post("/scored_data", json=make_group(2), headers=key)

    assert answer.status_code == 422
    assert "'one'" in answer.json()["detail"]
    assert service.status()["queue_size"] == 1


def test_key_of_a_refused_group_can_be_used_again(service):
    key = {"Idempotency-Key": "one"}
    assert service.post("/scored_data", json={}, headers=key).status_code == 422

    answer = service.post("/scored_data", json=make_group(1), headers=key)

    assert (answer.status_code, answer.headers.get("idempotent-replayed")) == (200, None)


@pytest.mark.parametrize("key", ["", "a" * 256, "with space", b"\xe9", b"tab\there"])
def test_key_that_cannot_be_one_is_422(service, key):
    answer = service.post("/scored_data", json=make_group(1), headers={"Idempotency-Key": key})

    assert answer.status_code == 422
    assert "visible ASCII" in answer.json()["detail"]


def test_invalid_key_is_rejected_before_the_body_counts(service):
    service.start()
    before = service.get("/metrics").text

    answer = service.post("/scored_data", json={}, headers={"Idempotency-Key": "with space"})

    assert "visible ASCII" in answer.json()["detail"]
    refused = "atropos_requests_refused_total{"
    lines = [
        [line for line in text.splitlines() if line.startswith(refused)]
        for text in (before, service.get("/metrics").text)
    ]
    assert lines[0] == lines[1]


def test_repeated_key_is_known_after_a_restart(tmp_path):
    settings = ApiSettings(store="sqlite", data_dir=tmp_path, run_name="mine")
    replies = []
    for _ in range(2):
        with Service(settings) as service:
            key = {"Idempotency-Key": "one"}
            replies.append(service.post("/scored_data", json=make_group(1), headers=key))
            assert service.status()["queue_size"] == 1

    assert [reply.headers.get("idempotent-replayed") for reply in replies] == [None, "true"]


@pytest.mark.parametrize("limit", [{"max_queue_sequences": 4}, {"max_queue_bytes": 300}])
def test_queue_that_is_full_is_503_with_a_time_to_come_back(limit):
    service = Service(ApiSettings(**limit))
    assert service.post("/scored_data", json=make_group(4)).status_code == 200

    answer = service.post("/scored_data", json=make_group(1))

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "exceed the limit" in answer.json()["detail"]
    assert service.status()["queue_size"] == 1


def test_store_that_fails_is_503_and_never_500(service, monkeypatch):
    async def fail(self, record, payloads=(), *, fence=None):
        raise RunStoreError("no space left on the device")

    service.register(batch_size=1)
    service.push(1)
    monkeypatch.setattr(MemoryRunStore, "append", fail)

    answers = [
        service.post("/scored_data", json=make_group(1)),
        service.post("/register", json={**REGISTRATION, "replace": True}),
        service.get("/batch"),
        service.get("/reset_data"),
    ]

    for answer in answers:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "no space left" in answer.json()["detail"]


def test_binary_groups_are_received_one_by_one_and_in_lists(service):
    group = make_group(2, length=3)
    for zstd in (False, True):
        one = encode_group(group, "msgpack", zstd=zstd)
        several = encode_groups([group, group], "msgpack", zstd=zstd)

        answers = [
            service.post("/scored_data", content=one, headers=BINARY),
            service.post("/scored_data_list", content=several, headers=BINARY),
        ]

        assert [answer.json()["status"] for answer in answers] == ["received"] * 2
    assert service.status()["queue_size"] == 6


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", b"{}", b"\x28\xb5\x2f\xfd"]
)
def test_binary_bodies_that_are_no_groups_are_422(service, body):
    for path in ("/scored_data", "/scored_data_list"):
        assert service.post(path, content=body, headers=BINARY).status_code == 422


def test_groups_carry_the_version_they_were_sampled_under(service):
    binary = encode_group({**make_group(1), "policy_version": 6}, "msgpack")

    service.post("/scored_data", json={**make_group(1), "policy_version": 5})
    service.post("/scored_data", content=binary, headers=BINARY)

    assert [group.version for group in service.app.state.queue] == [5, 6]


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "snappy"])
def test_bodies_in_an_unknown_encoding_are_415(service, encoding):
    answer = service.post("/scored_data", content=b"x", headers={"Content-Encoding": encoding})

    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize("media_type", [None, "text/json", "application/problem+json"])
def test_json_is_read_under_its_names_and_without_one(service, media_type):
    headers = {} if media_type is None else {"Content-Type": media_type}

    answer = service.post("/scored_data", content=json.dumps(make_group(1)), headers=headers)

    assert answer.json() == {"status": "received"}


@pytest.fixture(scope="module")
def gzip_bomb() -> bytes:
    """A GiB of spaces in about a MiB."""
    return gzip.compress(b" " * (64 * MIB), 6) * 16


def test_gzip_bomb_is_refused_at_the_cap_in_bounded_memory(free_port, gzip_bomb):
    app = create_app(ApiSettings(max_body_bytes=32 * MIB, max_buffered_bytes=64 * MIB))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with serve(app, free_port) as url, httpx.Client(base_url=url, timeout=60) as client:
        answers = [client.post("/scored_data", content=gzip_bomb, headers=GZIP) for _ in range(3)]

    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert [answer.status_code for answer in answers] == [413] * 3
    assert grown_bytes < 200 * MIB


def test_zstd_bomb_is_refused_at_the_cap():
    zstandard = pytest.importorskip("zstandard")
    service = Service(ApiSettings(max_body_bytes=MIB))
    bomb = zstandard.ZstdCompressor().compress(b" " * (64 * MIB))

    answer = service.post("/scored_data", content=bomb, headers=BINARY)

    assert answer.status_code in (413, 422)


def test_bodies_larger_than_the_room_for_all_are_read_one_after_the_other(free_port):
    body = json.dumps(make_group(4, length=100_000)).encode()
    app = create_app(ApiSettings(max_buffered_bytes=len(body) // 2))

    async def post_all(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            packed = gzip.compress(body)
            posts = [client.post("/scored_data", content=body) for _ in range(6)]
            posts += [client.post("/scored_data", content=packed, headers=GZIP) for _ in range(6)]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    with serve(app, free_port) as url:
        assert asyncio.run(post_all(url)) == [200] * 12
        assert len(app.state.queue) == 12


def test_client_that_leaves_in_the_middle_of_its_body_stores_nothing(free_port):
    app = create_app()
    with serve(app, free_port) as url, httpx.Client(base_url=url) as client:
        for encoding in ("identity", "gzip"):
            head = f"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Encoding: {encoding}\r\n"
            with socket.create_connection(("127.0.0.1", free_port)) as connection:
                connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode() + b"\x1f\x8b")

        assert client.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize("is_length_first", [True, False])
async def test_length_beside_chunks_does_not_lift_the_limit(is_length_first):
    headers = [(b"transfer-encoding", b"chunked"), (b"content-length", b"5")]
    scope = {
        **{"type": "http", "method": "POST", "path": "/scored_data", "query_string": b""},
        "headers": headers[::-1] if is_length_first else headers,
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": bytes(2 * MIB), "more_body": False}

    async def send(message):
        sent.append(message)

    await create_app(ApiSettings(max_body_bytes=MIB))(scope, receive, send)

    assert sent[0]["status"] == 413


async def test_budget_lets_the_oldest_finish_and_others_wait_for_room():
    budget = BodyBudget(100)
    oldest, second, third = budget.open(), budget.open(), budget.open()
    await oldest.take(60)
    await second.take(40)
    waiting = [asyncio.ensure_future(account.take(50)) for account in (third, second)]
    await oldest.take(500)
    assert budget.held_bytes == 600
    assert not any(task.done() for task in waiting)

    oldest.close()

    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    second.close()
    third.close()
    assert budget.held_bytes == 0


async def test_budget_does_not_wait_for_a_request_whose_small_body_is_complete():
    budget = BodyBudget(100)
    waits_for_a_batch, second, third = budget.open(), budget.open(), budget.open()
    await waits_for_a_batch.take(1)
    await second.take(60)
    await third.take(30)
    waiting = asyncio.ensure_future(second.take(50))
    await asyncio.sleep(0)
    assert not waiting.done()

    waits_for_a_batch.note_complete()
    await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(second.take(50), 60)

    for account in (waits_for_a_batch, second, third):
        account.close()
    assert budget.held_bytes == 0


async def test_budget_forgets_who_gave_up_waiting():
    budget = BodyBudget(100)
    oldest, second = budget.open(), budget.open()
    await oldest.take(90)
    waiting = asyncio.ensure_future(second.take(50))
    await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    second.close()
    oldest.close()

    assert budget.held_bytes == 0


async def never():
    await asyncio.Event().wait()


async def test_read_ends_with_the_time_and_the_task_goes_on():
    account = BodyBudget(100).open()

    async def piece():
        await asyncio.sleep(0)
        return {"type": "http.request"}

    assert await account.read(piece, timeout_s=0.05) == {"type": "http.request"}
    assert await account.read(never, timeout_s=0.05) is None
    await asyncio.sleep(0)  # a cancellation left over would end this
    assert account.pace.turn_s > 0
    account.close()


async def test_read_that_is_cancelled_from_outside_ends_its_task():
    account = BodyBudget(100).open()
    reading = asyncio.ensure_future(account.read(never, timeout_s=60))
    await asyncio.sleep(0.01)

    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    account.close()


async def test_read_of_a_slow_sender_ends_when_others_need_the_room():
    account = BodyBudget(100).open()
    reading = asyncio.ensure_future(account.read(never, timeout_s=60))
    await asyncio.sleep(0.01)
    account.evict_if_slow(patience_s=10, min_bytes_per_s=1)
    await asyncio.sleep(0)
    assert not reading.done()

    account.evict_if_slow(patience_s=0, min_bytes_per_s=1)
    assert await reading is None
    assert account.is_evicted
    account.close()
