"""The proxy as an application: state, dialects and management wired together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI

from atroposlib.envs.server_handling.proxy.backends import HasServers
from atroposlib.envs.server_handling.proxy.dialect import Dialect
from atroposlib.envs.server_handling.proxy.dialects import DIALECTS
from atroposlib.envs.server_handling.proxy.management import ManagementRoutes
from atroposlib.envs.server_handling.proxy.mounting import (
    answer_unknown_routes,
    mount_dialect,
    refuse_web_pages,
)
from atroposlib.envs.server_handling.proxy.openai_dialect import OPENAI
from atroposlib.envs.server_handling.proxy.proxy_state import ProxyState
from atroposlib.envs.server_handling.proxy.settings import ProxySettings

__all__ = ["app_of_state", "create_app"]

_LONGEST_SWEEP_S = 60.0


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
        server_manager: A `ServerManager`, or anything with a list `servers`.
        tokenizer: Of the served model; None takes the servers' own.
        model_name: Name in answers.
        settings: Limits and keys; default: no keys asked for.
        clock: Seconds since the epoch, for the expiry of sessions.
    """
    state = ProxyState(server_manager, tokenizer, model_name, settings or ProxySettings(), clock)
    return app_of_state(state)


def app_of_state(state: ProxyState, dialects: Sequence[Dialect] = (OPENAI, *DIALECTS)) -> FastAPI:
    """Build the application around a state somebody else holds too."""

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
        mount_dialect(app, dialect, state.sessions, state.settings)
    answer_unknown_routes(app, dialects)
    refuse_web_pages(app, dialects, state.settings)
    return app


async def _sweep(state: ProxyState) -> None:
    """Free sessions that nobody asks for any more; ends when cancelled."""
    pause_s = min(_LONGEST_SWEEP_S, state.settings.session_idle_s / 4)
    while True:
        await asyncio.sleep(pause_s)
        state.sessions.expire()
