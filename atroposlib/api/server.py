"""The HTTP application of the trajectory service: `create_app`, error responses, and `app.state`.

    environments ── POST /scored_data ──►┐           ┌── GET /batch ──► trainer
                                         ├─── Run ───┤
    environments ◄─ GET /status-env ─────┘           └── GET /status ─► any client

`REFUSALS` maps each kind of error to its response. `StateView` has the attributes that tools read
from `app.state`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from atroposlib.api.auth import BearerAuthMiddleware, changes_on_get, read_token_file
from atroposlib.api.concurrency import ConcurrencyRule
from atroposlib.api.engines import EngineArbiter
from atroposlib.api.environments import MIN_ENV_WEIGHT
from atroposlib.api.inspection import (
    get_latest_example,
    get_status,
    groups_router,
    info,
    inspection_router,
    wandb_info,
)
from atroposlib.api.metrics import ServiceMetrics
from atroposlib.api.middleware import (
    Deflater,
    GZipRequestMiddleware,
    GZipResponseMiddleware,
    RequestErrorsMiddleware,
    RequestMetricsMiddleware,
)
from atroposlib.api.queue import BusyError, KeyReusedError, QueueFullError, RunLimits
from atroposlib.api.responses import json_response
from atroposlib.api.routes import (
    BUSIEST_ROUTES,
    EVERYWHERE,
    disconnect_env,
    environments_router,
    get_batch,
    get_status_env,
    operations_router,
    register,
    register_env_url,
    reply_of,
    reset_data,
    root,
    scored_data,
    scored_data_list,
    trainer_router,
)
from atroposlib.api.run import Run
from atroposlib.api.schemas import (
    EnvIdentifier,
    Info,
    RegisterEnv,
    Registration,
    ScoredData,
    Status,
)
from atroposlib.api.settings import ApiSettings
from atroposlib.api.spans import GroupSpans
from atroposlib.api.state import RunState
from atroposlib.api.store.base import StoreFullError, WatchedStore
from atroposlib.api.store.open import fresh_run_name, open_store
from atroposlib.errors import ConfigError, GroupError, RunStoreError
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.utils.aio import end_task
from atroposlib.utils.request_limits import BodyBudget
from atroposlib.utils.tracing import open_tracer
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRule
from atroposlib.wire import BODY_NOT_TEXT, BODY_TYPES, WireError, decode_group

__all__ = [
    "MIN_ENV_WEIGHT",
    "REFUSALS",
    "EnvIdentifier",
    "GZipRequestMiddleware",
    "Info",
    "RegisterEnv",
    "Registration",
    "ScoredData",
    "StateView",
    "Status",
    "app",
    "create_app",
    "disconnect_env",
    "get_batch",
    "get_latest_example",
    "get_status",
    "get_status_env",
    "info",
    "logger",
    "refusal_of",
    "register",
    "register_env_url",
    "reset_data",
    "root",
    "scored_data",
    "scored_data_list",
    "wandb_info",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_ECHO_BYTES = 200
_RETRY_AFTER_S = 5


def refusal_of(error: WireError) -> Response:
    """Return the response to a malformed group, in the format of the framework."""
    if error.kind == "not_text":
        return json_response({"detail": BODY_NOT_TEXT}, 400)
    if error.kind == "too_large":
        return json_response({"detail": str(error)}, 413)
    return _detail([{"type": error.kind, "loc": ("body", *error.path), "msg": str(error)}])


async def _refuse_invalid(request: Request, error: Exception) -> Response:
    """Respond to a failed validation like the framework, but with an input that can be encoded."""
    assert isinstance(error, RequestValidationError)  # registered for this class only
    return _detail(error.errors())


async def _refuse_content(request: Request, error: Exception) -> Response:
    if isinstance(error, WireError):
        return refusal_of(error)
    return json_response({"detail": str(error)}, 422)


async def _refuse_for_now(request: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFullError | BusyError)  # registered for these classes only
    wait_s = math.ceil(error.retry_after_s or _RETRY_AFTER_S)
    headers = {"Retry-After": str(wait_s)}
    return json_response({"detail": str(error)}, error.status or 503, headers)


async def _refuse_without_store(request: Request, error: Exception) -> Response:
    if isinstance(error, StoreFullError):
        text = f"{error}; nothing was stored"
    else:
        # The store logs when it starts to fail; a line per request would hide that line.
        logger.debug("%s %s was not served: %s", request.method, request.url.path, error)
        text = f"the store of the run does not work: {error}; nothing was acknowledged"
    return json_response({"detail": text}, 503, {"Retry-After": str(_RETRY_AFTER_S)})


REFUSALS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    RequestValidationError: _refuse_invalid,
    GroupError: _refuse_content,
    KeyReusedError: _refuse_content,
    QueueFullError: _refuse_for_now,
    BusyError: _refuse_for_now,
    RunStoreError: _refuse_without_store,
    OSError: _refuse_without_store,
    ConfigError: _refuse_without_store,
}
"""The response to each kind of error that a route raises."""


def _detail(errors: Sequence[Any]) -> Response:
    kept = ("type", "loc", "msg")
    detail = [
        {**{key: error[key] for key in kept}, "input": _echo(error.get("input"))}
        for error in errors
    ]
    return json_response({"detail": detail}, 422)


def _echo(value: Any) -> Any:
    """Return the value if it is short and can be encoded, else the start of its `repr`."""
    try:
        if len(msgspec.json.encode(value)) <= _MAX_ECHO_BYTES:
            return value
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    return ascii(value)[:_MAX_ECHO_BYTES]


def _describe_envs(state: RunState) -> list[dict[str, object]]:
    return [
        {
            "max_context_len": env.max_token_length,
            "weight": env.weight,
            "desired_name": env.desired_name,
            "real_name": env.real_name,
            "registered_id": env.env_id,
            "last_update": env.last_update,
            "connected": env.is_connected,
            "min_batch_allocation": env.min_batch_allocation,
            "group_size": env.largest_group,
        }
        for env in state.envs
    ]


def _view(read: Callable[[RunState], Any]) -> property:
    return property(lambda self: read(self.run.state))


def _setting(name: str, default: Any) -> property:
    return _view(lambda run: getattr(run.registration, name) if run.registration else default)


class StateView(State):
    """The class of `app.state`: the run as `run`, and values derived from it.

    Groups are listed by their descriptions; their payloads are in the store.
    """

    def __init__(self, run: Run) -> None:
        super().__init__({"run": run})

    queue = _view(lambda run: list(run.queue))
    buffer = _view(lambda run: {env.env_id: list(env.buffer) for env in run.envs if env.buffer})
    curr_batch = _view(lambda run: [])  # batches are formed when they are requested
    started = _view(lambda run: run.is_started)
    envs = _view(_describe_envs)
    requesters = _view(lambda run: list(run.trainer_ids))
    latest = _view(lambda run: run.latest)
    group = _setting("wandb_group", None)
    project = _setting("wandb_project", None)
    batchsize = _setting("batch_size", -1)
    max_token_len = _setting("max_token_len", -1)
    checkpoint_dir = _setting("checkpoint_dir", "")
    save_checkpoint_interval = _setting("save_checkpoint_interval", -1)
    num_steps = _setting("num_steps", -1)
    status_dict = _view(lambda run: {"step": run.step})


_BODY_THREADS = 2
"""Number of threads for large bodies, whose work releases the GIL."""
_TICK_S = 1.0


class _BodyThreads(Executor):
    """Threads for large bodies, started by the first one, also after a shutdown.

    An application has several lifespans if a test client enters it more than once.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_BODY_THREADS, thread_name_prefix="bodies")
        return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)


def create_app(settings: ApiSettings | None = None) -> FastAPI:
    """Create an application with its own run, loaded at the start or by the first request.

    Args:
        settings: None uses the defaults, with a run in memory.

    Raises:
        ConfigError: the store or the token file cannot be used.
    """
    settings = settings or ApiSettings()
    replica = uuid4().hex
    store = WatchedStore(
        open_store(
            settings.store,
            data_dir=settings.data_dir,
            run_name=settings.run_name or fresh_run_name(),
            fsync=settings.fsync,
            replica=replica,
        )
    )
    limits = RunLimits(**{limit.name: getattr(settings, limit.name) for limit in fields(RunLimits)})
    run = Run(store, limits=limits, replica=replica)
    metrics = ServiceMetrics(run)
    arbiter = _engine_arbiter(settings)
    if arbiter is not None:
        run.share_engines(lambda: arbiter.max_sequences)
        metrics.registry.register(arbiter)
    run.on_delivered = metrics.observe_delivery
    store.observe = metrics.observe_store
    threads = _BodyThreads()
    application = FastAPI(
        title="AtroposLib API", lifespan=_lifespan_of(run, threads, arbiter), responses=EVERYWHERE
    )
    application.state = StateView(run)
    application.state.settings = settings
    application.state.threads = threads
    application.state.deflater = Deflater(
        min_bytes=settings.gzip_min_bytes, level=settings.gzip_level, threads=threads
    )
    application.state.metrics = metrics
    application.state.watched_store = store
    # Routes are matched in this order, the most frequent first.
    for router in (
        environments_router,
        operations_router,
        trainer_router,
        inspection_router,
        groups_router,
    ):
        application.include_router(router)
    # These routes bypass the framework, which saves a quarter of the time. The same routes in the
    # routers remain for the OpenAPI document.
    application.router.routes[:0] = BUSIEST_ROUTES
    for kind, refuse in REFUSALS.items():
        application.add_exception_handler(kind, refuse)
    _add_middleware(application, settings, threads)
    return application


def _engine_arbiter(settings: ApiSettings) -> EngineArbiter | None:
    if not settings.engines:
        return None
    rule = ConcurrencyRule(ceiling=settings.max_engine_sequences, window_s=settings.engine_window_s)
    return EngineArbiter(settings.engines, rule=rule, poll_s=settings.engine_poll_s)


def _lifespan_of(
    run: Run, threads: Executor, arbiter: EngineArbiter | None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run.open()
        tracer = open_tracer("atropos-service")
        if tracer is not None:
            alive = await run.store.alive_replicas()
            run.on_applied = GroupSpans(tracer, run.state, replica=run.replica, alive=alive).note
        tasks = [asyncio.create_task(_tick(run))]
        if arbiter is not None:
            tasks.append(asyncio.create_task(arbiter.run()))
        try:
            yield
        finally:
            for task in tasks:
                await end_task(task)
            await run.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            threads.shutdown(wait=False)

    return lifespan


async def _tick(run: Run) -> None:
    """Run the periodic work of the run despite errors; cancelled when the service stops."""
    last_error = ""
    while True:
        await asyncio.sleep(_TICK_S)
        try:
            await run.tick()
            last_error = ""
        except Exception as error:
            # An unreachable store fails every second in the same way.
            if str(error) != last_error:
                logger.exception("the periodic work of the run failed; retrying")
            last_error = str(error)


def _add_middleware(application: FastAPI, settings: ApiSettings, threads: Executor) -> None:
    """Wrap the application; middleware added last runs first."""
    if settings.cors_origins:
        application.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_credentials=True,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    application.add_middleware(
        GZipResponseMiddleware,
        min_bytes=settings.gzip_min_bytes,
        level=settings.gzip_level,
        threads=threads,
    )
    application.add_middleware(
        GZipRequestMiddleware,
        max_body_bytes=settings.max_body_bytes,
        budget=BodyBudget(settings.max_buffered_bytes),
        threads=threads,
    )
    if settings.token_file is not None:
        # Runs before a body is read.
        tokens = read_token_file(settings.token_file)
        application.add_middleware(BearerAuthMiddleware, tokens=tokens)
    application.add_middleware(WebPageMiddleware, rule=_web_page_rule(settings))
    application.add_middleware(RequestErrorsMiddleware)
    application.add_middleware(RequestMetricsMiddleware, metrics=application.state.metrics.requests)


def _web_page_rule(settings: ApiSettings) -> WebPageRule:
    return WebPageRule(
        allowed_hosts=frozenset(settings.allowed_hosts),
        allowed_origins=frozenset(origin.lower() for origin in settings.cors_origins),
        machine_name=socket.gethostname(),
        media_types=BODY_TYPES,
        changes=changes_on_get,
        # A page under a rebound DNS name has no token.
        checks_host=settings.token_file is None,
        host_remedy="start the service with --allowed-host {}",
        origin_remedy="start the service with --cors-origin {}",
    )


app = create_app()


def _scored_data_to_dict(scored_data: ScoredData) -> dict[str, Any]:
    """Return a group as `/batch` delivers it: a dictionary with fourteen keys and present notes."""
    notes = {field.name for field in GROUP_FIELDS if field.is_note}
    values = scored_data.model_dump()
    return {key: value for key, value in values.items() if value is not None or key not in notes}


async def _process_scored_data(scored_data: ScoredData) -> dict[str, Any]:
    """Admit a group to the run of the module's `app`; return the reply of `POST /scored_data`."""
    run: Run = app.state.run
    admission = await run.admit([decode_group(scored_data.model_dump_json().encode())])
    return reply_of(admission.placements[0])
