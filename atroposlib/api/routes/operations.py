"""What an operator calls: greeting, health, reset."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from atroposlib.api.routes.dependencies import RunOfApp

__all__ = ["is_live", "is_ready", "reset_data", "root", "router"]

router = APIRouter(tags=["operations"])


@router.get("/")
async def root() -> dict[str, Any]:
    """Say who answers."""
    return {"message": "AtroposLib API"}


@router.get("/health/live")
async def is_live() -> dict[str, Any]:
    """Answer as long as the process serves requests."""
    return {"status": "live"}


@router.get("/health/ready")
async def is_ready(run: RunOfApp) -> dict[str, Any]:
    """Answer when groups and batches can be served, with counts since the process started."""
    return {"status": "ready", "counters": dict(run.state.counters + run.counters)}


@router.get("/reset_data", response_class=PlainTextResponse)
async def reset_data(run: RunOfApp) -> PlainTextResponse:
    """Forget the run and everything in it.

    This GET destroys data; the contract has it so. Environments that go on are answered 404 and
    register again.
    """
    await run.reset()
    return PlainTextResponse("Reset successful")
