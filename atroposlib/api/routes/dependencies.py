"""What routes share: how they reach their run, and how they advertise the lanes they read."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response

from atroposlib.api.run import Run
from atroposlib.wire import MEDIA_TYPES

__all__ = ["RunOfApp", "advertises_lanes", "run_of"]

_LANES = ", ".join(MEDIA_TYPES.values())


async def run_of(request: Request) -> Run:
    """Return the run of the application; loads it if nobody has."""
    run: Run = request.app.state.run
    await run.open()  # an application whose lifespan nobody runs is opened by its first request
    return run


async def _advertise_lanes(response: Response) -> None:
    response.headers["Accept-Post"] = _LANES


RunOfApp = Annotated[Run, Depends(run_of)]

advertises_lanes = Depends(_advertise_lanes)
"""Tells clients with their first answers which media types groups may be posted in."""
