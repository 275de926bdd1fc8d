"""What the service writes to its log, and what it answers when it fails."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import sys

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from atroposlib.api.logs import log_config
from atroposlib.api.middleware import RequestErrorsMiddleware, request_id


def format_line(log_format: str, message: str, *, error: Exception | None = None) -> str:
    config = log_config(log_format)  # type: ignore[arg-type]
    formatter = config["formatters"]["service"]["()"]()
    exc_info = None
    if error is not None:
        try:
            raise error
        except type(error):
            exc_info = sys.exc_info()
    values = ("atroposlib.api.run", logging.WARNING, __file__, 1, message, (), exc_info)
    return formatter.format(logging.LogRecord(*values))


def test_text_line_has_time_level_logger_and_message() -> None:
    line = format_line("text", "batch 3 did not reach the trainer")

    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING atroposlib\.api\.run: batch 3 did .*"
    assert re.fullmatch(pattern, line)


def test_text_line_stays_one_line_whatever_a_sender_calls_itself() -> None:
    line = format_line("text", "environment 0 registered as evil\r\n2026 CRITICAL: \ud800")

    assert "\n" not in line
    assert line.endswith(r"evil\r\n2026 CRITICAL: \ud800")


def test_text_line_steers_no_terminal() -> None:
    line = format_line("text", "a\x1b[2J\x07\x9b1m\u2028b", error=ValueError("c\x1b[2J\td"))

    assert r"a\x1b[2J\x07\x9b1m\u2028b" in line
    assert line.endswith("ValueError: c\\x1b[2J\td")
    assert all(char.isprintable() or char in "\n\t" for char in line)


def test_json_line_is_one_object_with_the_traceback() -> None:
    line = format_line("json", "it\nfailed \ud800", error=ValueError("why"))

    assert "\n" not in line
    read = json.loads(line)
    assert set(read) == {"time", "level", "logger", "message", "traceback"}
    assert (read["level"], read["message"]) == ("warning", "it\nfailed \\ud800")
    assert read["traceback"].endswith("ValueError: why")


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="log format 'xml'; expected one of"):
        log_config("xml")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["atroposlib.api.run", "uvicorn.error", "asyncio"])
def test_every_logger_ends_in_the_one_handler(
    name: str, capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    logging.config.dictConfig(log_config("json"))

    logging.getLogger(name).warning("something to act on")
    logging.getLogger("uvicorn.access").warning("one line per request")

    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["logger"] == name


def test_level_is_that_of_the_door_for_the_service_only(
    capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    logging.config.dictConfig(log_config("text", level="info"))

    logging.getLogger("atroposlib.api.run").info("environment 0 registered")
    logging.getLogger("some.package").info("chatter")

    assert "environment 0 registered" in capsys.readouterr().err


@pytest.fixture
def restored_logging() -> object:
    """The loggers as they were, once the test is over."""
    names = [None, "atroposlib", "uvicorn", "uvicorn.access"]
    before = [(logger := logging.getLogger(n), logger.level, logger.propagate) for n in names]
    handlers = [list(logger.handlers) for logger, _, _ in before]
    yield
    for (logger, level, propagate), kept in zip(before, handlers, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = kept


@pytest.fixture
def client() -> TestClient:
    """An application with a route for each way to fail."""
    app = FastAPI()

    @app.get("/id")
    async def tell_id() -> str:
        return request_id()

    @app.get("/fails")
    async def fails() -> None:
        raise RuntimeError("the reason")

    @app.get("/leaves")
    async def leaves(request: Request) -> None:
        raise ClientDisconnect

    @app.get("/breaks-off")
    async def breaks_off() -> StreamingResponse:
        async def pieces() -> object:
            yield b"half"
            raise RuntimeError("the rest")

        return StreamingResponse(pieces())

    app.add_middleware(RequestErrorsMiddleware)
    return TestClient(app, raise_server_exceptions=False)


def test_failure_is_answered_with_the_id_that_the_log_has(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.get("/fails", headers={"X-Request-ID": "from-the-sender-7"})

    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    assert answer.headers["x-request-id"] == "from-the-sender-7"
    (record,) = [r for r in caplog.records if r.name == "atroposlib.api.middleware"]
    assert record.getMessage() == "GET /fails failed"
    assert record.exc_info is not None


def test_requests_get_ids_of_their_own(client: TestClient) -> None:
    first, second = client.get("/id").json(), client.get("/id").json()

    assert first != second
    assert re.fullmatch(r"[0-9a-f]{8}-\d+", first)
    odd = client.get("/id", headers={"X-Request-ID": "two words\t and more"}).json()
    assert re.fullmatch(r"[0-9a-f]{8}-\d+", odd)
    assert request_id() == ""


def test_client_that_left_is_no_error(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    client.get("/leaves")

    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_answer_that_breaks_off_is_left_to_the_server(client: TestClient) -> None:
    with pytest.raises(RuntimeError, match="the rest"):
        TestClient(client.app).get("/breaks-off")
