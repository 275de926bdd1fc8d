"""A real service under attack: refuses with the right status, in bounded memory, and goes on."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.api.responses import ObservedHttpProtocol
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.utils.request_limits import BodyBudget, Pace
from tests.api.helpers import REGISTRATION, make_group, serve
from tests.api.soak.service_process import Replica

MIB = 1024 * 1024
GIB = 1024 * MIB
MAX_GROWTH_BYTES = 300 * MIB
JSON = {"Content-Type": "application/json"}
GZIP = {**JSON, "Content-Encoding": "gzip"}
BINARY = {"Content-Type": "application/msgpack"}
GROUP = json.dumps(make_group(1)).encode()
NUM_AT_ONCE = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc"
    ),
]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A `run-api` on a file, with the limits it has by default."""
    replica = Replica(tmp_path_factory.mktemp("runs"), "sqlite")
    replica.start()
    yield replica
    replica.stop()


@pytest.fixture(scope="module")
def client(replica: Replica) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        yield client


@pytest.fixture
def target(replica: Replica, client: httpx.Client) -> Iterator[Replica]:
    """The same service: whatever a test does to it, others are served, and nothing is stored."""
    before = client.get("/status").json()
    with watched(replica, MAX_GROWTH_BYTES):
        yield replica
    assert client.get("/status").json() == before


def resident_bytes(pid: int) -> int:
    """Memory that the process has filled itself, without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def watched(replica: Replica, max_growth_bytes: int) -> Iterator[None]:
    """Ask for `/info` all the time, which must be answered; then compare how the memory grew."""
    is_over = threading.Event()
    sizes = [resident_bytes(replica.pid)]
    statuses: list[int | httpx.HTTPError] = []

    def look() -> None:
        with httpx.Client(base_url=replica.url, timeout=30) as client:
            while not is_over.wait(0.01) or len(sizes) == 1:
                try:
                    statuses.append(client.get("/info").status_code)
                except httpx.HTTPError as error:
                    statuses.append(error)
                sizes.append(resident_bytes(replica.pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    print(f"grew by {(max(sizes) - sizes[0]) / MIB:.0f} MiB")
    assert set(statuses) == {200}
    assert max(sizes) - sizes[0] < max_growth_bytes


def post_at_once(replica: Replica, body: bytes, headers: dict[str, str]) -> set[int]:
    """Post the same body from several clients at a time; return the statuses of the answers."""
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(
            httpx.post(f"{replica.url}/scored_data", content=body, headers=headers, timeout=60)
        )

    threads = [threading.Thread(target=post) for _ in range(NUM_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == NUM_AT_ONCE
    return {answer.status_code for answer in answers}


def speak(replica: Replica, *sent: bytes) -> bytes:
    """Send bytes over a connection of their own; return what is answered before it ends."""
    answered = b""
    with socket.create_connection(("127.0.0.1", replica.port), timeout=10) as connection:
        with contextlib.suppress(OSError):  # answered and closed in the middle
            for piece in sent:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                answered += piece
    return answered


def post_of(headers: str, body: bytes = b"") -> bytes:
    return f"POST /scored_data HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode() + body


def status_in(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.fixture(scope="module")
def gzip_bomb() -> bytes:
    """A GiB of spaces in one gzip member, whose end nobody reaches."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(b" " * (16 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return gzip.compress(b"")[:10] + block * (GIB // (16 * MIB))


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register", "/status-env"])
def test_gzip_bomb_is_413(target, client, gzip_bomb, path):
    assert client.post(path, content=gzip_bomb, headers=GZIP).status_code == 413


@pytest.mark.long
def test_gzip_bombs_at_once_share_the_memory_for_bodies(replica, gzip_bomb):
    settings = ApiSettings()
    share_bytes = settings.max_buffered_bytes + settings.max_body_bytes

    with watched(replica, share_bytes + MAX_GROWTH_BYTES // 4):
        assert post_at_once(replica, gzip_bomb, GZIP) == {413}


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip"])
def test_gzip_in_gzip_is_refused(target, client, gzip_bomb, encoding):
    headers = {**JSON, "Content-Encoding": encoding}

    for inner in (gzip.compress(GROUP), gzip_bomb):
        answer = client.post("/scored_data", content=gzip.compress(inner), headers=headers)
        assert answer.status_code in (400, 415)


@pytest.fixture(scope="module")
def zstd_bombs() -> dict[str, bytes]:
    """A GiB of zeros: one frame that says so, and one that does not."""
    zstandard = pytest.importorskip("zstandard")
    bombs = {}
    for name, size in (("honest", GIB), ("silent", -1)):
        packer = zstandard.ZstdCompressor(level=-5).compressobj(size=size)
        packed = [packer.compress(bytes(4 * MIB)) for _ in range(GIB // (4 * MIB))]
        bombs[name] = b"".join([*packed, packer.flush()])
    return bombs


@pytest.mark.parametrize(("kind", "status"), [("honest", 413), ("silent", 422)])
def test_zstd_bomb_is_refused(target, client, zstd_bombs, kind, status):
    bomb = zstd_bombs[kind]
    listed = b"\xdc\x00\x10" + 16 * (b"\xc6" + len(bomb).to_bytes(4, "big") + bomb)

    answers = [
        client.post("/scored_data", content=bomb, headers=BINARY),
        client.post("/scored_data_list", content=listed, headers=BINARY),
    ]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert post_at_once(target, bomb, BINARY) == {status}


DEEP = b"[" * 1_000_000 + b"]" * 1_000_000
DEEP_OBJECTS = b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register",
                                  "/register-env", "/disconnect-env", "/status-env",
                                  "/policy"])  # fmt: skip
def test_deep_nesting_is_the_client_s_fault(target, client, path):
    for deep in (DEEP, DEEP_OBJECTS, DEEP[:1_000_000]):
        inside = GROUP[:-1] + b', "images": ' + deep + b"}"
        for body in (deep, inside, b"[" + inside + b"]"):
            answer = client.post(path, content=body, headers=JSON)
            assert answer.status_code in (400, 422)


@pytest.mark.parametrize(
    "body",
    [
        GROUP.decode().encode("utf-16"),
        GROUP.decode().encode("utf-16-be"),
        GROUP.decode().encode("utf-32"),
        b"\xef\xbb\xbf\xff" + GROUP,
        GROUP[:-1] + ', "images": "é"}'.encode("latin-1"),
        GROUP[:-1] + b', "images": "\xed\xa0\x80"}',
        GROUP[:-1] + b', "images": "\\ud800"}',
        GROUP[:-1] + b', "images": "\xf5\x80\x80\x80"}',
        GROUP[:-1] + b', "images": "\xc0\xaf"}',
        GROUP[:-1] + b', "images": "\x00"}',
        GROUP[:-1] + b', "\xff": 1}',
        b"\xff" * 100_000,
    ],
    ids=lambda body: repr(body[-12:]),
)
def test_text_that_is_not_utf_8_is_refused(target, client, body):
    for charset in ("", "; charset=utf-8", "; charset=utf-16", "; charset=latin-1", "; charset=x"):
        headers = {"Content-Type": "application/json" + charset}
        one = client.post("/scored_data", content=body, headers=headers)
        listed = b"[" + body + b"]"
        several = client.post("/scored_data_list", content=listed, headers=headers)
        assert {one.status_code, several.status_code} <= {400, 422}


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        (f"Content-Length: {len(GROUP) + 10}", {0}),  # the client leaves in the middle
        ("Content-Length: 10", {400, 422}),  # the rest is no request
        ("Content-Length: -1", {400}),
        ("Content-Length: 1e3", {400}),
        (f"Content-Length: {10**30}", {400, 413}),
        (f"Content-Length: {2**63}", {400, 413}),
        (f"Content-Length: {GIB}", {413}),
        (f"Content-Length: 5\r\nContent-Length: {len(GROUP)}", {400}),
        (f"Content-Length: {len(GROUP)}\r\nTransfer-Encoding: chunked", {400}),
        ("Transfer-Encoding: chunked", {400}),  # no chunk begins so
        ("Transfer-Encoding: gzip, x", {400}),
    ],
)
def test_lengths_that_lie_store_nothing(target, headers, statuses):
    answer = speak(target, post_of(headers, GROUP))

    assert (status_in(answer) if answer else 0) in statuses


def test_chunks_that_lie_are_refused(target):
    for chunk in (b"ffffffffffffffffff\r\n", b"-5\r\nx", b"5\r\nabc\r\n0\r\n\r\n"):
        answer = speak(target, post_of("Transfer-Encoding: chunked"), chunk)
        assert not answer or status_in(answer) == 400


def test_senders_that_stop_hold_up_nobody(target, client):
    heads = [
        post_of("Content-Length: 100", b"{"),
        post_of("Content-Length: 100000000", b"{" * 60_000),
        post_of("Transfer-Encoding: chunked", b"5\r\n{"),
        post_of("Content-Encoding: gzip\r\nContent-Length: 5000", b"\x1f\x8b"),
        b"POST /scored_data HT",
    ]
    connections = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(300)]
    try:
        for number, connection in enumerate(connections):
            connection.sendall(heads[number % len(heads)])
        for _ in range(5):
            time.sleep(0.1)
            for connection in connections:
                with contextlib.suppress(OSError):  # what came made no sense
                    connection.sendall(b"0")
            assert client.post("/scored_data", content=b"{}").status_code == 422
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("head", [b"", b"POST /scored_data HTTP/1.1\r\nHo",
                                  post_of("Content-Length: 9", b"{"),
                                  post_of("Transfer-Encoding: chunked", b"2\r\n{")])  # fmt: skip
def test_sender_that_falls_silent_is_let_go(monkeypatch, free_port, head):
    monkeypatch.setattr(ObservedHttpProtocol, "max_silence_s", 0.2)

    with (
        serve(create_app(), free_port),
        socket.create_connection(("127.0.0.1", free_port), timeout=10) as connection,
    ):
        connection.sendall(head)
        answer = connection.recv(65536)
        rest = connection.recv(65536)

    assert (status_in(answer), rest) == (408, b"")


def test_head_that_never_ends_takes_as_long_as_silence(monkeypatch, free_port):
    monkeypatch.setattr(ObservedHttpProtocol, "max_silence_s", 0.3)

    with (
        serve(create_app(), free_port),
        socket.create_connection(("127.0.0.1", free_port), timeout=0.05) as connection,
    ):
        connection.sendall(b"GET /info HTTP/1.1\r\nX: ")
        answer, started = b"", time.monotonic()
        while not answer and time.monotonic() < started + 5:
            connection.sendall(b"y")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)

    assert status_in(answer) == 408


def test_sender_whose_body_the_service_does_not_read_is_not_silent(monkeypatch, free_port):
    monkeypatch.setattr(ObservedHttpProtocol, "max_silence_s", 0.2)
    app = create_app(ApiSettings(max_buffered_bytes=1))
    long_body = json.dumps(make_group(4, length=200_000)).encode()

    def slowly() -> Iterator[bytes]:
        for piece in (GROUP[:9], *[b" "] * 10, GROUP[9:]):
            yield piece
            time.sleep(0.05)

    with serve(app, free_port) as url, ThreadPoolExecutor() as threads:
        first = threads.submit(httpx.post, f"{url}/scored_data", content=slowly())
        time.sleep(0.05)
        second = httpx.post(f"{url}/scored_data", content=long_body)

    assert (first.result().status_code, second.status_code) == (200, 200)


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: 10000",
        "Content-Length: 1000000",
        "Transfer-Encoding: chunked",
        "Content-Encoding: gzip\r\nContent-Length: 50000",
    ],
)
def test_sender_that_trickles_is_let_go(monkeypatch, free_port, headers):
    body = gzip.compress(GROUP + b" " * 10**7) if "gzip" in headers else b" " * 10_000
    drops = iter(b"2000\r\n" + body if "chunked" in headers else body)
    monkeypatch.setattr(Pace, "grace_s", 0.3)
    monkeypatch.setattr(ObservedHttpProtocol, "max_silence_s", 0.3)

    with (
        serve(create_app(), free_port),
        socket.create_connection(("127.0.0.1", free_port), timeout=0.05) as connection,
    ):
        connection.sendall(post_of(headers))
        answer, started = b"", time.monotonic()
        while not answer and time.monotonic() < started + 20:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(bytes([next(drops)]))
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)

    assert status_in(answer) == 408


def test_slow_uploads_give_way_to_an_honest_one(monkeypatch, free_port):
    monkeypatch.setattr(BodyBudget, "patience_s", 0.1)
    app = create_app(ApiSettings(max_buffered_bytes=MIB))
    honest = json.dumps(make_group(4, length=20_000)).encode()
    head = post_of("Content-Length: 10000000")

    with serve(app, free_port) as url, contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", free_port), timeout=30))
            for _ in range(4)
        ]
        for connection in slow:
            connection.sendall(head + b"0" * 300_000)
        answer = httpx.post(f"{url}/scored_data", content=honest, timeout=30)
        refused = [connection.recv(65536) for connection in slow]

    assert answer.status_code == 200
    assert {status_in(text) for text in refused} == {503}
    assert all(b"retry-after: 10" in text.lower() for text in refused)


@pytest.mark.parametrize(("count", "size"), [(1, 2), (10_000, 2), (40, 9_000), (3, 400_000)])
def test_requests_sent_at_once_are_answered_one_after_the_other(target, count, size):
    """Pipelined, as HTTP/1.1 allows, whether they or their bodies are below or above 64 KiB."""
    body = b"[" + b" " * (size - 2) + b"]"
    post = post_of(f"Content-Type: application/json\r\nContent-Length: {len(body)}", body)
    last = b"GET /info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    with socket.create_connection(("127.0.0.1", target.port), timeout=60) as connection:
        sending = threading.Thread(target=connection.sendall, args=(post * count + last,))
        sending.start()
        answered = b""
        while piece := connection.recv(2**20):
            answered += piece
        sending.join()

    assert answered.count(b"HTTP/1.1 422 ") == count
    assert answered.count(b"HTTP/1.1 200 OK") == 1


def test_clients_that_wait_for_their_next_request_or_answer_are_not_silent(monkeypatch, free_port):
    monkeypatch.setattr(ObservedHttpProtocol, "max_silence_s", 0.1)

    with serve(create_app(), free_port) as url, httpx.Client(base_url=url) as client:
        client.get("/info")
        time.sleep(0.15)
        client.post("/register", json=REGISTRATION)
        answer = client.get("/batch?wait=0.3")

    assert answer.json() == {"batch": None}


@pytest.mark.parametrize("piece", [b"X: " + b"y" * 60_000 + b"\r\n", b"X: y\r\n" * 10_000])
def test_headers_without_end_are_refused(target, piece):
    answer = speak(target, b"GET /info HTTP/1.1\r\nHost: x\r\n", *[piece] * 2_000)

    assert not answer or status_in(answer) in (400, 431)


def test_address_without_end_is_refused(target):
    answer = speak(target, b"GET /", *[b"a" * 60_000] * 2_000)

    assert not answer or status_in(answer) in (400, 431)


@pytest.mark.parametrize("position", [0, 7_777, 9_999])
def test_one_bad_group_among_ten_thousand_stores_none(target, client, position):
    groups: list[dict[str, Any]] = [make_group(1) for _ in range(10_000)]
    groups[position]["masks"] = [[1, 2, 3]]

    answer = client.post("/scored_data_list", json=groups)

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", position, "masks", 0]
