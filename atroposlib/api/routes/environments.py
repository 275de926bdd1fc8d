"""What an environment calls: register, post groups, ask how much to produce."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from atroposlib.api.admission import Placement
from atroposlib.api.refusals import refusal_of
from atroposlib.api.routes.dependencies import RunOfApp
from atroposlib.api.schemas import EnvIdentifier, RegisterEnv, ScoredData
from atroposlib.wire import WireError, decode_group, decode_groups

__all__ = [
    "disconnect_env",
    "get_status_env",
    "register_env_url",
    "reply_of",
    "router",
    "scored_data",
    "scored_data_list",
]

router = APIRouter(tags=["environments"])


def _documented_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_GROUP_SCHEMA = ScoredData.model_json_schema()


@router.post("/register-env")
async def register_env_url(request: RegisterEnv, run: RunOfApp) -> dict[str, Any]:
    """Join the run and get an id; until the trainer asks for batches the answer is to wait."""
    env = await run.register_env(request)
    registration = run.state.registration
    if env is None or registration is None:
        return {"status": "wait for trainer to start"}
    return {
        "status": "success",
        "env_id": env.env_id,
        "wandb_name": env.real_name,
        "checkpoint_dir": registration.checkpoint_dir,
        "starting_step": run.state.step,
        "checkpoint_interval": registration.save_checkpoint_interval,
        "num_steps": registration.num_steps,
    }


@router.post("/disconnect-env")
async def disconnect_env(request: EnvIdentifier, run: RunOfApp) -> dict[str, Any]:
    """Sign off: the environment no longer counts for weights and minimum shares."""
    if not await run.disconnect_env(request.env_id):
        error = f"no environment is registered under id {request.env_id}"
        return {"status": "failure", "error": error}
    return {"status": "success"}


@router.post("/scored_data", response_model=None, openapi_extra=_documented_body(_GROUP_SCHEMA))
async def scored_data(request: Request, run: RunOfApp) -> Response | dict[str, Any]:
    """Store one group: `received`, or `buffered` until smaller groups add up."""
    try:
        group = decode_group(await request.body())
    except WireError as error:
        run.counters[f"groups/refused_{error.kind}"] += 1
        return refusal_of(error)
    admission = await run.admit([group])
    return reply_of(admission.placements[0])


def reply_of(placement: Placement) -> dict[str, Any]:
    """Tell the sender of one group where it went."""
    if placement.buffered_sequences is None:
        return {"status": "received"}
    return {"status": "buffered", "buffer_size": placement.buffered_sequences}


@router.post(
    "/scored_data_list",
    response_model=None,
    openapi_extra=_documented_body({"type": "array", "items": _GROUP_SCHEMA}),
)
async def scored_data_list(request: Request, run: RunOfApp) -> Response | dict[str, Any]:
    """Store an array of groups, in order, all or none."""
    try:
        groups = decode_groups(await request.body())
    except WireError as error:
        run.counters[f"groups/refused_{error.kind}"] += 1
        return refusal_of(error)
    placements = (await run.admit(groups)).placements
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
    sizes = [p.buffered_sequences for p in placements if p.buffered_sequences is not None]
    if sizes:
        answer |= {"buffered": len(sizes), "last_buffer_size": sizes[-1]}
    return answer


@router.get("/status-env")
@router.post("/status-env", operation_id="post_status_env")
async def get_status_env(
    run: RunOfApp,
    identifier: Annotated[EnvIdentifier | None, Body()] = None,
    env_id: Annotated[int | None, Query()] = None,
) -> dict[str, Any]:
    """Tell one environment the step, its weight and how full the queue is in its own groups.

    The id comes in the body (also of a GET) or as a query parameter; an unknown one is 404.
    This GET remembers the largest group the environment has queued.
    """
    asked = identifier.env_id if identifier is not None else env_id
    if asked is None:
        missing = {"type": "missing", "loc": ("body", "env_id"), "msg": "Field required"}
        raise RequestValidationError([missing])
    view = await run.view_for(asked)
    if view is None:
        raise HTTPException(
            404, f"no environment is registered under id {asked}; register the environment again"
        )
    answer = view._asdict()
    if view.groups_to_start is None:
        del answer["groups_to_start"]
    return answer
