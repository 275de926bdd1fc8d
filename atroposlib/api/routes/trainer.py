"""What a trainer calls: register, fetch batches."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, HTTPException
from starlette.responses import Response

from atroposlib.api.responses import PiecesResponse
from atroposlib.api.routes.dependencies import RunOfApp
from atroposlib.api.run import RegistrationConflictError
from atroposlib.api.schemas import Registration
from atroposlib.wire import encode_batch

__all__ = ["get_batch", "register", "router"]

router = APIRouter(tags=["trainer"])


@router.post("/register")
async def register(registration: Registration, run: RunOfApp) -> dict[str, Any]:
    """Start a run, or join it with the same settings (`starting_step` aside); 409 otherwise."""
    try:
        return {"uuid": await run.register_trainer(registration)}
    except RegistrationConflictError as error:
        raise HTTPException(409, str(error)) from error


@router.get("/batch", response_model=None)
async def get_batch(run: RunOfApp) -> Response | dict[str, Any]:
    """Return the oldest batch of exactly `batch_size` sequences, or null.

    This GET changes the state: the batch leaves the queue, and the step grows, once the body was
    sent in full. The first call lets environments register.
    """
    found = await run.next_batch()
    if found is None and run.state.registration is None:
        message = "Trainer not registered. Call /register first."
        return {"status": "error", "message": message, "batch": []}
    if found is None:
        return {"batch": None}
    handout, payloads = found
    return PiecesResponse(
        [encode_batch([payload.content for payload in payloads])],
        on_arrived=partial(run.acknowledge, handout.token),
        on_lost=partial(run.give_back, handout.token),
    )
