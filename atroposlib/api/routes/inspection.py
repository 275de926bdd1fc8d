"""What anybody may ask about the run; nothing here changes it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from atroposlib.api.responses import SplicedResponse
from atroposlib.api.routes.dependencies import Run

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
async def wandb_info(run: Run) -> dict[str, Any]:
    """Return the trainer's run group and project, null before it registered."""
    if run.registration is None:
        return {"group": None, "project": None}
    return {"group": run.registration.wandb_group, "project": run.registration.wandb_project}


@router.get("/info")
async def info(run: Run) -> dict[str, Any]:
    """Return the batch size and the length limit, -1 before the trainer registered."""
    if run.registration is None:
        return {"batch_size": -1, "max_token_len": -1}
    return {
        "batch_size": run.registration.batch_size,
        "max_token_len": run.registration.max_token_len,
    }


@router.get("/status")
async def get_status(run: Run) -> dict[str, Any]:
    """Return the step and the number of queued groups.

    While something waits that is not in these figures, `buffered_sequences` and `stalls` say so.
    """
    answer: dict[str, Any] = {"current_step": run.step, "queue_size": len(run.queue)}
    if run.envs.buffered_sequences:
        answer["buffered_sequences"] = run.envs.buffered_sequences
    stalls = [stall._asdict() for stall in run.stalls()]
    if stalls:
        answer["stalls"] = stalls
    return answer


@router.get("/latest_example", response_model=None)
async def get_latest_example(run: Run) -> Response | dict[str, Any]:
    """Return the group queued last; empty lists when there is none."""
    if run.latest_payload is None:
        return {key: [] for key in _NO_EXAMPLE_KEYS}
    return SplicedResponse(run.latest_payload)
