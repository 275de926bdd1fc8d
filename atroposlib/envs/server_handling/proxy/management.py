"""Routes around the sessions: health, models, inference servers, and the sessions themselves."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from atroposlib.envs.server_handling.proxy.access import (
    check_admin,
    check_anyone,
    part_of,
    session_of,
)
from atroposlib.envs.server_handling.proxy.backends import address_of
from atroposlib.envs.server_handling.proxy.bodies import read_object
from atroposlib.envs.server_handling.proxy.dialects.anthropic.objects import (
    anthropic_model_card,
    anthropic_model_list,
)
from atroposlib.envs.server_handling.proxy.dialects.anthropic.routes import ANTHROPIC
from atroposlib.envs.server_handling.proxy.mounting import answered
from atroposlib.envs.server_handling.proxy.openai_dialect import model_card, model_list
from atroposlib.envs.server_handling.proxy.proxy_state import ProxyState
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal
from atroposlib.envs.server_handling.proxy.request_models import (
    SessionCreateRequest,
    SessionCreateResponse,
    SetupRequest,
    read_body,
)
from atroposlib.envs.server_handling.proxy.sessions import SESSION_HEADER
from atroposlib.envs.server_handling.turn_matching import SequenceNode

__all__ = ["ManagementRoutes"]

_NODES = TypeAdapter(list[SequenceNode])


class ManagementRoutes:
    """The routes of whoever runs the agents, rather than of the agents.

    Args:
        state: What the routes show and change.
    """

    def __init__(self, state: ProxyState) -> None:
        self._state = state
        self._started_at = time.time()

    def mount(self, app: FastAPI) -> None:
        """Serve the routes."""
        for path, endpoint, method in (
            ("/health", self.health, "GET"),
            ("/v1/models", self.models, "GET"),
            ("/{uuid}/v1/models", self.session_models, "GET"),
            ("/v1/models/{model:path}", self.model, "GET"),
            ("/{uuid}/v1/models/{model:path}", self.session_model, "GET"),
            ("/setup", self.setup, "POST"),
            ("/servers", self.servers, "GET"),
            ("/sessions/create", self.create_session, "POST"),
            ("/sessions", self.sessions, "GET"),
            ("/{uuid}/nodes", self.nodes, "GET"),
            ("/{uuid}", self.delete_session, "DELETE"),
        ):
            guarded = answered(endpoint, by_header={ANTHROPIC.version_header: ANTHROPIC.error_body})
            app.add_api_route(path, guarded, methods=[method], tags=["management"])

    async def health(self, request: Request) -> Response:
        """Tell how many sessions and healthy servers there are."""
        servers = self._state.servers
        return JSONResponse(
            {
                "status": "ok",
                "model": self._state.model_name,
                "sessions": len(self._state.sessions),
                "servers": len(servers),
                "healthy_servers": sum(bool(server.server_healthy) for server in servers),
            }
        )

    async def models(self, request: Request) -> Response:
        """List the one model, as OpenAI does."""
        check_anyone(request, self._state.sessions, self._state.settings)
        return _models(request, self._state.model_name, self._started_at)

    async def session_models(self, request: Request) -> Response:
        """List the model of a session."""
        session = session_of(request, self._state.sessions, self._state.settings)
        return _models(request, session.model_name, session.created_at)

    async def model(self, request: Request) -> Response:
        """Describe the one model."""
        check_anyone(request, self._state.sessions, self._state.settings)
        return _model(request, self._state.model_name, self._started_at)

    async def session_model(self, request: Request) -> Response:
        """Describe the model of a session."""
        session = session_of(request, self._state.sessions, self._state.settings)
        return _model(request, session.model_name, session.created_at)

    async def setup(self, request: Request) -> Response:
        """Replace the inference servers; open sessions keep theirs."""
        check_admin(request, self._state.settings)
        await self._state.set_up(read_body(SetupRequest, await self._body(request)))
        answer = {"status": "ok", "servers": len(self._state.servers)}
        return JSONResponse({**answer, "model_name": self._state.model_name})

    async def servers(self, request: Request) -> Response:
        """List the inference servers."""
        check_admin(request, self._state.settings)
        return JSONResponse(
            {
                "servers": [
                    {
                        "index": i,
                        "base_url": address_of(server),
                        "healthy": bool(server.server_healthy),
                        "model_name": server.config.model_name,
                        "server_type": getattr(server.config, "server_type", None),
                    }
                    for i, server in enumerate(self._state.servers)
                ]
            }
        )

    async def create_session(self, request: Request) -> Response:
        """Open a session; the answer is the only place where its key is told."""
        check_admin(request, self._state.settings)
        wanted = read_body(SessionCreateRequest, await self._body(request))
        session = self._state.open_session(wanted)
        answer = SessionCreateResponse(
            uuid=session.uuid,
            model_name=session.model_name,
            tool_parser=session.tool_parser,
            base_url=session.base_url,
            created_at=session.created_at,
            api_key=session.api_key,
        )
        return JSONResponse(answer.model_dump())

    async def sessions(self, request: Request) -> Response:
        """List the open sessions."""
        check_admin(request, self._state.settings)
        return JSONResponse(
            {
                "sessions": [
                    {
                        "uuid": session.uuid,
                        "model_name": session.model_name,
                        "base_url": session.base_url,
                        "created_at": session.created_at,
                        "last_accessed": session.last_accessed,
                        "num_nodes": len(session.nodes),
                    }
                    for session in self._state.sessions
                ]
            }
        )

    async def nodes(self, request: Request) -> Response:
        """Return the recorded sequences of a session, or of a part of it."""
        session = part_of(request, self._state.sessions, self._state.settings, opens=False)
        # Long sessions hold a million tokens: bytes at once, without objects in between.
        body = b'{"nodes":' + _NODES.dump_json(session.nodes) + b"}"
        return Response(body, media_type="application/json")

    async def delete_session(self, request: Request) -> Response:
        """Delete a session, or a part of it; its requests in flight are answered with 404."""
        session = session_of(request, self._state.sessions, self._state.settings)
        part_id = request.headers.get(SESSION_HEADER, "").strip()
        if part_id and part_id != session.uuid:
            self._state.sessions.delete_part(session, part_id)
        else:
            self._state.sessions.delete(session)
        return JSONResponse({"status": "deleted", "uuid": session.uuid})

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, max_bytes=self._state.settings.max_body_bytes)


def _models(request: Request, model_name: str, created: float) -> Response:
    if ANTHROPIC.version_header in request.headers:
        return JSONResponse(anthropic_model_list(model_name, created))
    return JSONResponse(model_list(model_name, created))


def _model(request: Request, model_name: str, created: float) -> Response:
    wanted = request.path_params["model"]
    if wanted != model_name:
        raise ProxyRefusal(
            f"the model {wanted!r} does not exist; this proxy has {model_name!r}, which answers "
            "requests for any model",
            status=404,
            code="model_not_found",
            param="model",
        )
    is_anthropic = ANTHROPIC.version_header in request.headers
    card = anthropic_model_card if is_anthropic else model_card
    return JSONResponse(card(model_name, created))
