"""What the OpenAPI document says of refusals: their statuses, and the shape of their bodies."""

from __future__ import annotations

from typing import Any

from atroposlib.wire import MEDIA_TYPES

__all__ = ["EVERYWHERE", "IN_EITHER_LANE", "refused"]

Responses = dict[int | str, dict[str, Any]]

_PLACE = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
_PROBLEM = {
    "type": "object",
    "required": ["type", "loc", "msg"],
    "properties": {
        "type": {"type": "string"},
        "loc": {"type": "array", "items": _PLACE, "description": "Where in the request."},
        "msg": {"type": "string", "description": "What is wrong, and what was expected."},
        "input": {"description": "What was sent there, or the beginning of it."},
    },
}
_REFUSAL = {
    "type": "object",
    "required": ["detail"],
    "properties": {
        "detail": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PROBLEM}]},
    },
}
_RETRY_AFTER = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds until another try."}
}
_MEANINGS = {
    400: "The body is not text, or not the gzip it says it is.",
    403: "A web page may not send this, or the token has another role.",
    404: "Nothing has this id.",
    408: "The body stopped coming.",
    409: "The run, or the batch, is in a state that does not allow this.",
    410: "The group was delivered, and is not kept any more.",
    413: "The body is too large.",
    415: "The encoding of the body is unknown.",
    422: "The request is malformed; says where.",
    429: "Too many batches are with trainers.",
    503: "The queue is full, too many wait, or the store does not work; nothing was stored.",
}
_IN_TEXT = (400,)


def refused(*statuses: int) -> Responses:
    """Return the `responses` of routes that may answer with these statuses."""
    return {status: _document(status) for status in statuses}


def _document(status: int) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _REFUSAL}}
    if status in _IN_TEXT:
        content["text/plain"] = {"schema": {"type": "string"}}
    document = {"description": _MEANINGS[status], "content": content}
    return document | ({"headers": _RETRY_AFTER} if status in (429, 503) else {})


EVERYWHERE = refused(400, 403, 408, 413, 415, 422, 503)
"""What any request may be answered."""

IN_EITHER_LANE: Responses = {200: {"content": {media: {} for media in MEDIA_TYPES.values()}}}
"""Groups, in the lane that was asked for."""
