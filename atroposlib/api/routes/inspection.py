"""What anybody may ask about the run; nothing here changes it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from atroposlib.api.responses import PiecesResponse
from atroposlib.api.routes.dependencies import RunOfApp

__all__ = ["get_latest_example", "get_status", "info", "router", "wandb_info"]

router = APIRouter(tags=["inspection"])

_NO_EXAMPLE_KEYS = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "generation_params",
    "inference_logprobs",
    "messages",
    "images",
)


@router.get("/wandb_info")
async def wandb_info(run: RunOfApp) -> dict[str, Any]:
    """Return the trainer's run group and project, null before it registered."""
    registration = run.state.registration
    if registration is None:
        return {"group": None, "project": None}
    return {"group": registration.wandb_group, "project": registration.wandb_project}


@router.get("/info")
async def info(run: RunOfApp) -> dict[str, Any]:
    """Return the batch size and the length limit, -1 before the trainer registered."""
    registration = run.state.registration
    if registration is None:
        return {"batch_size": -1, "max_token_len": -1}
    return {"batch_size": registration.batch_size, "max_token_len": registration.max_token_len}


@router.get("/status")
async def get_status(run: RunOfApp) -> dict[str, Any]:
    """Return the step and the number of queued groups.

    While something waits that is not in these figures, `buffered_sequences` and `stalls` say so.
    """
    state = run.state
    answer: dict[str, Any] = {"current_step": state.step, "queue_size": len(state.queue)}
    if state.envs.buffered_sequences:
        answer["buffered_sequences"] = state.envs.buffered_sequences
    stalls = [stall._asdict() for stall in run.stalls()]
    if stalls:
        answer["stalls"] = stalls
    return answer


@router.get("/latest_example", response_model=None)
async def get_latest_example(run: RunOfApp) -> Response | dict[str, Any]:
    """Return the group queued last; empty lists when there is none."""
    latest = run.state.latest_group_id
    payload = None if latest is None else await run.payload(latest)
    if payload is None:
        return {key: [] for key in _NO_EXAMPLE_KEYS}
    return PiecesResponse([payload.content])
