"""Whether a body arrived: what is told of clients that read, leave early, or leave at once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable, Iterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from atroposlib.api.middleware import Deflater
from atroposlib.api.responses import EXTENSION, Connection, JoiningTransport, PiecesResponse
from tests.api.helpers import serve

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Told:
    """An application that sends one body to everybody and keeps what became of it."""

    def __init__(self) -> None:
        self.pieces = [b"x" * MIB] * 16
        self.deflater: Deflater | None = None
        self.arrivals: list[bool] = []
        self._changed = threading.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        response = PiecesResponse(
            self.pieces,
            deflater=self.deflater,
            on_arrived=lambda: self._note(True),
            on_lost=lambda: self._note(False),
        )
        await response(scope, receive, send)

    async def _note(self, has_arrived: bool) -> None:
        await asyncio.sleep(0)
        with self._changed:
            self.arrivals.append(has_arrived)
            self._changed.notify_all()

    def wait(self, count: int) -> list[bool]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrivals) >= count, timeout=60)
        return self.arrivals


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def port(told: Told, free_port: int) -> Iterator[int]:
    with serve(told, free_port):
        yield free_port


def test_arrival_of_a_body_that_was_read_is_told_before_the_next_request(told, port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for count in range(1, 6):
            assert len(client.get("/").content) == 16 * MIB
            client.get("/")
            assert told.arrivals[: 2 * count - 1] == [True] * (2 * count - 1)


@pytest.mark.parametrize("num_bytes", [10, 100_000, 3 * MIB])
def test_arrival_at_a_client_that_closes_after_the_last_byte_is_told(told, port, num_bytes):
    told.pieces = [b"x" * num_bytes]
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(ASK)
            left = num_bytes
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(65536)
            left -= len(head.partition(b"\r\n\r\n")[2])
            while left:
                left -= len(client.recv(left))

    assert told.wait(30) == [True] * 30


@pytest.mark.parametrize("read_bytes", [0, 1000, 2 * MIB])
def test_arrival_at_a_client_that_leaves_in_the_middle_is_denied(told, port, read_bytes):
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(ASK)
        while read_bytes > 0:
            read_bytes -= len(client.recv(min(read_bytes, 65536)))

    assert told.wait(1) == [False]


def test_arrival_of_what_lies_unread_in_the_kernel_of_this_side_is_denied(told, port):
    told.pieces = [b"x" * 400_000]  # fits into this machine's send queue
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(ASK)
        assert client.recv(100).startswith(b"HTTP/1.1 200")

    assert told.wait(1) == [False]


def test_compressed_pieces_are_the_body(told, port):
    told.pieces = [bytes([number]) * 1000 * number for number in range(200)]
    told.deflater = Deflater(min_bytes=1000, level=1)

    answer = httpx.get(f"http://127.0.0.1:{port}/", headers={"Accept-Encoding": "gzip"})

    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == b"".join(told.pieces)
    assert told.wait(1) == [True]


class Slow:
    """An application that sends the head of its answer, and the body when told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-length", b"4")]})
        await asyncio.to_thread(self.may_go_on.wait, 10)
        await send({"type": "http.response.body", "body": b"body"})


def test_head_does_not_wait_for_a_body_that_takes_its_time(free_port):
    slow = Slow()
    with serve(slow, free_port), socket.create_connection(("127.0.0.1", free_port), 10) as client:
        client.sendall(ASK)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")

        slow.may_go_on.set()
        assert client.recv(1000) == b"body"


class Recorder:
    """A transport that keeps what is written to it, one entry per system call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.calls.append(b"".join(pieces))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def get_extra_info(self, name: str) -> None:
        return None


async def test_arrival_at_a_client_that_closes_before_the_last_piece_is_denied(told):
    told.pieces = [b"x" * MIB]
    connection = Connection(Recorder())

    async def send(message):
        if message.get("body"):
            connection.note_end()  # all pieces so far are confirmed; the server does not know yet

    scope = {"type": "http", "extensions": {EXTENSION: {"connection": connection}}}
    await told(scope, asyncio.Event().wait, send)

    assert told.arrivals == [False]


async def test_head_and_first_bytes_of_an_answer_are_written_together():
    recorder = Recorder()
    transport = JoiningTransport(recorder, asyncio.get_running_loop())
    transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert transport.get_write_buffer_size() == 19
    transport.write(b"some ")
    transport.write(b"body")
    await asyncio.sleep(0)
    assert recorder.calls == [b"HTTP/1.1 200 OK\r\n\r\nsome ", b"body"]

    transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    await asyncio.sleep(0)
    assert recorder.calls[2:] == [b"HTTP/1.1 204 No Content\r\n\r\n"]

    transport.write(b"HTTP/1.1 304 Not Modified\r\n\r\n")
    transport.close()
    assert recorder.calls[3:] == [b"HTTP/1.1 304 Not Modified\r\n\r\n"]
    assert recorder.is_closed
