"""Log lines of the service, as text or JSON; levels are set by the entry point.

`RequestErrorsMiddleware` gives each request an id, which all its log lines carry. A response 500
has the same id, so that it can be matched with the traceback in the log.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextvars import ContextVar
from itertools import count
from typing import Any, Literal, get_args

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LogFormat", "RequestErrorsMiddleware", "log_config", "request_id"]

logger = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
_CONTROLS_OF_TRACEBACKS = {k: v for k, v in _CONTROLS.items() if chr(k) not in "\n\t"}
_SENDERS_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def request_id() -> str:
    """Return the id of the request being served; empty outside of one."""
    return _request_id.get()


def log_config(log_format: LogFormat, *, level: str = "INFO") -> dict[str, Any]:
    """Return a configuration of the loggers for `uvicorn.Config(log_config=)` or `dictConfig`.

    uvicorn's own loggers pass through the same handler. Other packages are logged at WARNING and
    above.

    Args:
        log_format: `text`: one readable line per event; `json`: one object per line.
        level: minimum level of the service and uvicorn.

    Raises:
        ValueError: the format is unknown.
    """
    if log_format not in get_args(LogFormat):
        raise ValueError(f"log format {log_format!r}; expected one of {get_args(LogFormat)}")
    formatter = _JsonFormatter if log_format == "json" else _TextFormatter
    ours = {"level": level.upper()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"service": {"()": formatter}},
        "handlers": {
            "service": {
                "class": "logging.StreamHandler",
                "formatter": "service",
                "stream": "ext://sys.stderr",
            },
            "nowhere": {"class": "logging.NullHandler"},
        },
        "root": {"level": "WARNING", "handlers": ["service"]},
        "loggers": {
            "atroposlib": ours,
            "uvicorn": {**ours, "handlers": [], "propagate": True},
            # No line per request: metrics count requests.
            "uvicorn.access": {"handlers": ["nowhere"], "propagate": False},
        },
    }


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request and traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        if request_id():
            line["request_id"] = request_id()
        if record.exc_info:
            line["traceback"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


class _TextFormatter(logging.Formatter):
    """`2026-01-31T10:00:00.123Z WARNING atroposlib.api.run: what happened [request 5f2a-17]`."""

    def format(self, record: logging.LogRecord) -> str:
        # Names come from clients: control characters are escaped.
        message = _encodable(record.getMessage()).translate(_CONTROLS)
        text = f"{_timestamp(record)} {record.levelname} {record.name}: {message}"
        if request_id():
            text += f" [request {request_id()}]"
        if record.exc_info:
            traceback = _encodable(self.formatException(record.exc_info))
            text += f"\n{traceback.translate(_CONTROLS_OF_TRACEBACKS)}"
        return text


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class RequestErrorsMiddleware:
    """Gives each request an id, and responds 500 with that id if the application fails.

    Clients may send their own `X-Request-ID`. A client that disconnects while its body is read is
    not an error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._prefix = secrets.token_hex(4)
        self._numbers = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request under an id."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Each request runs in its own task, so the id need not be reset: later log lines of the
        # server about the request still carry it.
        _request_id.set(_senders_id(scope) or f"{self._prefix}-{next(self._numbers)}")
        is_started = False

        async def note_start(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self.app(scope, receive, note_start)
        except ClientDisconnect:
            logger.debug("the client of %s %s left", scope["method"], scope["path"])
        except Exception:
            if is_started:
                raise  # the server ends the connection and logs the traceback
            logger.exception("%s %s failed", scope["method"], scope["path"])
            headers = {"X-Request-ID": request_id()}
            refusal = PlainTextResponse("Internal Server Error", 500, headers)
            await refusal(scope, receive, send)


def _senders_id(scope: Mapping[str, Any]) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode() if _SENDERS_ID.fullmatch(value) else ""
    return ""
