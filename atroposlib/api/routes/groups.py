"""Looking at groups and environments, for people and tools; removing a group that is stuck."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request
from starlette.responses import Response

from atroposlib.api.env_listing import describe_envs
from atroposlib.api.group_listing import (
    GroupFilter,
    GroupState,
    describe_group,
    find_group,
    list_groups,
)
from atroposlib.api.responses import PiecesResponse, json_response
from atroposlib.api.routes.dependencies import RunOfApp
from atroposlib.api.routes.documentation import IN_EITHER_LANE, refused
from atroposlib.wire import MEDIA_TYPES, convert_payload, lane_of_accept

__all__ = ["get_group", "get_group_payload", "get_groups", "list_envs", "remove_group", "router"]

router = APIRouter(tags=["inspection"])

_INT64_MAX = 2**63 - 1
_MAX_OFFSET = 2**53
GroupId = Annotated[int, Path(ge=0, le=_INT64_MAX)]
Offset = Annotated[int, Query(ge=0, le=_MAX_OFFSET, description="Position to start at.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="The most to list.")]
Score = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("/groups", response_model=None)
async def get_groups(
    run: RunOfApp,
    state: GroupState = GroupState.QUEUED,
    env_id: Annotated[int | None, Query(ge=0, le=_INT64_MAX)] = None,
    min_score: Score = None,
    max_score: Score = None,
    offset: Offset = 0,
    limit: Limit = 100,
) -> Response:
    """List groups that are queued, buffered, in flight or past, without taking any.

    `min_score` and `max_score` choose groups with a score in that range. With filters at most ten
    thousand groups are looked at; `next_offset` says where to go on, null at the end.
    """
    wanted = GroupFilter(env_id, min_score, max_score)
    page = list_groups(run.state, state, wanted, offset=offset, limit=limit, now=run.now)
    return json_response(page._asdict())


@router.get("/groups/{group_id}", responses=refused(404, 410))
async def get_group(group_id: GroupId, run: RunOfApp) -> dict[str, Any]:
    """Describe one group; 410 when it is not kept any more, 404 when there never was one."""
    found = find_group(run.state, group_id)
    if found is None:
        raise _missing(group_id, run)
    return describe_group(run.state, *found, now=run.now)


@router.delete("/groups/{group_id}", responses=refused(404, 409, 410))
async def remove_group(group_id: GroupId, run: RunOfApp) -> dict[str, Any]:
    """Take a group that is queued or buffered out of the run, for one that can never leave.

    409 when it has left the queue, 410 when it is not kept any more, 404 when there never was one.
    """
    if await run.remove_group(group_id):
        return {"status": "removed", "group_id": group_id}
    found = find_group(run.state, group_id)
    if found is None:
        raise _missing(group_id, run)
    raise HTTPException(409, f"group {group_id} has left the queue ({found[1].value})")


@router.get(
    "/groups/{group_id}/payload",
    response_model=None,
    responses={**refused(404, 410), **IN_EITHER_LANE},
)
async def get_group_payload(group_id: GroupId, run: RunOfApp, request: Request) -> Response:
    """Return one group as it was posted, as JSON or, where `Accept` says so, MessagePack."""
    payload = await run.payload(group_id)
    if payload is None:
        raise (
            _without_payload(group_id)
            if find_group(run.state, group_id)
            else _missing(group_id, run)
        )
    wanted = lane_of_accept(request.headers.get("accept"))
    # Converting is work for a core; other requests are served meanwhile.
    try:
        content = await asyncio.to_thread(
            convert_payload, payload, wanted.lane, accepts_zstd=wanted.accepts_zstd
        )
    except Exception as error:
        raise _without_payload(group_id) from error
    return PiecesResponse([content], media_type=MEDIA_TYPES[wanted.lane])


def _without_payload(group_id: int) -> HTTPException:
    return HTTPException(410, f"the payload of group {group_id} is missing or damaged in the store")


def _missing(group_id: int, run: RunOfApp) -> HTTPException:
    latest = run.state.latest_group_id
    if latest is None or group_id > latest:
        return HTTPException(404, f"there is no group {group_id}")
    kept = run.limits.keep_past_groups
    return HTTPException(
        410, f"group {group_id} is gone: the last {kept} delivered groups are kept at most"
    )


@router.get("/envs", response_model=None)
async def list_envs(run: RunOfApp, offset: Offset = 0, limit: Limit = 100) -> Response:
    """List environments in order of registration, the ones that left or fell silent included."""
    return json_response(describe_envs(run.state, offset=offset, limit=limit, now=run.now))
