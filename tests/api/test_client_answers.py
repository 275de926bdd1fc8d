"""Responses that a trajectory service does not send: other forms, endless and compressed bodies."""

from __future__ import annotations

import gzip
import logging
import threading
from collections.abc import Awaitable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat

import pytest

from atroposlib.api import client_transport
from atroposlib.api.client import RetryRule, TrainerClient, TrajectoryApiClient, batches
from atroposlib.errors import TrajectoryApiError
from tests.api.helpers import make_group

BATCH = b'{"batch": [{"tokens": [[1]]}], "batch_id": "7-1"}'
GZIP_BATCH = gzip.compress(BATCH, mtime=0)
STATUS = b'{"current_step": 1, "queue_size": 0, %b}'
ONCE = RetryRule(attempts=1)
ENV = {"max_token_length": 9, "desired_name": "e", "weight": 1.0, "group_size": 2}


class RawService(ThreadingHTTPServer):
    """Answers every request with the same status, headers and pieces of a body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.headers: dict[str, str] = {}
        self.pieces: Iterable[bytes] = [BATCH]
        self.num_requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: RawService

    def _answer(self) -> None:
        self.server.num_requests += 1
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in self.server.pieces:
            try:
                self.wfile.write(piece)
            except OSError:  # the client has seen enough
                return

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


class Clock:
    """Advances by a constant at each look."""

    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self._tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


@pytest.fixture
def service() -> Iterator[RawService]:
    with RawService() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"[1,2]", "the response is a list, expected an object"),
        (b"null", "the response is null, expected an object"),
        (b'{"batch": "hello"}', "batch is a string, expected a list of groups or null"),
        (b'{"batch": {"a": 1}}', "batch is an object, expected a list of groups or null"),
        (b'{"batch": [{}, 2]}', r"batch\[1\] is a number, expected a group"),
        (b'{"batch": [], "batch_id": "7\\n1"}', r"batch_id is '7\\n1', expected printable"),
        (b'{"batch": [], "batch_id": {}}', r"batch_id is \{\}, expected printable"),
        (b"[" * 100_000 + b"]" * 100_000, r"answered 200 \(attempt 1\): \[\[\["),
        (b"<html>", r"answered 200 \(attempt 1\): <html>; the body cannot be decoded"),
    ],
)
def test_batch_of_another_form_names_what_came_and_the_address(service, body, found):
    service.pieces = [body]

    with (
        TrainerClient(service.url) as client,
        pytest.raises(TrajectoryApiError, match=found) as raised,
    ):
        client.batch(lease_s=600)

    assert f"GET {service.url}/batch" in str(raised.value)
    assert "is not a current trajectory service" in str(raised.value)
    assert service.num_requests == 1


@pytest.mark.parametrize("body", [b"[1,2]", b"null", b"7"])
def test_status_of_another_form_names_the_address(service, body):
    service.pieces = [body]

    with (
        TrainerClient(service.url) as client,
        pytest.raises(TrajectoryApiError, match="/status: the response is"),
    ):
        client.status()


def test_iterator_without_a_step_in_the_status_names_the_address(service):
    service.pieces = [b'{"uuid": 1}']

    with (
        pytest.raises(TrajectoryApiError, match="/status: current_step is null, expected an int"),
        batches(service.url, batch_size=1, num_steps=1) as stream,
    ):
        next(stream)


def test_gzip_response_is_decompressed(service):
    service.headers = {"Content-Encoding": "gzip"}
    service.pieces = [GZIP_BATCH]

    with TrainerClient(service.url) as client:
        assert client.batch() == [{"tokens": [[1]]}]


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip"])
def test_response_in_another_encoding_is_refused(service, encoding):
    service.headers = {"Content-Encoding": encoding}

    with (
        TrainerClient(service.url) as client,
        pytest.raises(TrajectoryApiError, match=f"encoded as '{encoding}', expected gzip"),
    ):
        client.batch()


@pytest.mark.parametrize(
    ("body", "fault"),
    [(b"no gzip", "is not gzip"), (GZIP_BATCH[:-9], "ends within its gzip stream")],
)
def test_damaged_gzip_response_is_retried_and_refused(service, body, fault):
    service.headers = {"Content-Encoding": "gzip"}
    service.pieces = [body]

    with (
        TrainerClient(service.url, retry=RetryRule(attempts=2, first_delay_s=0.001)) as client,
        pytest.raises(TrajectoryApiError, match=fault),
    ):
        client.batch()

    assert service.num_requests == 2


@pytest.mark.parametrize("is_gzip", [False, True])
def test_response_above_the_limit_is_refused_before_it_is_complete(service, is_gzip):
    body = b" " * 2**22
    service.headers = {"Content-Encoding": "gzip"} if is_gzip else {}
    # Without its end, so that the error cannot come after it.
    service.pieces = [gzip.compress(body)[:-9] if is_gzip else body]

    with (
        TrainerClient(service.url, max_answer_bytes=2**20) as client,
        pytest.raises(TrajectoryApiError, match="the response is larger than 1048576 bytes"),
    ):
        client.batch()

    assert service.num_requests == 1


def test_response_that_trickles_is_logged_and_given_up_like_a_lost_connection(service, caplog):
    caplog.set_level(logging.INFO, logger="atroposlib.api.client_transport")
    service.headers = {"Content-Length": str(2**26)}
    service.pieces = [b" " * 2**20] * 64
    clock = Clock(tick_s=20.0)

    with (
        TrainerClient(
            service.url,
            retry=RetryRule(attempts=2, deadline_s=1e6),
            answer_limit_s=100.0,
            clock=clock,
            sleep=lambda seconds: None,
        ) as client,
        pytest.raises(TrajectoryApiError, match=r"not complete after 100 s, .* bytes have arrived"),
    ):
        client.batch()

    assert service.num_requests == 2
    assert "bytes of the response have arrived" in caplog.text


def test_wait_of_the_service_is_added_to_the_limit_of_a_response(service):
    clock = Clock(tick_s=20.0)

    with TrainerClient(service.url, answer_limit_s=1.0, clock=clock) as client:
        assert client.batch(wait_s=1000) == [{"tokens": [[1]]}]


def test_acknowledgement_quotes_the_id_of_a_batch(service):
    service.pieces = [b'{"status": "acked"}']

    with TrainerClient(service.url) as client:
        client.ack("../7\n1")
        client.nack("../7\n1")

    assert service.num_requests == 2


def ask_env_status(client: TrajectoryApiClient) -> Awaitable[object]:
    return client.status_env(3)


def register_env(client: TrajectoryApiClient) -> Awaitable[object]:
    return client.register_env(**ENV)


@pytest.mark.parametrize(
    ("ask", "path", "body", "found"),
    [
        (TrajectoryApiClient.info, "/info", b"[1]", "the response is a list"),
        (TrajectoryApiClient.info, "/info", b"{}", "missing required field `batch_size`"),
        (TrajectoryApiClient.wandb_info, "/wandb_info", b"{}", "missing required field `project`"),
        (TrajectoryApiClient.status, "/status", b'{"current_step": "a"}', r"`\$.current_step`"),
        (register_env, "/register-env", b'"ok"', "the response is a string"),
        (register_env, "/register-env", b'{"status": "success"}', "missing required field"),
        (ask_env_status, "/status-env", b'{"current_step": null}', r"`\$.current_step`"),
        (ask_env_status, "/status-env", STATUS % b'"max_group_size": 0', r"`\$.max_group_size`"),
        (ask_env_status, "/status-env", STATUS % b'"unallocated_fraction": 1e308', "fraction`"),
        (ask_env_status, "/status-env", STATUS % b'"policy_version": "x"', r"`\$.policy_version`"),
    ],
)
async def test_response_of_another_form_to_an_environment_names_the_address(
    service, ask, path, body, found
):
    service.pieces = [body]

    async with TrajectoryApiClient(service.url) as client:
        with pytest.raises(TrajectoryApiError, match=found) as caught:
            await ask(client)

    assert f"{service.url}{path}: " in str(caught.value)
    assert caught.value.status == 200


async def test_posted_group_is_not_delivered_if_the_response_is_no_object(service):
    service.pieces = [b"[]"]

    async with TrajectoryApiClient(service.url, post_retry=ONCE) as client:
        with pytest.raises(TrajectoryApiError, match="the response is a list"):
            await client.post_group(make_group(1))


@pytest.mark.parametrize("is_gzip", [False, True])
async def test_response_to_an_environment_is_refused_above_the_limit(service, monkeypatch, is_gzip):
    monkeypatch.setattr(client_transport, "MAX_SHORT_ANSWER_BYTES", 2**20)
    body = b" " * 2**22
    service.headers = {"Content-Encoding": "gzip"} if is_gzip else {}
    # Without its end, so that the error cannot come after it.
    service.pieces = [gzip.compress(body)[:-9] if is_gzip else body]

    async with TrajectoryApiClient(service.url) as client:
        with pytest.raises(TrajectoryApiError, match="larger than 1048576 bytes"):
            await client.info()


async def test_error_response_without_end_keeps_its_status(service):
    service.status = 500
    service.pieces = repeat(b" " * 2**16)

    async with TrajectoryApiClient(service.url, retry=ONCE) as client:
        with pytest.raises(TrajectoryApiError) as caught:
            await client.info()

    assert caught.value.status == 500
