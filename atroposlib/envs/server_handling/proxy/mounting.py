"""From an HTTP request to a handler and back: refusals answered, agents that hang up noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.access import session_of
from atroposlib.envs.server_handling.proxy.bodies import read_object
from atroposlib.envs.server_handling.proxy.dialect import Dialect, Exchange, Route
from atroposlib.envs.server_handling.proxy.refusals import (
    ProxyRefusal,
    as_refusal,
    openai_error_body,
)
from atroposlib.envs.server_handling.proxy.sessions import SessionStore
from atroposlib.envs.server_handling.proxy.settings import ProxySettings

__all__ = ["answered", "mount_dialect"]

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

_GONE = 499
"""Status for logs alone: whoever asked is not there to read it."""


def mount_dialect(
    app: FastAPI, dialect: Dialect, sessions: SessionStore, settings: ProxySettings
) -> None:
    """Serve a dialect's routes, by key below `/v1` and by name below `/{uuid}/v1`."""
    for route in dialect.routes:
        endpoint = answered(_endpoint(route, sessions, settings), dialect.error_body)
        for prefix in ("/v1", "/{uuid}/v1"):
            app.add_api_route(
                prefix + route.path, endpoint, methods=[route.method], tags=[dialect.name]
            )


def answered(
    endpoint: Endpoint, error_body: Callable[[ProxyRefusal], dict[str, Any]] = openai_error_body
) -> Endpoint:
    """Return an endpoint that answers what is raised inside, and ends when the agent hangs up."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except Exception as error:  # one request: answered, and logged if unforeseen
            refusal = as_refusal(error)
            if refusal.status == 500:
                logger.exception("request to %s failed", request.url.path.rpartition("/")[2])
            return JSONResponse(
                error_body(refusal), status_code=refusal.status, headers=refusal.headers
            )

    return guarded


def _endpoint(route: Route, sessions: SessionStore, settings: ProxySettings) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        session = session_of(request, sessions, settings)
        body: dict[str, Any] = {}
        if route.method == "POST":
            body = await read_object(request, max_bytes=settings.max_body_bytes)
        path_params = {k: str(v) for k, v in request.path_params.items() if k != "uuid"}
        exchange = Exchange(session, body, path_params, request.query_params, request.headers)
        return await _watched(request, route.handler(exchange))

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
