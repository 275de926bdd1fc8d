"""How routes read what they are sent, small bodies at once and large ones in a thread."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from atroposlib.api.idempotency import MAX_KEY_CHARACTERS
from atroposlib.api.run import Run
from atroposlib.api.schemas import EnvIdentifier
from atroposlib.wire import BODY_NOT_TEXT, DecodedGroup, Lane, WireError, lane_of

__all__ = ["PostedGroups", "in_threads", "read_env_id", "read_groups"]

T = TypeVar("T")
Decode = Callable[..., list[DecodedGroup]]

_INLINE_BYTES = 128 * 1024
"""Smaller bodies are decoded faster than handed to a thread, and hold up nobody."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAP_BEGINS = re.compile(rb"[\x80-\x8f\xde\xdf]").match


class PostedGroups(NamedTuple):
    """The groups of one request, and how a repetition of it is recognised."""

    groups: list[DecodedGroup]
    key: str | None
    digest: int


async def read_groups(request: Request, run: Run, decode: Decode) -> PostedGroups:
    """Read the body of a request that brings groups.

    Args:
        request: brings them in either lane; a body of an unknown type is taken for JSON.
        run: counts what is refused.
        decode: takes body, lane and `max_bytes`, the limit on what compressed groups unfold to.

    Raises:
        WireError: the body is not in its lane, or a group in it is malformed.
        HTTPException: 422, the idempotency key cannot be used.
    """
    key = _key_of(request)
    body = await request.body()
    lane: Lane = lane_of(request.headers.get("content-type")) or "json"
    work = partial(decode, body, lane, max_bytes=request.app.state.settings.max_body_bytes)
    try:
        is_small = len(body) <= _INLINE_BYTES and (lane == "json" or not _may_unfold(body))
        groups = work() if is_small else await in_threads(request, work)
    except WireError as error:
        run.counters[f"groups/refused_{error.kind}"] += 1
        raise
    return PostedGroups(groups, key, 0 if key is None else _digest(body))


def _may_unfold(body: bytes) -> bool:
    """Whether a MessagePack body may hold a zstd frame; the map of one group holds none."""
    return not _MAP_BEGINS(body) and _ZSTD_MAGIC in body


async def in_threads(request: Request, work: Callable[[], T]) -> T:
    """Do work on large bodies beside the event loop."""
    threads: Executor = request.app.state.threads
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= MAX_KEY_CHARACTERS or not all("!" <= char <= "~" for char in key):
        text = f"Idempotency-Key: expected 1 to {MAX_KEY_CHARACTERS} visible ASCII characters"
        raise HTTPException(422, f"{text}, such as a random UUID per request")
    return key


def _digest(body: bytes) -> int:
    return zlib.crc32(body) << 32 | len(body) & 0xFFFFFFFF


class _EnvIdentifier(msgspec.Struct):
    env_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


_env_id_decoder = msgspec.json.Decoder(_EnvIdentifier)


async def read_env_id(request: Request) -> int:
    """Return the id of the asking environment, from the body or else from the query.

    Raises:
        RequestValidationError: there is no id, or it is no integer.
        HTTPException: 400, the body is not text.
    """
    body = await request.body()
    try:
        return _env_id_decoder.decode(body).env_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _read_env_id_laxly(request, body)


def _read_env_id_laxly(request: Request, body: bytes) -> int:
    """Read an id like the framework reads models: numeric strings, integral floats and all."""
    where = "body"
    try:
        if body.strip() not in (b"", b"null"):
            body.decode()
            return EnvIdentifier.model_validate_json(body).env_id
        where = "query"
        if "env_id" in request.query_params:
            return EnvIdentifier.model_validate(dict(request.query_params)).env_id
    except UnicodeDecodeError as error:
        raise HTTPException(400, BODY_NOT_TEXT) from error
    except ValidationError as error:
        details = [{**detail, "loc": (where, *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(details) from error
    raise RequestValidationError(
        [{"type": "missing", "loc": ("body", "env_id"), "msg": "Field required"}]
    )
