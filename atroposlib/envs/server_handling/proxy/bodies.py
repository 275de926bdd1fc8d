"""Reading the JSON object of a request, within a limit."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import Request

from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, bad_request, invalid_body

__all__ = ["parse_object", "read_object"]


async def read_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a request's body; an empty body is an empty object.

    Raises:
        ProxyRefusal: 413 beyond `max_bytes`, 400 for broken JSON, 422 for JSON that is not an
            object.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > max_bytes:
            raise _too_large(max_bytes)
    return parse_object(bytes(pieces))


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in some bytes, every text of it valid Unicode."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise bad_request(f"the body holds text that is not Unicode: {error}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid_body(
            [{"loc": ("body",), "msg": "expected a JSON object", "type": "dict_type"}]
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _too_large(max_bytes: int) -> ProxyRefusal:
    return ProxyRefusal(
        f"the body is larger than the {max_bytes} bytes that are allowed",
        status=413,
        code="body_too_large",
    )
