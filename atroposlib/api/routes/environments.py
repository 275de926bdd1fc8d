"""What an environment calls: register, post groups, ask how much to produce."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response
from starlette.routing import Route

from atroposlib.api.admission import Admission, OversizedGroupError, Placement
from atroposlib.api.responses import json_response
from atroposlib.api.routes.dependencies import RunOfApp, advertises_lanes, run_of
from atroposlib.api.routes.documentation import refused
from atroposlib.api.routes.reading import PostedGroups, read_env_id, read_groups
from atroposlib.api.run import Run
from atroposlib.api.schemas import EnvIdentifier, RegisterEnv, ScoredData
from atroposlib.wire import MEDIA_TYPES, DecodedGroup, Lane, WireError, decode_group, decode_groups

__all__ = [
    "BUSIEST_ROUTES",
    "disconnect_env",
    "get_status_env",
    "register_env_url",
    "reply_of",
    "router",
    "scored_data",
    "scored_data_list",
]

router = APIRouter(tags=["environments"])

# The busiest routes take the request as it is: reading it here costs half of what the framework
# takes for it. These describe to its readers what the framework cannot see then.
_KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 255},
    "description": "Makes a repetition safe: it is answered as before and stored once.",
}
_ENV_ID_PARAMETER = {
    "name": "env_id",
    "in": "query",
    "required": False,
    "schema": {"type": "integer"},
    "description": "In place of a body.",
}


def _documented(
    schema: dict[str, Any], parameter: dict[str, Any], *, is_binary: bool
) -> dict[str, Any]:
    content: dict[str, Any] = {MEDIA_TYPES["json"]: {"schema": schema}}
    if is_binary:
        content[MEDIA_TYPES["msgpack"]] = {"schema": {"type": "string", "format": "binary"}}
    body = {"required": is_binary, "content": content}
    return {"requestBody": body, "parameters": [parameter]}


_GROUP_SCHEMA = ScoredData.model_json_schema()
_GROUP_DOCUMENTATION = _documented(_GROUP_SCHEMA, _KEY_PARAMETER, is_binary=True)
_GROUPS_DOCUMENTATION = _documented(
    {"type": "array", "items": _GROUP_SCHEMA}, _KEY_PARAMETER, is_binary=True
)
_ENV_ID_DOCUMENTATION = _documented(
    EnvIdentifier.model_json_schema(), _ENV_ID_PARAMETER, is_binary=False
)


@router.get(
    "/status-env",
    response_model=None,
    openapi_extra=_ENV_ID_DOCUMENTATION,
    responses=refused(404),
)
@router.post(
    "/status-env",
    response_model=None,
    openapi_extra=_ENV_ID_DOCUMENTATION,
    operation_id="post_status_env",
    responses=refused(404),
)
async def get_status_env(request: Request) -> Response:
    """Tell one environment the step, its weight and how full the queue is in its own groups.

    `groups_to_start` is how many it may have in the making, null when nothing bounds that. The id
    comes in the body (also of a GET) or as a query parameter; an unknown one is 404. This GET
    remembers the largest group the environment has queued. `run_id` names the run the id is of;
    it is another one after a trainer has replaced the settings, which `/register-env` tells.
    """
    run = await run_of(request)
    asked = await read_env_id(request)
    view = await run.view_for(asked)
    if view is None:
        raise HTTPException(
            404, f"no environment is registered under id {asked}; register the environment again"
        )
    state = run.state
    answer = {**view._asdict(), "policy_version": state.policy_version, "run_id": state.run_id}
    return json_response(answer)


@router.post("/scored_data", response_model=None, openapi_extra=_GROUP_DOCUMENTATION)
async def scored_data(request: Request) -> Response:
    """Store one group: `received`, or `buffered` until smaller groups add up."""
    run = await run_of(request)
    posted = await read_groups(request, run, _decode_one)
    admission = await _admit(run, posted, is_list=False)
    return _answer(reply_of(admission.placements[0]), admission)


def _decode_one(body: bytes, lane: Lane, *, max_bytes: int) -> list[DecodedGroup]:
    return [decode_group(body, lane, max_bytes=max_bytes)]


async def _admit(run: Run, posted: PostedGroups, *, is_list: bool) -> Admission:
    try:
        return await run.admit(posted.groups, key=posted.key, digest=posted.digest)
    except OversizedGroupError as error:
        path = (error.index, "tokens") if is_list else ("tokens",)
        raise WireError(str(error), kind="value_error", path=path) from error


def reply_of(placement: Placement) -> dict[str, Any]:
    """Tell the sender of one group where it went."""
    if placement.buffered_sequences is None:
        return {"status": "received"}
    return {"status": "buffered", "buffer_size": placement.buffered_sequences}


def _answer(content: dict[str, Any], admission: Admission) -> Response:
    headers = {"Idempotent-Replayed": "true"} if admission.is_repeat else None
    return json_response(content, headers=headers)


@router.post("/scored_data_list", response_model=None, openapi_extra=_GROUPS_DOCUMENTATION)
async def scored_data_list(request: Request) -> Response:
    """Store an array of groups, in order, all or none."""
    run = await run_of(request)
    posted = await read_groups(request, run, decode_groups)
    admission = await _admit(run, posted, is_list=True)
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(posted.groups)}
    placements = admission.placements
    sizes = [p.buffered_sequences for p in placements if p.buffered_sequences is not None]
    if sizes:
        answer |= {"buffered": len(sizes), "last_buffer_size": sizes[-1]}
    return _answer(answer, admission)


@router.post("/register-env", dependencies=[advertises_lanes])
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
        "run_id": run.state.run_id,
    }


@router.post("/disconnect-env")
async def disconnect_env(request: EnvIdentifier, run: RunOfApp) -> dict[str, Any]:
    """Sign off: the environment no longer counts for weights and minimum shares."""
    if not await run.disconnect_env(request.env_id):
        error = f"no environment is registered under id {request.env_id}"
        return {"status": "failure", "error": error}
    return {"status": "success"}


BUSIEST_ROUTES = (
    Route("/scored_data", scored_data, methods=["POST"], include_in_schema=False),
    Route("/status-env", get_status_env, methods=["GET", "POST"], include_in_schema=False),
    Route("/scored_data_list", scored_data_list, methods=["POST"], include_in_schema=False),
)
"""Routes above that need nothing of the framework; see `server.create_app`."""
