"""How a route reaches the run it serves."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from atroposlib.api.run_state import RunState

__all__ = ["Run"]


async def _run_of(request: Request) -> RunState:
    run: RunState = request.app.state.run
    return run


Run = Annotated[RunState, Depends(_run_of)]
