"""What is answered to requests that cannot be served: the status, and a text that helps."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from atroposlib.api.admission import BusyError, KeyReusedError, QueueFullError
from atroposlib.api.responses import json_response
from atroposlib.api.store.base import StoreFullError
from atroposlib.errors import ConfigError, GroupError, RunStoreError
from atroposlib.wire import BODY_NOT_TEXT, WireError

__all__ = ["REFUSALS", "refusal_of"]

logger = logging.getLogger(__name__)

_MAX_ECHO_BYTES = 200
_STORE_RETRY_AFTER_S = 5
_QUEUE_RETRY_AFTER_S = 5.0


def refusal_of(error: WireError) -> Response:
    """Answer a body that is not a well-formed group, in the framework's shape."""
    if error.kind == "not_text":
        return json_response({"detail": BODY_NOT_TEXT}, 400)
    if error.kind == "too_large":
        return json_response({"detail": str(error)}, 413)
    return _detail([{"type": error.kind, "loc": ("body", *error.path), "msg": str(error)}])


async def _refuse_invalid(request: Request, error: Exception) -> Response:
    """Answer a failed validation like the framework does, but never fail at echoing the input."""
    assert isinstance(error, RequestValidationError)  # registered for this class only
    return _detail(error.errors())


async def _refuse_group(request: Request, error: Exception) -> Response:
    if isinstance(error, WireError):
        return refusal_of(error)
    return json_response({"detail": str(error)}, 422)


async def _refuse_reused_key(request: Request, error: Exception) -> Response:
    return json_response({"detail": str(error)}, 422)


async def _refuse_for_now(request: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFullError | BusyError)  # registered for these classes only
    wait_s = math.ceil(error.retry_after_s or _QUEUE_RETRY_AFTER_S)
    headers = {"Retry-After": str(wait_s)}
    return json_response({"detail": str(error)}, error.status or 503, headers)


async def _refuse_without_store(request: Request, error: Exception) -> Response:
    # The store says when it begins to fail; a line per request would bury that one.
    logger.debug("%s %s was not served: %s", request.method, request.url.path, error)
    text = f"the store of the run does not work: {error}; nothing was acknowledged"
    return json_response({"detail": text}, 503, {"Retry-After": str(_STORE_RETRY_AFTER_S)})


async def _refuse_without_room(request: Request, error: Exception) -> Response:
    text = f"{error}; nothing was stored"
    return json_response({"detail": text}, 503, {"Retry-After": str(_STORE_RETRY_AFTER_S)})


REFUSALS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    RequestValidationError: _refuse_invalid,
    GroupError: _refuse_group,
    KeyReusedError: _refuse_reused_key,
    QueueFullError: _refuse_for_now,
    BusyError: _refuse_for_now,
    StoreFullError: _refuse_without_room,
    RunStoreError: _refuse_without_store,
    OSError: _refuse_without_store,
    ConfigError: _refuse_without_store,
}
"""The answer to each kind of error that a route lets out."""


def _detail(errors: Sequence[Any]) -> Response:
    return json_response(
        {
            "detail": [
                {
                    "type": error["type"],
                    "loc": error["loc"],
                    "msg": error["msg"],
                    "input": _echo(error.get("input")),
                }
                for error in errors
            ]
        },
        422,
    )


def _echo(value: Any) -> Any:
    """Return the value when it can be sent back and is short, else the start of its `repr`."""
    try:
        if len(msgspec.json.encode(value)) <= _MAX_ECHO_BYTES:
            return value
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    return ascii(value)[:_MAX_ECHO_BYTES]
