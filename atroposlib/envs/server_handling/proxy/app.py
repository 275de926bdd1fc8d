"""The proxy's HTTP application, and the proxy inside an environment.

    request ─► session of the key or URL ─► bounded JSON body ─► route's handler ─┐
    response ◄── error body of the dialect for anything raised ◄──────────────────┘

Access:
    /{uuid}/...   session by name; requires its key, or no key while keys are optional
    /v1/...       session by key; with the administrator key, session named by X-Session-ID
    other routes  administrator key, if one is set

X-Session-ID together with a session's key names a part of the session, which records its own
sequences. If the client disconnects, the work on its request is cancelled.

`AgentProxy` serves the application on a local port, with a URL and a key per rollout:

    AgentProxy.session ─► AgentSession (URL, key) ─► agent ─► recorded nodes
    AgentSession.trajectory(score) ─► AgentTrajectory ─► group_of_agents ─► ScoredDataGroup
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import uvicorn
from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from atroposlib.envs.server_handling.proxy.anthropic import (
    ANTHROPIC,
    anthropic_model_card,
    anthropic_model_list,
)
from atroposlib.envs.server_handling.proxy.exchange import IGNORED_HEADER, Dialect, Exchange, Route
from atroposlib.envs.server_handling.proxy.openai_dialect import OPENAI, model_card, model_list
from atroposlib.envs.server_handling.proxy.refusals import (
    ProxyRefusal,
    as_refusal,
    bad_request,
    invalid_body,
    wrong_key,
)
from atroposlib.envs.server_handling.proxy.requests import (
    SessionCreateRequest,
    SessionCreateResponse,
    SetupRequest,
    read_body,
)
from atroposlib.envs.server_handling.proxy.responses import RESPONSES
from atroposlib.envs.server_handling.proxy.sessions import (
    SESSION_HEADER,
    AgentTurn,
    FixedSampling,
    HasServers,
    ProxySettings,
    ProxyState,
    SessionState,
    TurnLog,
    address_of,
)
from atroposlib.envs.server_handling.server_baseline import FROM_TEXT, note_node
from atroposlib.envs.server_handling.turn_recording import SequenceNode
from atroposlib.scored_data import ScoredDataGroup
from atroposlib.utils.tracing import HEADER, current_span, remote_span
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRefusal, WebPageRule

logger = logging.getLogger(__name__)

ErrorBody = Callable[[ProxyRefusal], dict[str, Any]]
Endpoint = Callable[[Request], Awaitable[Response]]

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMES = 16

_CLIENT_DISCONNECTED = 499
"""Status of a response to a disconnected client; appears only in logs."""

_NODES = TypeAdapter(list[SequenceNode])

DIALECTS: tuple[Dialect, ...] = (RESPONSES, ANTHROPIC)
"""Dialects served in addition to OpenAI's, in this order."""

_LONGEST_SWEEP_S = 60.0

KEEP_ALIVE_S = 120
"""Seconds an idle connection stays open: longer than agents usually keep theirs, so that it is not
closed at the moment it is reused."""

_POLL_S = 0.005
_GRACE_S = 1


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request from either header that clients use; None without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def part_of(request: Request, state: ProxyState, *, opens: bool) -> SessionState:
    """Return the session of a request, or the part of it that `X-Session-ID` names.

    Raises:
        ProxyRefusal: as in `session_of`; 404 for an unknown part.
    """
    session = session_of(request, state)
    part_id = request.headers.get(SESSION_HEADER, "").strip()
    return state.sessions.part(session, part_id, opens=opens) if part_id else session


def session_of(request: Request, state: ProxyState) -> SessionState:
    """Return the session a request belongs to and update its last use.

    Raises:
        ProxyRefusal: 404 for an unknown name; 401 without a valid key if one is required, and
            always for the key of another session.
    """
    sessions, settings = state.sessions, state.settings
    key = key_of(request.headers)
    name = request.path_params.get("uuid")
    if name is None and key is not None and _is_admin(key, settings):
        name = request.headers.get(SESSION_HEADER, "").strip() or None
    if name is None:
        session = sessions.of_key(key) if key else None
        if session is None:
            raise wrong_key()
        return session
    if name == "v1":  # as in /v1/v1/messages
        raise ProxyRefusal(
            "the URL has /v1 twice; Anthropic's clients add it to the base URL themselves",
            status=404,
            code="unknown_url",
        )
    session = sessions.find(name)
    if key is not None and (_is_equal(key, session.api_key) or _is_admin(key, settings)):
        return session
    if settings.require_keys or (key is not None and sessions.of_key(key) is not None):
        raise wrong_key()
    return session


def check_admin(request: Request, settings: ProxySettings) -> None:
    """Raise 401 unless the request may manage sessions and servers."""
    key = key_of(request.headers)
    if settings.admin_key is not None and not (key and _is_admin(key, settings)):
        raise wrong_key()


def check_anyone(request: Request, state: ProxyState) -> None:
    """Raise 401 if keys are required and the request has no valid key."""
    key = key_of(request.headers)
    if state.settings.require_keys and not (
        key and (_is_admin(key, state.settings) or state.sessions.of_key(key) is not None)
    ):
        raise wrong_key()


def _is_admin(key: str, settings: ProxySettings) -> bool:
    return settings.admin_key is not None and _is_equal(key, settings.admin_key)


def _is_equal(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(), second.encode())


async def read_object(
    request: Request, *, max_bytes: int, hold: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Return the JSON object in a request's body; an empty body is an empty object.

    `hold` is called with the size of each piece, and may refuse it.

    Raises:
        ProxyRefusal: 413 beyond `max_bytes`, 400 for broken JSON or strings that are not valid
            Unicode, 422 for JSON that is not an object.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    pieces = bytearray()
    async for piece in request.stream():
        if hold is not None:
            hold(len(piece))
        pieces += piece
        if len(pieces) > max_bytes:
            raise _too_large(max_bytes)
    body = bytes(pieces)
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
        f"the body is larger than the limit of {max_bytes} bytes",
        status=413,
        code="body_too_large",
    )


def mount_dialect(app: FastAPI, dialect: Dialect, state: ProxyState) -> None:
    """Serve a dialect's routes below `/v1` (session by key) and `/{uuid}/v1` (session by name)."""
    for route in dialect.routes:
        for prefix, invalid_status in (("/v1", 400), ("/{uuid}/v1", route.invalid_status)):
            endpoint = answered(
                _endpoint(route, state),
                lambda _: dialect.error_body,
                invalid_status=invalid_status,
            )
            app.add_api_route(
                prefix + route.path, endpoint, methods=[route.method], tags=[dialect.name]
            )


def answer_unknown_routes(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    """Answer unknown routes below `/v1` with the error body of the most likely dialect.

    It is chosen by the version header, else by a common prefix of routes, else the first dialect. A
    dialect's route without `/v1` comes from a client whose base URL lacks it. `detail` is that of
    the framework.
    """

    async def unknown(request: Request, error: HTTPException) -> Response:
        body: dict[str, Any] = {"detail": error.detail}
        text = f"unknown request URL: {request.method} {request.url.path}"
        path = request.scope["path"]
        dialect = _dialect_of_path(path, request.headers, dialects)
        if dialect is None:
            starts = [f"/{part}" for part in path.strip("/").split("/")[:2]]
            dialect = next(filter(None, (_dialect_of(start, dialects) for start in starts)), None)
            text += "; the routes are below /v1, so the client's base URL must end with /v1"
        if dialect is not None:
            refusal = ProxyRefusal(text, status=error.status_code, code="unknown_url")
            body |= dialect.error_body(refusal)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    app.add_exception_handler(HTTPException, unknown)  # type: ignore[arg-type]  # of its class only


def refuse_web_pages(app: FastAPI, dialects: Sequence[Dialect], settings: ProxySettings) -> None:
    """Refuse requests sent by web pages, with the error body of the most likely dialect."""

    def answer(scope: Scope, refused: WebPageRefusal) -> Response:
        refusal = ProxyRefusal(refused.text, status=refused.status, code=refused.code)
        dialect = _dialect_of_path(scope["path"], Headers(scope=scope), dialects) or dialects[0]
        return JSONResponse(dialect.error_body(refusal), refusal.status)

    rule = WebPageRule(
        allowed_hosts=frozenset(settings.allowed_hosts),
        machine_name=socket.gethostname(),
        # A page that uses DNS rebinding has no key.
        checks_host=not (settings.require_keys and settings.admin_key),
        host_remedy="name {} in settings.allowed_hosts",
    )
    app.add_middleware(WebPageMiddleware, rule=rule, answer=answer)


def _dialect_of_path(
    path: str, headers: Mapping[str, str], dialects: Sequence[Dialect]
) -> Dialect | None:
    """Return the dialect of a request below `/v1`; None for other requests."""
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
    """Return the first dialect with a route that begins with `start`."""
    for dialect in dialects:
        if any(f"{route.path}/".startswith(f"{start}/") for route in dialect.routes):
            return dialect
    return None


def answered(
    endpoint: Endpoint,
    error_body_for: Callable[[Request], ErrorBody],
    *,
    invalid_status: int = 422,
) -> Endpoint:
    """Wrap an endpoint so that exceptions become error responses of the proxy.

    `error_body_for` returns the function that builds the body of an error response;
    `invalid_status` is the status for a body with missing or mistyped fields.
    """

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_DISCONNECTED)
        except Exception as error:  # one request: answered, and logged if unexpected
            refusal = as_refusal(error)
            if refusal.status == 422:
                refusal.status = invalid_status
            if refusal.status == 500:
                logger.exception("request to %s failed", request.url.path.rpartition("/")[2])
            body = error_body_for(request)(refusal)
            return JSONResponse(body, status_code=refusal.status, headers=refusal.headers)

    return guarded


def _endpoint(route: Route, state: ProxyState) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        session = part_of(request, state, opens=route.method == "POST")
        body: dict[str, Any] = {}
        max_bytes = state.settings.max_body_bytes
        with session.bodies.request() as hold:
            if route.method == "POST":
                body = await read_object(request, max_bytes=max_bytes, hold=hold)
            path_params = {k: str(v) for k, v in request.path_params.items() if k != "uuid"}
            exchange = Exchange(session, body, path_params, request.query_params, request.headers)
            response = await _watched(request, route.handler(exchange))
        names = sorted(name for name in exchange.ignored if _SAFE_NAME.fullmatch(name))
        if names:
            response.headers[IGNORED_HEADER] = ", ".join(names[:_MOST_NAMES])
        return response

    return endpoint


async def _watched(request: Request, work: Awaitable[Response]) -> Response:
    """Await `work`, and cancel it if the client disconnects. The body must have been read."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_anthropic(request: Request) -> bool:
    return ANTHROPIC.version_header in request.headers


class ManagementRoutes:
    """Routes for operators: health, models, servers and sessions."""

    def __init__(self, state: ProxyState) -> None:
        self._state = state
        self._started_at = time.time()

    def mount(self, app: FastAPI) -> None:
        for path, endpoint, method in (
            ("/health", self.health, "GET"),
            ("/v1/models", self.models, "GET"),
            ("/{uuid}/v1/models", self.models, "GET"),
            ("/v1/models/{model:path}", self.model, "GET"),
            ("/{uuid}/v1/models/{model:path}", self.model, "GET"),
            ("/setup", self.setup, "POST"),
            ("/servers", self.servers, "GET"),
            ("/sessions/create", self.create_session, "POST"),
            ("/sessions", self.sessions, "GET"),
            ("/{uuid}/nodes", self.nodes, "GET"),
            ("/{uuid}", self.delete_session, "DELETE"),
        ):
            guarded = answered(
                endpoint,
                lambda r: ANTHROPIC.error_body if _is_anthropic(r) else OPENAI.error_body,
            )
            app.add_api_route(path, guarded, methods=[method], tags=["management"])

    async def health(self, request: Request) -> Response:
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
        describe = anthropic_model_list if _is_anthropic(request) else model_list
        return JSONResponse(describe(*self._served(request)))

    async def model(self, request: Request) -> Response:
        model_name, created = self._served(request)
        wanted = request.path_params["model"]
        if wanted != model_name:
            raise ProxyRefusal(
                f"the model {wanted!r} does not exist; this proxy has {model_name!r}, which "
                "answers requests for any model",
                status=404,
                code="model_not_found",
                param="model",
            )
        describe = anthropic_model_card if _is_anthropic(request) else model_card
        return JSONResponse(describe(model_name, created))

    def _served(self, request: Request) -> tuple[str, float]:
        """Return model name and creation time of the session in the URL, or of the proxy."""
        if "uuid" in request.path_params:
            session = session_of(request, self._state)
            return session.model_name, session.created_at
        check_anyone(request, self._state)
        return self._state.model_name, self._started_at

    async def setup(self, request: Request) -> Response:
        check_admin(request, self._state.settings)
        await self._state.set_up(read_body(SetupRequest, await self._body(request)))
        answer = {"status": "ok", "servers": len(self._state.servers)}
        return JSONResponse({**answer, "model_name": self._state.model_name})

    async def servers(self, request: Request) -> Response:
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
        check_admin(request, self._state.settings)
        wanted = read_body(SessionCreateRequest, await self._body(request))
        session = self._state.open_session(wanted)
        session.span = remote_span(request.headers.get(HEADER))
        answer = SessionCreateResponse.model_validate(session, from_attributes=True)
        return JSONResponse(answer.model_dump())

    async def sessions(self, request: Request) -> Response:
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
        session = part_of(request, self._state, opens=False)
        # Long sessions hold a million tokens: serialize to bytes without intermediate objects.
        body = b'{"nodes":' + _NODES.dump_json(session.nodes) + b"}"
        return Response(body, media_type="application/json")

    async def delete_session(self, request: Request) -> Response:
        """Delete a session, or a part of it; its requests in flight are answered with 404."""
        session = session_of(request, self._state)
        part_id = request.headers.get(SESSION_HEADER, "").strip()
        if part_id and part_id != session.uuid:
            self._state.sessions.delete_part(session, part_id)
        else:
            self._state.sessions.delete(session)
        return JSONResponse({"status": "deleted", "uuid": session.uuid})

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, max_bytes=self._state.settings.max_body_bytes)


def create_app(
    server_manager: HasServers,
    tokenizer: Any,
    model_name: str = "unknown",
    *,
    settings: ProxySettings | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Build the proxy's application.

    Args:
        server_manager: A `ServerManager`, or any object with a list `servers`.
        tokenizer: Tokenizer of the served model; None uses the servers' own.
        model_name: Model name in answers.
        settings: Limits and keys; by default no keys are required.
        clock: Seconds since the epoch, for the expiry of sessions.
    """
    state = ProxyState(server_manager, tokenizer, model_name, settings or ProxySettings(), clock)
    return app_of_state(state)


def app_of_state(state: ProxyState, dialects: Sequence[Dialect] = (OPENAI, *DIALECTS)) -> FastAPI:
    """Build the application with an existing state."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(_sweep(state))
        try:
            yield
        finally:
            sweeper.cancel()
            await state.close()

    app = FastAPI(title="ManagedServer OpenAI Proxy", lifespan=lifespan)
    ManagementRoutes(state).mount(app)
    for dialect in dialects:
        mount_dialect(app, dialect, state)
    answer_unknown_routes(app, dialects)
    refuse_web_pages(app, dialects, state.settings)
    return app


async def _sweep(state: ProxyState) -> None:
    pause_s = min(_LONGEST_SWEEP_S, state.settings.session_idle_s / 4)
    while True:
        await asyncio.sleep(pause_s)
        state.sessions.expire()


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that does not install signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: FastAPI, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app` in the running event loop and yield its port; OSError if it cannot be bound.

    Port 0 selects a free one. Connections are closed on exit.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=2048) as listener:
        config = uvicorn.Config(
            app,
            access_log=False,
            lifespan="on",
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            ws="none",
        )
        server = _EmbeddedServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not task.done():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(_POLL_S)
            if task.done():
                raise RuntimeError("the proxy stopped during startup; see its log for the reason")
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task


class AgentTrajectory(NamedTuple):
    """Sequences and score of one agent's rollout."""

    nodes: list[SequenceNode]
    """One sequence per conversation; sub-agents and rewritten histories add more."""
    score: float
    """Score of each sequence."""


def group_of_agents(trajectories: Sequence[AgentTrajectory]) -> ScoredDataGroup | None:
    """Combine the agents of one item into a group: a row per sequence, with its agent's score.

    `group_overrides` has the number of rows if it differs from the number of agents. If any
    sequence was encoded from text, the group is marked and has no logprobs. None if an agent
    sampled nothing.
    """
    if not trajectories or not all(trajectory.nodes for trajectory in trajectories):
        return None
    rows = [(node, score) for nodes, score in trajectories for node in nodes]
    group: ScoredDataGroup = {
        "tokens": [node.tokens for node, _ in rows],
        "masks": [node.masked_tokens for node, _ in rows],
        "scores": [score for _, score in rows],
        "inference_logprobs": [node.logprobs for node, _ in rows],
    }
    if any((node.metadata or {}).get(FROM_TEXT) for node, _ in rows):
        group["inference_logprobs"] = None
        group["tokenized_from_text"] = True
    if len(rows) != len(trajectories):
        group["group_overrides"] = {"group_size": len(rows)}
    return group


class AgentSession:
    """Connection settings for one agent, and the sequences it sampled.

    Attributes:
        base_url: Base URL for OpenAI clients, ends in `/v1`.
        anthropic_base_url: Base URL for Anthropic clients, which add `/v1` themselves.
        api_key: Key for both; identifies the session.
        model: Model name for agents; requests with other names are answered too.
    """

    def __init__(self, root_url: str, session: SessionState) -> None:
        self._session = session
        self.base_url = f"{root_url}/v1"
        self.anthropic_base_url = root_url
        self.api_key = session.api_key
        self.model = session.model_name

    @property
    def environment(self) -> dict[str, str]:
        traceparent = self._session.span.traceparent
        return {
            **({"TRACEPARENT": traceparent} if traceparent is not None else {}),
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    @property
    def session_ids(self) -> list[str]:
        """Values of `X-Session-ID` in requests with this key, oldest first."""
        return list(self._session.parts)

    def nodes(self, session_id: str | None = None) -> list[SequenceNode]:
        """Return the sequences recorded so far; empty once the session has ended.

        Their policy versions are recorded for the calling rollout, since agents sample outside its
        task. With `session_id`, only sequences of requests with this `X-Session-ID` are returned.
        """
        parts = self._session.parts
        session = self._session if session_id is None else parts.get(session_id)
        nodes = [] if session is None else session.nodes
        for node in nodes:
            note_node(node.tokens, node.metadata)
        return nodes

    def turns(self) -> list[AgentTurn]:
        """Return the turns in the order of their answers, `row` being an index of `nodes()`.

        Empty unless the session was opened with `records_turns`.
        """
        log = self._session.log
        return [] if log is None else log.placed([node.tokens for node in self._session.nodes])

    def trajectory(self, score: float, session_id: str | None = None) -> AgentTrajectory:
        return AgentTrajectory(self.nodes(session_id), score)


class AgentProxy:
    """A proxy on a local port, for any number of rollouts; `start` and `close`, or `async with`.

    Every route requires a key: agents have that of their session; the administrator key is random
    and secret.

    Args:
        server_manager: The environment's `self.server`.
        tokenizer: The environment's `self.tokenizer`; None uses the servers' own.
        model_name: Model name in answers.
        host: Address to bind; agents in containers may need a non-local one.
        port: Port to bind; 0 selects a free one.
        settings: Limits; keys are always required.
        clock: Seconds since the epoch, for the expiry of sessions.
    """

    def __init__(
        self,
        server_manager: HasServers,
        tokenizer: Any = None,
        *,
        model_name: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        settings: ProxySettings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        keys = {"require_keys": True, "admin_key": secrets.token_urlsafe(32)}
        locked = (settings or ProxySettings()).model_copy(update=keys)
        self._state = ProxyState(server_manager, tokenizer, model_name, locked, clock)
        self._host = host
        self._port = port
        self._stack = contextlib.AsyncExitStack()
        self._root_url: str | None = None

    @property
    def root_url(self) -> str:
        """URL of the proxy; raises RuntimeError while it is not running."""
        if self._root_url is None:
            raise RuntimeError("the proxy is not running; call `start` first")
        return self._root_url

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients; the key identifies the session."""
        return f"{self.root_url}/v1"

    async def start(self) -> None:
        app = app_of_state(self._state)
        port = await self._stack.enter_async_context(serving(app, host=self._host, port=self._port))
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._root_url = f"http://{host}:{port}"

    async def close(self) -> None:
        """End every session and close the port; does nothing if the proxy is not running."""
        self._root_url = None
        self._state.sessions.close()
        await self._stack.aclose()

    async def __aenter__(self) -> AgentProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def session(
        self,
        *,
        tool_parser: str = "hermes",
        track_tree: bool = False,
        base_url: str | None = None,
        records_turns: bool = False,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> AsyncIterator[AgentSession]:
        """Yield a session for one rollout, and delete it at the end.

        Args:
            tool_parser: Tool-call format of the model.
            track_tree: Whether to keep every sequence instead of replacing the continued one.
            base_url: Inference server to use; None chooses the least loaded one.
            records_turns: Whether `AgentSession.turns` has the messages and times of requests.
            temperature: Sampling temperature in place of the agent's; None leaves it to the agent.
            max_tokens: Upper limit of a completion; None leaves it to the agent.

        Raises:
            ProxyRefusal: too many sessions are open, or the server is unknown.
        """
        wanted = SessionCreateRequest(
            tool_parser=tool_parser, track_tree=track_tree, base_url=base_url
        )
        session = self._state.open_session(wanted)
        session.span = current_span()
        session.log = TurnLog() if records_turns else None
        session.sampling = FixedSampling(temperature, max_tokens)
        try:
            yield AgentSession(self.root_url, session)
        finally:
            self._state.sessions.delete(session)
