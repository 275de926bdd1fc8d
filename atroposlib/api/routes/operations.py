"""What an operator calls: greeting, health, metrics, reset."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from atroposlib.api.metrics import ServiceMetrics
from atroposlib.api.routes.dependencies import RunOfApp
from atroposlib.api.run import Run
from atroposlib.api.store.watched import WatchedStore
from atroposlib.errors import AtroposError

__all__ = ["get_metrics", "is_live", "is_ready", "reset_data", "root", "router"]

router = APIRouter(tags=["operations"])


@router.get("/")
async def root() -> dict[str, Any]:
    """Say who answers."""
    return {"message": "AtroposLib API"}


@router.get("/health/live")
async def is_live() -> dict[str, Any]:
    """Answer as long as the process serves requests."""
    return {"status": "live"}


@router.get("/health/ready", response_model=None)
async def is_ready(request: Request) -> Response | dict[str, Any]:
    """Answer 200 when groups and batches can be served, with counts; else 503 with the reason."""
    run: Run = request.app.state.run
    store: WatchedStore = request.app.state.watched_store
    try:
        await run.open()
        problem = None if run.failure is None else str(run.failure)
    except AtroposError as error:
        problem = str(error)
    problem = problem or await store.problem()
    if problem is not None:
        return JSONResponse({"status": "not ready", "reason": problem}, 503)
    return {"status": "ready", "counters": dict(run.state.counters + run.counters)}


@router.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(run: RunOfApp, request: Request) -> Response:
    """Return the metrics in Prometheus' text format or, where `Accept` says so, OpenMetrics."""
    metrics: ServiceMetrics = request.app.state.metrics
    content, media_type = metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": media_type})


@router.get("/reset_data", response_class=PlainTextResponse)
async def reset_data(run: RunOfApp) -> PlainTextResponse:
    """Forget the run and everything in it.

    This GET destroys data; the contract has it so. Environments that go on are answered 404 and
    register again.
    """
    await run.reset()
    return PlainTextResponse("Reset successful")
