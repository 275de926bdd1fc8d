"""Batches over HTTP: leases, long polls, formats, and clients that leave in the middle."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from atroposlib.api.client_transport import leased_batch
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.utils.request_limits import Pace
from atroposlib.wire import decode_batch, encode_group
from tests.api.helpers import REGISTRATION, Service, make_group, serve

pytestmark = pytest.mark.slow

MSGPACK = "application/msgpack"


@pytest.fixture
def service() -> Service:
    service = Service()
    service.register(batch_size=2)
    return service


@pytest.fixture
def live(free_port: int) -> Iterator[httpx.Client]:
    """A service on a port, with a trainer whose batches are one sequence each."""
    with serve(create_app(), free_port) as url, httpx.Client(base_url=url, timeout=30) as client:
        client.post("/register", json={**REGISTRATION, "batch_size": 1})
        yield client


def test_sizes_that_do_not_add_up_form_a_short_batch_for_a_trainer_that_accepts_it() -> None:
    exact, short = Service(), Service()
    for service in (exact, short):
        service.register(batch_size=4, **({"short_batches": True} if service is short else {}))
        for _ in range(2):
            service.post("/scored_data", json=make_group(3)).raise_for_status()

    assert exact.get("/batch").json()["batch"] is None
    reasons = {stall["reason"] for stall in exact.get("/status").json()["stalls"]}
    assert reasons == {"batch/unreachable"}
    assert short.get("/status").json().get("stalls", []) == []
    assert [len(group["tokens"]) for group in short.get("/batch").json()["batch"]] == [3]
    assert short.get("/batch").json()["batch"] is None  # 3 of 4 wait for more


def test_registering_again_may_leave_out_that_short_batches_are_accepted() -> None:
    service = Service()
    service.register(batch_size=4, short_batches=True)

    assert service.register(batch_size=4).status_code == 200
    service.post("/scored_data", json=make_group(3))
    service.post("/scored_data", json=make_group(3))
    assert service.get("/batch").json()["batch"] is not None


def ask(live: httpx.Client, path: str) -> socket.socket:
    """Send a GET and return the connection, unread."""
    connection = socket.create_connection((live.base_url.host, live.base_url.port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return connection


def wait_for_batch(live: httpx.Client) -> list[dict[str, Any]]:
    batch = live.get("/batch?wait=10").json()["batch"]
    assert batch is not None
    return batch


def test_trainer_that_registered_at_one_replica_asks_another_at_once(redis_server):
    settings = ApiSettings(store=redis_server.url, run_name="asked-elsewhere")
    with Service(settings) as here, Service(settings) as there:
        here.register()

        assert there.get("/batch").json() == {"batch": None}


def test_lease_counts_once_the_batch_is_acknowledged(service):
    service.push(2)

    leased = service.get("/batch?lease=60").json()

    assert leased["lease_expires_in_s"] == 60
    assert [group["scores"] for group in leased["batch"]] == [[0, 0]]
    assert service.status()["current_step"] == 0
    path = f"/batch/{leased['batch_id']}/ack"
    assert service.post(path).json() == {"status": "acknowledged", "current_step": 1}
    assert service.post(path).json() == {"status": "already acknowledged", "current_step": 1}
    assert service.take() is None


def test_acknowledgement_makes_a_step_only_where_the_trainer_has_done_more(service):
    service.push(*[2] * 5)

    steps = []
    for steps_done in ("1", "1", "0", "7", None):
        batch_id = service.get("/batch?lease=60").json()["batch_id"]
        query = "" if steps_done is None else f"?steps_done={steps_done}"
        answer = service.post(f"/batch/{batch_id}/ack{query}").json()
        assert answer["status"] == "acknowledged"
        steps.append(answer["current_step"])

    assert steps == [1, 1, 1, 2, 3]
    assert service.post("/batch/0-1/ack?steps_done=-1").status_code == 422
    assert service.get("/metrics").text.count("atropos_batches_without_step_total 2.0") == 1


def test_lease_names_the_policy_version_of_each_group_whatever_its_format(service):
    group = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.5]}
    service.register(batch_size=2)
    service.post("/scored_data", json={**group, "policy_version": 3})
    service.post("/scored_data", json=group)

    leased = service.get("/batch?lease=60").json()

    assert leased["policy_versions"] == [3, 0]  # the second arrived at step 0
    assert all("policy_version" not in delivered for delivered in leased["batch"])
    filled = leased_batch(leased, "http://x")
    assert [delivered["policy_version"] for delivered in filled.groups] == [3, 0]
    older = {key: value for key, value in leased.items() if key != "policy_versions"}
    assert leased_batch({**older, "batch": [group]}, "http://x").groups == [group]


@pytest.mark.parametrize(("taken", "listed"), [("json", [3, 0]), ("msgpack", [None, None])])
def test_lease_as_json_names_the_policy_version_of_binary_groups(service, taken, listed):
    group = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.5]}
    service.register(batch_size=2)
    for sampled in ({**group, "policy_version": 3}, group):
        body = encode_group(sampled, "msgpack")
        service.post("/scored_data", content=body, headers={"Content-Type": MSGPACK})

    accept = {"json": "application/json", "msgpack": MSGPACK}[taken]
    answer = service.get("/batch?lease=60", headers={"Accept": accept})
    leased = decode_batch(answer.content, taken)

    assert leased["policy_versions"] == listed
    filled = leased_batch(leased, "http://x")
    assert filled.groups[0]["policy_version"] == 3  # whichever way it was delivered


def test_lease_given_back_is_the_next_to_leave_under_another_name(service):
    service.push(2, 2)
    leased = service.get("/batch?lease=60").json()

    first = service.post(f"/batch/{leased['batch_id']}/nack")
    again = service.post(f"/batch/{leased['batch_id']}/nack")

    assert first.json() == {"status": "returned", "current_step": 0}
    assert again.json() == {"status": "already returned", "current_step": 0}
    renewed = service.get("/batch?lease=60").json()
    assert renewed["batch"] == leased["batch"]
    assert renewed["batch_id"] != leased["batch_id"]
    late = service.post(f"/batch/{leased['batch_id']}/ack")
    assert late.status_code == 409
    assert "redelivered" in late.json()["detail"]


@pytest.mark.slow
def test_lease_that_expired_is_the_next_to_leave(service):
    service.push(2)
    leased = service.get("/batch?lease=1").json()
    with service:  # what is done once a second is done
        time.sleep(2.5)

    assert service.get("/batch").json()["batch"] == leased["batch"]
    assert service.post(f"/batch/{leased['batch_id']}/ack").status_code == 409


@pytest.mark.parametrize("call", ["ack", "nack"])
@pytest.mark.parametrize("batch_id", ["99-1", "nonsense", "0-7", "é"])
def test_batch_nobody_knows_is_404(service, call, batch_id):
    assert service.post(f"/batch/{batch_id}/{call}").status_code == 404


@pytest.mark.parametrize("query", ["lease=0", "lease=86401", "lease=nan", "lease=x", "wait=-1",
                                   "wait=301", "wait=inf"])  # fmt: skip
def test_lease_and_wait_out_of_range_are_422(service, query):
    answer = service.get(f"/batch?{query}")

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", query.partition("=")[0]]


def test_wait_ends_when_a_batch_can_be_formed(live):
    asked = ask(live, "/batch?wait=30")
    time.sleep(0.05)

    live.post("/scored_data", json=make_group(1, score=5))

    asked.settimeout(10)
    with asked:
        received = b""
        while b'"scores":[5' not in received:
            piece = asked.recv(65536)
            assert piece, received
            received += piece


def test_wait_without_a_batch_ends_in_time(service):
    started = time.monotonic()

    assert service.get("/batch?wait=0.05").json() == {"batch": None}
    assert time.monotonic() - started >= 0.05


def test_wait_of_a_client_that_left_takes_no_batch(live):
    ask(live, "/batch?wait=300").close()
    time.sleep(0.05)

    live.post("/scored_data", json=make_group(1, score=3))

    assert wait_for_batch(live)[0]["scores"] == [3]


@pytest.mark.parametrize("path", ["/batch", "/batch?lease=600"])
def test_batch_of_a_client_that_left_in_the_middle_leaves_again(live, path):
    live.post("/scored_data", json=make_group(1, length=1_000_000, score=1))
    with ask(live, path) as vanishing:
        assert vanishing.recv(1000).startswith(b"HTTP/1.1 200")
        assert live.get("/batch").json() == {"batch": None}  # in flight: nobody else gets it
        assert live.get("/status").json()["current_step"] == 0

    assert wait_for_batch(live)[0]["scores"] == [1]
    assert live.get("/status").json()["current_step"] == 1
    assert live.get("/batch").json() == {"batch": None}


def test_requests_are_served_while_a_slow_client_takes_its_batch(live):
    live.post("/scored_data", json=make_group(1, length=2_000_000))
    with ask(live, "/batch") as slow:
        slow.recv(1000)
        times = []
        for _ in range(50):
            started = time.monotonic()
            live.get("/health/live")
            times.append(time.monotonic() - started)

    assert sorted(times)[25] < 0.05


@pytest.mark.parametrize("posted", ["json", "msgpack"])
@pytest.mark.parametrize("taken", ["json", "msgpack"])
@pytest.mark.parametrize("lease", ["", "?lease=9"])
def test_groups_cross_formats_unchanged(service, posted, taken, lease):
    messages = [[{"role": "user", "content": "é"}]] * 2
    group = {**make_group(2, length=5, score=0.25), "messages": messages, "env_id": 4}
    media_type = {"json": "application/json", "msgpack": MSGPACK}
    body = encode_group(group, posted)
    headers = {"Content-Type": media_type[posted]}
    assert service.post("/scored_data", content=body, headers=headers).status_code == 200

    answer = service.get(f"/batch{lease}", headers={"Accept": media_type[taken]})

    assert answer.headers["content-type"] == media_type[taken]
    decoded = decode_batch(answer.content, taken)
    assert ("batch_id" in decoded) == bool(lease)
    (delivered,) = decoded["batch"]
    assert {key: delivered[key] for key in group} == group


def test_binary_answers_without_a_batch_are_binary(service):
    binary = {"Accept": MSGPACK}

    waiting = service.get("/batch", headers=binary)
    nobody = Service().get("/batch", headers=binary)

    assert msgspec.msgpack.decode(waiting.content) == {"batch": None}
    assert msgspec.msgpack.decode(nobody.content)["status"] == "error"


def test_binary_batches_are_not_compressed_again(service):
    body = encode_group(make_group(2, length=5000), "msgpack")
    service.post("/scored_data", content=body, headers={"Content-Type": MSGPACK})

    answer = service.get("/batch", headers={"Accept": MSGPACK, "Accept-Encoding": "gzip"})

    assert "content-encoding" not in answer.headers
    assert decode_batch(answer.content, "msgpack")["batch"][0]["scores"] == [0, 0]


@pytest.mark.parametrize("path", ["/info", "/wandb_info"])
def test_formats_are_advertised(service, path):
    assert service.get(path).headers["accept-post"] == f"application/json, {MSGPACK}"


def test_formats_are_advertised_to_who_registers(service):
    service.get("/batch")
    request = {"max_token_length": 1, "desired_name": "e", "weight": 1}
    for path, body in (("/register-env", request), ("/register", {**REGISTRATION,
                                                                  "batch_size": 2})):  # fmt: skip
        answer = service.post(path, json=body)

        assert (answer.status_code, MSGPACK in answer.headers["accept-post"]) == (200, True)


def test_policy_version_is_told_to_environments(service):
    service.get("/batch")
    service.register_env()

    answer = service.post("/policy", json={"version": 7})

    assert answer.json() == {"status": "success", "policy_version": 7}
    assert service.status_env(0).json()["policy_version"] == 7
    assert service.status()["policy_version"] == 7


@pytest.mark.parametrize("version", [-1, 1.5, None, 2**70])
def test_policy_version_that_is_none_is_422(service, version):
    assert service.post("/policy", json={"version": version}).status_code == 422


def test_batches_leave_once_each_when_many_ask_at_once(live):
    live.post("/scored_data_list", json=[make_group(1, score=i) for i in range(60)])
    taken: list[float] = []

    def take() -> None:
        with httpx.Client(base_url=live.base_url, timeout=30) as client:
            while (batch := client.get("/batch").json()["batch"]) is not None:
                taken.append(batch[0]["scores"][0])

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(taken) == list(range(60))


@pytest.mark.parametrize("path", ["/batch", "/batch?lease=3600"])
@pytest.mark.long
def test_batch_of_a_client_that_does_not_read_leaves_again(live, monkeypatch, path):
    large = make_group(1, length=4_000_000)
    live.post("/scored_data", json=large)

    monkeypatch.setattr(Pace, "grace_s", 0.4)
    with ask(live, path) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        batch = None
        while batch is None:  # pytest's time limit ends it
            with contextlib.suppress(httpx.TransportError):  # a busy machine reads as slowly
                batch = live.get("/batch?wait=10").json()["batch"]

    assert len(batch[0]["tokens"][0]) == 4_000_000


def test_batches_in_flight_are_bounded():
    service = Service(ApiSettings(max_batches_in_flight=2))
    service.register(batch_size=1)
    service.push(1, 1, 1)
    first, _ = [service.get("/batch?lease=60").json()["batch_id"] for _ in range(2)]

    refused = service.get("/batch?lease=60")
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "5"
    assert "2 batches are with trainers and not acknowledged" in refused.json()["detail"]
    assert service.get("/batch").status_code == 429

    service.post(f"/batch/{first}/ack")
    assert service.get("/batch?lease=60").json()["batch"]
    assert service.get("/batch?lease=60").json() == {"batch": None}


def test_requests_that_wait_are_bounded(free_port):
    app = create_app(ApiSettings(max_waiting_requests=2))
    with serve(app, free_port) as url, httpx.Client(base_url=url, timeout=30) as live:
        live.post("/register", json={**REGISTRATION, "batch_size": 1})
        with ask(live, "/batch?wait=60"), ask(live, "/batch?wait=60"):
            while len(app.state.run._deliveries._waiters) < 2:
                time.sleep(0.01)
            refused = live.get("/batch?wait=60")
            at_once = live.get("/batch")

        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        assert "2 requests wait for a batch already" in refused.json()["detail"]
        assert at_once.json() == {"batch": None}
        assert app.state.run.counters["requests/refused_busy"] == 1
