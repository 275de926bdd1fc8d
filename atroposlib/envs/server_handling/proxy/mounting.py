"""From an HTTP request to a handler and back: refusals answered, agents that hang up noticed."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from atroposlib.envs.server_handling.proxy.access import part_of
from atroposlib.envs.server_handling.proxy.bodies import read_object
from atroposlib.envs.server_handling.proxy.dialect import (
    IGNORED_HEADER,
    Dialect,
    Exchange,
    Route,
)
from atroposlib.envs.server_handling.proxy.refusals import (
    ProxyRefusal,
    as_refusal,
    openai_error_body,
)
from atroposlib.envs.server_handling.proxy.sessions import SessionStore
from atroposlib.envs.server_handling.proxy.settings import ProxySettings
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRefusal, WebPageRule

__all__ = ["answer_unknown_routes", "answered", "mount_dialect", "refuse_web_pages"]

logger = logging.getLogger(__name__)

ErrorBody = Callable[[ProxyRefusal], dict[str, Any]]
Endpoint = Callable[[Request], Awaitable[Response]]

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMES = 16

_GONE = 499
"""Status for logs alone: whoever asked is not there to read it."""


def mount_dialect(
    app: FastAPI, dialect: Dialect, sessions: SessionStore, settings: ProxySettings
) -> None:
    """Serve a dialect's routes, by key below `/v1` and by name below `/{uuid}/v1`."""
    for route in dialect.routes:
        endpoint = answered(
            _endpoint(route, sessions, settings), dialect.error_body, invalid_status=400
        )
        for prefix in ("/v1", "/{uuid}/v1"):
            app.add_api_route(
                prefix + route.path, endpoint, methods=[route.method], tags=[dialect.name]
            )


def answer_unknown_routes(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    """Answer unknown routes below `/v1` in the shape of the dialect that they seem to mean.

    That is the one whose client sends its header, else whose routes begin alike, else the first.
    A route of a dialect without `/v1` in front is one of a client whose base URL lacks it.
    `detail` is the framework's own, as in every other answer to an unknown route.
    """

    async def unknown(request: Request, error: HTTPException) -> Response:
        body: dict[str, Any] = {"detail": error.detail}
        said = f"unknown request URL: {request.method} {request.url.path}"
        path = request.scope["path"]
        dialect = _meant_dialect(path, request.headers, dialects)
        if dialect is None:
            starts = [f"/{part}" for part in path.strip("/").split("/")[:2]]
            dialect = next(filter(None, (_dialect_of(start, dialects) for start in starts)), None)
            said += "; the routes are below /v1, which the client's base URL has to end in"
        if dialect is not None:
            refusal = ProxyRefusal(said, status=error.status_code, code="unknown_url")
            body |= dialect.error_body(refusal)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    app.add_exception_handler(HTTPException, unknown)  # type: ignore[arg-type]  # of its class only


def refuse_web_pages(app: FastAPI, dialects: Sequence[Dialect], settings: ProxySettings) -> None:
    """Refuse what pages in a browser send, in the shape of the dialect they seem to mean."""

    def answer(scope: Scope, refused: WebPageRefusal) -> Response:
        refusal = ProxyRefusal(refused.text, status=refused.status, code=refused.code)
        dialect = _meant_dialect(scope["path"], Headers(scope=scope), dialects) or dialects[0]
        return JSONResponse(dialect.error_body(refusal), refusal.status)

    rule = WebPageRule(
        allowed_hosts=frozenset(settings.allowed_hosts),
        machine_name=socket.gethostname(),
        # A page of a rebound name has no key.
        checks_host=not (settings.require_keys and settings.admin_key),
        host_remedy="name {} in settings.allowed_hosts",
    )
    app.add_middleware(WebPageMiddleware, rule=rule, answer=answer)


def _meant_dialect(
    path: str, headers: Mapping[str, str], dialects: Sequence[Dialect]
) -> Dialect | None:
    """Return the dialect of a request below `/v1`; None for one that is not there."""
    below = path.strip("/").split("/")
    below = below if below[0] == "v1" else below[1:]
    if below[:1] != ["v1"]:
        return None
    start = "/".join(["", *below[1:2]])
    for dialect in dialects:
        if dialect.version_header is not None and dialect.version_header in headers:
            return dialect
    return _dialect_of(start, dialects) or dialects[0]


def _dialect_of(start: str, dialects: Sequence[Dialect]) -> Dialect | None:
    """Return the first dialect with a route that begins so."""
    for dialect in dialects:
        if any(f"{route.path}/".startswith(f"{start}/") for route in dialect.routes):
            return dialect
    return None


def answered(
    endpoint: Endpoint,
    error_body: ErrorBody = openai_error_body,
    *,
    invalid_status: int = 422,
    by_header: Mapping[str | None, ErrorBody] | None = None,
) -> Endpoint:
    """Return an endpoint that answers what is raised inside, and ends when the agent hangs up.

    Args:
        endpoint: What may raise.
        error_body: Of an error response.
        invalid_status: Status for a body with missing or mistyped fields.
        by_header: Bodies for clients that send a header of their protocol, by its name.
    """

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except Exception as error:  # one request: answered, and logged if unforeseen
            refusal = as_refusal(error)
            if refusal.status == 422:
                refusal.status = invalid_status
            if refusal.status == 500:
                logger.exception("request to %s failed", request.url.path.rpartition("/")[2])
            shape = next(
                (body for name, body in (by_header or {}).items() if name in request.headers),
                error_body,
            )
            return JSONResponse(shape(refusal), status_code=refusal.status, headers=refusal.headers)

    return guarded


def _endpoint(route: Route, sessions: SessionStore, settings: ProxySettings) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        session = part_of(request, sessions, settings, opens=route.method == "POST")
        body: dict[str, Any] = {}
        if route.method == "POST":
            body = await read_object(request, max_bytes=settings.max_body_bytes)
        path_params = {k: str(v) for k, v in request.path_params.items() if k != "uuid"}
        exchange = Exchange(session, body, path_params, request.query_params, request.headers)
        response = await _watched(request, route.handler(exchange))
        names = sorted(name for name in exchange.ignored if _SAFE_NAME.fullmatch(name))
        if names:
            response.headers[IGNORED_HEADER] = ", ".join(names[:_MOST_NAMES])
        return response

    return endpoint


async def _watched(request: Request, work: Awaitable[Response]) -> Response:
    """Await `work`, and cancel it when the agent hangs up; the body must have been read."""
    task = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({task, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        hang_up.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _hang_up(request: Request) -> None:
    """Wait until the agent closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
