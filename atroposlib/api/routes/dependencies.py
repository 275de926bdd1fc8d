"""How a route reaches the run it serves."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from atroposlib.api.run import Run

__all__ = ["RunOfApp"]


async def _run_of(request: Request) -> Run:
    run: Run = request.app.state.run
    await run.open()  # an application whose lifespan nobody runs is opened by its first request
    return run


RunOfApp = Annotated[Run, Depends(_run_of)]
