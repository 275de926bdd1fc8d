"""Limits on requests, in a small application."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from atroposlib.utils.request_limits import BodyLimitMiddleware, LimitedHttpProtocol, Pace

MIB = 2**20


async def _length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def _unread(_: Request) -> Response:
    return PlainTextResponse("unread")


def make_app(**limits: int) -> Starlette:
    app = Starlette(
        routes=[
            Route("/length", _length, methods=["POST"]),
            Route("/unread", _unread, methods=["POST"]),
        ]
    )
    app.add_middleware(BodyLimitMiddleware, **limits)
    return app


@contextmanager
def served(app: Starlette, port: int) -> Iterator[None]:
    config = uvicorn.Config(app, port=port, http=LimitedHttpProtocol, log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def test_body_up_to_the_limit_is_read_and_a_larger_one_is_413() -> None:
    client = TestClient(make_app(max_body_bytes=MIB))

    assert client.post("/length", content=b" " * MIB).text == str(MIB)
    assert client.post("/length", content=iter([b" " * 1000] * 9)).text == "9000"
    refused = client.post("/length", content=b" " * (MIB + 1))
    assert (refused.status_code, refused.text) == (413, f"request body larger than {MIB} bytes")
    assert client.post("/length", content=iter([b" " * MIB, b" "])).status_code == 413
    assert client.post("/unread", content=b" " * (MIB + 1)).text == "unread"


def _receive_from(messages: list[dict[str, Any]]) -> Callable[[], Any]:
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        message = next(left, None)
        if message is None:
            await asyncio.Event().wait()
        return message or {}

    return receive


async def test_a_complete_body_takes_no_room_while_it_is_answered() -> None:
    is_read, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def answer_late(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        is_read.release()
        await may_end.wait()

    limited = BodyLimitMiddleware(answer_late, max_body_bytes=MIB, max_buffered_bytes=MIB)
    half = {"type": "http.request", "body": b" " * (MIB // 2)}
    messages = [{**half, "more_body": True}, {**half, "more_body": False}]
    scope = {"type": "http", "headers": [(b"content-length", b"%d" % MIB)]}

    async def send(_: Any) -> None:
        pass

    requests = [
        asyncio.create_task(limited(scope, _receive_from(messages), send)) for _ in range(3)
    ]
    for _ in requests:
        await asyncio.wait_for(is_read.acquire(), 60)
    may_end.set()
    await asyncio.gather(*requests)


POST = b"POST /length HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST /length HTTP/1.1\r\nHo", POST, POST + b"{"])
def test_client_that_falls_silent_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, free_port: int, sent: bytes
) -> None:
    monkeypatch.setattr(LimitedHttpProtocol, "max_silence_s", 0.2)

    with (
        served(make_app(max_body_bytes=MIB), free_port),
        socket.create_connection(("127.0.0.1", free_port), timeout=30) as connection,
    ):
        connection.sendall(sent)
        answer = connection.recv(65536)
        rest = connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 408")
    assert rest == b""


async def test_body_that_comes_too_slowly_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "grace_s", 0.05)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/length",
        "query_string": b"",
        "headers": [(b"content-length", b"100000")],
    }
    receive = _receive_from([{"type": "http.request", "body": b" ", "more_body": True}])
    await asyncio.wait_for(make_app(max_body_bytes=MIB)(scope, receive, send), 60)

    assert sent[0]["status"] == 408
