"""HTTP answers that the framework has no class for: spliced JSON, refusals of bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.wire import BODY_NOT_TEXT, WireError

__all__ = ["SplicedResponse", "refusal_of", "validation_refusal"]

_PIECE_BYTES = 64 * 1024
_MAX_ECHO_BYTES = 200


class SplicedResponse(Response):
    """JSON that is already encoded, sent in pieces, with word of whether it arrived.

    Args:
        content: the body.
        on_sent: awaited once the body was handed to the connection in full.
        on_lost: called instead when the client left, or sending failed, before that.
    """

    media_type = "application/json"

    def __init__(
        self,
        content: bytes,
        *,
        on_sent: Callable[[], Awaitable[None]] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(content)
        self._on_sent = on_sent
        self._on_lost = on_lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body and report."""
        gone = asyncio.ensure_future(_wait_until_gone(receive))
        is_sent = False
        try:
            is_sent = await self._send_pieces(send, gone)
        finally:
            gone.cancel()
            if not is_sent and self._on_lost is not None:
                self._on_lost()
        if is_sent and self._on_sent is not None:
            await self._on_sent()

    async def _send_pieces(self, send: Send, gone: asyncio.Future[None]) -> bool:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        body = bytes(self.body)
        for offset in range(0, len(body), _PIECE_BYTES):
            # Also lets other requests run, and word of a disconnect arrive, between the pieces.
            await asyncio.sleep(0)
            if gone.done():
                return False
            piece = body[offset : offset + _PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
        if gone.done():
            return False
        # Waits until the pieces before have left this process, bar a small buffer.
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal_of(error: WireError) -> Response:
    """Answer a body that is not a well-formed group, in the framework's shape."""
    if error.kind == "not_text":
        return _json(400, {"detail": BODY_NOT_TEXT})
    return _detail([{"type": error.kind, "loc": ("body", *error.path), "msg": str(error)}])


async def validation_refusal(request: Request, error: Exception) -> Response:
    """Answer a failed validation like the framework does, but never fail at echoing the input."""
    assert isinstance(error, RequestValidationError)  # registered for this class only
    return _detail(error.errors())


def _detail(errors: Sequence[Any]) -> Response:
    return _json(
        422,
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
    )


def _echo(value: Any) -> Any:
    """Return the value when it can be sent back and is short, else the start of its `repr`."""
    try:
        if len(msgspec.json.encode(value)) <= _MAX_ECHO_BYTES:
            return value
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    return ascii(value)[:_MAX_ECHO_BYTES]


def _json(status: int, content: Any) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
