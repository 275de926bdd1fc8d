"""The HTTP application of the trajectory service.

environments ── POST /scored_data ──►┐           ┌── GET /batch ──► trainer
                                     ├─── Run ───┤
environments ◄─ GET /status-env ─────┘           └── GET /status ─► anybody
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from atroposlib.api.access import changes_on_get
from atroposlib.api.admission import RunLimits
from atroposlib.api.allocation import MIN_ENV_WEIGHT
from atroposlib.api.auth import BearerAuthMiddleware, read_token_file
from atroposlib.api.bodies import BodyBudget
from atroposlib.api.compression import GZipRequestMiddleware, GZipResponseMiddleware
from atroposlib.api.gzip_pieces import Deflater
from atroposlib.api.logs import RequestErrorsMiddleware
from atroposlib.api.metrics import ServiceMetrics
from atroposlib.api.refusals import REFUSALS
from atroposlib.api.request_metrics import RequestMetricsMiddleware
from atroposlib.api.routes import environments, groups, inspection, operations, trainer
from atroposlib.api.routes.documentation import EVERYWHERE
from atroposlib.api.routes.environments import (
    disconnect_env,
    get_status_env,
    register_env_url,
    reply_of,
    scored_data,
    scored_data_list,
)
from atroposlib.api.routes.inspection import get_latest_example, get_status, info, wandb_info
from atroposlib.api.routes.operations import reset_data, root
from atroposlib.api.routes.trainer import get_batch, register
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
from atroposlib.api.state_view import StateView
from atroposlib.api.store.base import RunStore
from atroposlib.api.store.open import fresh_run_name, open_store
from atroposlib.api.store.watched import WatchedStore
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.utils.awaiting import end_task
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRule
from atroposlib.wire import BODY_TYPES, decode_group

__all__ = [
    "MIN_ENV_WEIGHT",
    "EnvIdentifier",
    "GZipRequestMiddleware",
    "Info",
    "RegisterEnv",
    "Registration",
    "ScoredData",
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
    "register",
    "register_env_url",
    "reset_data",
    "root",
    "scored_data",
    "scored_data_list",
    "wandb_info",
]

logger = logging.getLogger(__name__)

_BODY_THREADS = 2
"""Threads for the work on large bodies; what they do lets the event loop run."""
_TICK_S = 1.0


def create_app(settings: ApiSettings | None = None) -> FastAPI:
    """Build a service with a run of its own.

    The run is loaded when the application starts, or by its first request.

    Args:
        settings: limits and switches; the defaults, with a run in memory, when None.

    Raises:
        ConfigError: the settings name a store or a token file that cannot be used.
    """
    settings = settings or ApiSettings()
    replica = uuid4().hex
    store = WatchedStore(_store_of(settings, replica))
    run = Run(store, limits=_limits_of(settings), replica=replica)
    metrics = ServiceMetrics(run)
    run.on_handed_out = metrics.observe_handout
    store.observe = metrics.observe_store
    threads = ThreadPoolExecutor(_BODY_THREADS, thread_name_prefix="bodies")
    application = FastAPI(
        title="AtroposLib API", lifespan=_lifespan_of(run, threads), responses=EVERYWHERE
    )
    application.state = StateView(run)
    application.state.settings = settings
    application.state.threads = threads
    application.state.deflater = Deflater(
        min_bytes=settings.gzip_min_bytes, level=settings.gzip_level, threads=threads
    )
    application.state.metrics = metrics
    application.state.watched_store = store
    # Routes are tried in this order: what is asked most comes first.
    for module in (environments, operations, trainer, inspection, groups):
        application.include_router(module.router)
    _serve_directly(application, environments.BUSIEST_ROUTES)
    for kind, refuse in REFUSALS.items():
        application.add_exception_handler(kind, refuse)
    _add_middleware(application, settings, threads)
    return application


def _serve_directly(application: FastAPI, busiest: Sequence[Route]) -> None:
    """Answer the busiest routes without the framework's steps for arguments and results.

    They take the request and give a response themselves, so only its share of the time would be
    left: a quarter. The same routes in the routers stay for the document of the interface.
    """
    application.router.routes[:0] = busiest


def _store_of(settings: ApiSettings, replica: str) -> RunStore:
    return open_store(
        settings.store,
        data_dir=settings.data_dir,
        run_name=settings.run_name or fresh_run_name(),
        fsync=settings.fsync,
        replica=replica,
    )


def _limits_of(settings: ApiSettings) -> RunLimits:
    return RunLimits(**{limit.name: getattr(settings, limit.name) for limit in fields(RunLimits)})


def _lifespan_of(
    run: Run, threads: Executor
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run.open()
        ticking = asyncio.create_task(_tick(run))
        try:
            yield
        finally:
            await end_task(ticking)
            await run.close()
            threads.shutdown(wait=False)

    return lifespan


async def _tick(run: Run) -> None:
    """Let time pass for the run, whatever happens; cancelled when the service stops."""
    trouble = ""
    while True:
        await asyncio.sleep(_TICK_S)
        try:
            await run.tick()
            trouble = ""
        except Exception as error:
            # A store that is away fails every second in the same way.
            if str(error) != trouble:
                logger.exception("what is done once a second failed; trying again")
            trouble = str(error)


def _add_middleware(application: FastAPI, settings: ApiSettings, threads: Executor) -> None:
    """Wrap the application; what is added last sees a request first."""
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
        # Before a body is read.
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
        # A page of a rebound name has no token.
        checks_host=settings.token_file is None,
        host_remedy="start the service with --allowed-host {}",
        origin_remedy="start the service with --cors-origin {}",
    )


app = create_app()


def _scored_data_to_dict(scored_data: ScoredData) -> dict[str, Any]:
    """Return a group as the dictionary `/batch` delivers: fourteen keys, and the notes it has."""
    notes = {field.name for field in GROUP_FIELDS if field.is_note}
    values = scored_data.model_dump()
    return {key: value for key, value in values.items() if value is not None or key not in notes}


async def _process_scored_data(scored_data: ScoredData) -> dict[str, Any]:
    """Admit a group to the run of the module's `app`; answers like `POST /scored_data`."""
    run: Run = app.state.run
    admission = await run.admit([decode_group(scored_data.model_dump_json().encode())])
    return reply_of(admission.placements[0])
