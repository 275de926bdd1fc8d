"""The HTTP application of the trajectory service.

environments ── POST /scored_data ──►┐           ┌── GET /batch ──► trainer
                                     ├─── Run ───┤
environments ◄─ GET /status-env ─────┘           └── GET /status ─► anybody
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.middleware.cors import CORSMiddleware

from atroposlib.api.allocation import MIN_ENV_WEIGHT
from atroposlib.api.compression import GZipRequestMiddleware, GZipResponseMiddleware
from atroposlib.api.responses import validation_refusal
from atroposlib.api.routes import environments, inspection, operations, trainer
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
from atroposlib.api.store.memory import MemoryRunStore
from atroposlib.wire import decode_group

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


def create_app(settings: ApiSettings | None = None) -> FastAPI:
    """Build a service with a run of its own.

    Args:
        settings: limits and switches; the defaults when None.
    """
    settings = settings or ApiSettings()
    run = Run(MemoryRunStore())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run.open()
        yield
        await run.close()

    application = FastAPI(title="AtroposLib API", lifespan=lifespan)
    application.state = StateView(run)
    for module in (operations, trainer, environments, inspection):
        application.include_router(module.router)
    application.add_exception_handler(RequestValidationError, validation_refusal)
    # The middleware added last sees a request first.
    if settings.cors_origins:
        application.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_credentials=True,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    application.add_middleware(
        GZipResponseMiddleware, min_bytes=settings.gzip_min_bytes, level=settings.gzip_level
    )
    application.add_middleware(GZipRequestMiddleware, max_body_bytes=settings.max_body_bytes)
    return application


app = create_app()


def _scored_data_to_dict(scored_data: ScoredData) -> dict[str, Any]:
    """Return a group as the dictionary `/batch` delivers: all fourteen keys."""
    return scored_data.model_dump()


async def _process_scored_data(scored_data: ScoredData) -> dict[str, Any]:
    """Admit a group to the run of the module's `app`; answers like `POST /scored_data`."""
    run: Run = app.state.run
    admission = await run.admit([decode_group(scored_data.model_dump_json().encode())])
    return reply_of(admission.placements[0])
