"""Log lines of the service, as text or JSON; lines about a request contain its id."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, get_args

import msgspec

from atroposlib.api.middleware import request_id

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


def log_config(log_format: LogFormat, *, level: str = "INFO") -> dict[str, Any]:
    """Return a configuration of the loggers for `uvicorn.Config(log_config=)` or `dictConfig`.

    `level` is the minimum level of the service and uvicorn; other packages are logged at WARNING
    and above.

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
