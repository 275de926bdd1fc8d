"""What a trainer asks of services old and new: waiting, leases, the policy version."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from atroposlib.api.client import LeasedBatch, RetryRule, TrainerClient
from atroposlib.errors import TrajectoryApiError

GROUPS = [{"tokens": [[1]], "masks": [[1]], "scores": [0.0]}]


class ScriptedTrainerService(ThreadingHTTPServer):
    """Answers from a list of `(status, body)`, the last one again and again; keeps requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[tuple[int, Any]] = [(200, {})]
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def lines(self) -> list[str]:
        return [line for line, _, _ in self.requests]


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedTrainerService

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        line = f"{self.command} {self.path}"
        self.server.requests.append((line, dict(self.headers.items()), body))
        answers = self.server.answers
        status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[ScriptedTrainerService]:
    with ScriptedTrainerService() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(service: ScriptedTrainerService) -> Iterator[TrainerClient]:
    quick = RetryRule(first_delay_s=0.001)
    with TrainerClient(service.url, retry=quick) as trainer:
        yield trainer


def test_plain_batch_asks_as_trainers_always_did_and_offers_the_binary_format(service, client):
    service.answers = [(200, {"batch": GROUPS})]

    assert client.batch() == GROUPS

    ((line, headers, _),) = service.requests
    assert line == "GET /batch"
    assert headers["Accept"] == "application/msgpack; zstd=1, application/json;q=0.5"


@pytest.mark.parametrize("answer", [{}, {"uuid": None}, {"uuid": "x"}, [], "registered"])
def test_registration_without_an_id_names_the_address(service, client, answer):
    service.answers = [(200, answer)]

    with pytest.raises(TrajectoryApiError, match="/register: the response has no integer uuid"):
        client.register(batch_size=1)


def test_batch_says_how_long_to_wait(service, client):
    service.answers = [(200, {"batch": None})]

    assert client.batch(wait_s=20) is None
    assert service.lines == ["GET /batch?wait=20"]


def test_batch_wait_does_not_count_as_silence(service):
    with TrainerClient(service.url, timeout_s=0.5) as client:
        timeouts: list[dict[str, float]] = []
        client._client.event_hooks["request"] = [
            lambda request: timeouts.append(request.extensions["timeout"])
        ]
        client.batch(wait_s=20)
        client.status()

    assert [timeout["read"] for timeout in timeouts] == [20.5, 0.5]
    assert [timeout["connect"] for timeout in timeouts] == [0.5, 0.5]


def test_leased_batch_is_acknowledged_or_given_back_by_its_id(service, client):
    service.answers = [(200, {"batch": GROUPS, "batch_id": "7-1"}), (200, {"status": "acked"})]

    leased = client.batch(lease_s=600, wait_s=0.5)

    assert leased == LeasedBatch(GROUPS, "7-1")
    client.ack(leased.batch_id)
    client.nack(leased.batch_id)
    assert service.lines == [
        "GET /batch?lease=600&wait=0.5",
        "POST /batch/7-1/ack",
        "POST /batch/7-1/nack",
    ]


def test_lease_of_an_older_service_needs_no_acknowledgement(service, client):
    service.answers = [(200, {"batch": GROUPS})]

    leased = client.batch(lease_s=600)

    assert leased == LeasedBatch(GROUPS, None)
    client.ack(leased.batch_id)
    client.nack(leased.batch_id)
    assert len(service.requests) == 1


def test_acknowledgement_is_repeated_when_the_service_stumbles(service, client):
    service.answers = [(502, {}), (503, {}), (200, {"status": "acked"})]

    client.ack("7-1")

    assert service.lines == ["POST /batch/7-1/ack"] * 3


def test_acknowledgement_after_the_lease_is_an_error(service, client):
    service.answers = [(409, {"detail": "the lease of batch 7-1 has run out"})]

    with pytest.raises(TrajectoryApiError, match="lease of batch 7-1 has run out"):
        client.ack("7-1")


def test_policy_version_is_reported(service, client):
    assert client.set_policy_version(12) is True

    ((line, _, body),) = service.requests
    assert (line, json.loads(body)) == ("POST /policy", {"version": 12})


@pytest.mark.parametrize("status", [404, 405])
def test_policy_version_is_nothing_to_an_older_service(service, client, status):
    service.answers = [(status, {"detail": "Not Found"})]

    assert client.set_policy_version(12) is False


def test_policy_version_refused_is_an_error(service, client):
    service.answers = [(403, {"detail": "for trainers only"})]

    with pytest.raises(TrajectoryApiError, match="use a token of the right role"):
        client.set_policy_version(12)


def test_wait_until_up_does_not_wait_for_a_token_to_become_right(service, client):
    service.answers = [(401, {"detail": "unknown token"})]

    with pytest.raises(TrajectoryApiError, match="set ATROPOS_API_TOKEN"):
        client.wait_until_up(600)
