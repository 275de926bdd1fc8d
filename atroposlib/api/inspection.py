"""Read-only routes: status of the run, its groups and its environments; removing one stuck group.

A request reads at most `_MAX_SCANNED` groups, whatever the length of the queue; `list_groups`
returns the offset of the next page. Positions change as batches leave the queue, so the next page
may skip or repeat groups.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, HTTPException, Path, Query, Request
from starlette.responses import Response

from atroposlib.api.queue import QueuedGroup
from atroposlib.api.responses import PiecesResponse, json_response
from atroposlib.api.routes import IN_EITHER_FORMAT, RunOfApp, advertises_formats, refused
from atroposlib.api.settings import ApiSettings
from atroposlib.api.state import GroupState, RunState, find_group, walk_groups
from atroposlib.wire import MEDIA_TYPES, convert_payload, format_of_accept

inspection_router = APIRouter(tags=["inspection"])

_NO_EXAMPLE_KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
    *("generation_params", "inference_logprobs", "messages", "images"),
)


@inspection_router.get("/wandb_info", dependencies=[advertises_formats])
async def wandb_info(run: RunOfApp) -> dict[str, Any]:
    """Return the trainer's run group and project, null before it registered."""
    registration = run.state.registration
    if registration is None:
        return {"group": None, "project": None}
    return {"group": registration.wandb_group, "project": registration.wandb_project}


@inspection_router.get("/info", dependencies=[advertises_formats])
async def info(run: RunOfApp) -> dict[str, Any]:
    """Return the batch size and the length limit, -1 before the trainer registered."""
    registration = run.state.registration
    if registration is None:
        return {"batch_size": -1, "max_token_len": -1}
    return {"batch_size": registration.batch_size, "max_token_len": registration.max_token_len}


@inspection_router.get("/status")
async def get_status(run: RunOfApp, request: Request) -> dict[str, Any]:
    """Return the step and the number of queued groups.

    These fields are present only if they are not zero or empty: `buffered_sequences`,
    `in_flight_batches` and of them `leased_batches`, `returned_batches` that are redelivered next,
    `expired_envs`, `set_aside_records` that could not be applied, `set_aside_groups` whose payloads
    are missing or damaged, `set_aside_group_ids` of the latest of them, `store_full` (why new
    groups are rejected), `policy_version`, `run`, `consumer` (the `name` of a tool that stands in
    for a trainer and `idle_s`, seconds since it requested a batch), and `stalls` (why queued groups
    do not form a batch).
    """
    state, delivery = run.state, run.state.delivery
    leased = sum(batch.lease_until is not None for batch in delivery.in_flight.values())
    settings: ApiSettings = request.app.state.settings
    counts = {
        "buffered_sequences": state.envs.buffered_sequences,
        "in_flight_batches": len(delivery.in_flight),
        "leased_batches": leased,
        "returned_batches": len(delivery.returned),
        "expired_envs": sum(env.is_expired for env in state.envs),
        "set_aside_records": state.num_set_aside,
        "set_aside_groups": state.num_set_aside_groups,
    }
    answer: dict[str, Any] = {"current_step": state.step, "queue_size": len(state.queue)}
    answer |= {name: count for name, count in counts.items() if count}
    consumer = {"name": state.consumer, "idle_s": run.consumer_idle_s}
    named = {
        "policy_version": state.policy_version,
        "run": settings.run_name,
        "store_full": run.full_reason,
        "consumer": consumer if state.consumer is not None else None,
        "set_aside_group_ids": [group_id for group_id, _ in state.set_aside_groups] or None,
    }
    answer |= {name: value for name, value in named.items() if value is not None}
    stalls = [stall._asdict() for stall in run.stalls()]
    return answer | {"stalls": stalls} if stalls else answer


@inspection_router.get("/latest_example", response_model=None)
async def get_latest_example(run: RunOfApp) -> Response | dict[str, Any]:
    """Return the group queued last; empty lists without one."""
    latest = run.state.latest_group_id
    payload = None if latest is None else await run.payload(latest)
    if payload is not None:
        with contextlib.suppress(Exception):  # damaged, without a checksum
            # Conversion is CPU-bound; a thread leaves the event loop free.
            return PiecesResponse([await asyncio.to_thread(convert_payload, payload, "json")])
    return {key: [] for key in _NO_EXAMPLE_KEYS}


_MAX_SCANNED = 10_000


class GroupFilter(NamedTuple):
    """Filter of the groups to list; None matches all."""

    env_id: int | None = None
    min_score: float | None = None
    """Matches groups whose highest score is at least this."""
    max_score: float | None = None
    """Matches groups whose lowest score is at most this."""

    def accepts(self, group: QueuedGroup) -> bool:
        return (
            (self.env_id is None or group.env_id == self.env_id)
            and (self.min_score is None or group.max_score >= self.min_score)
            and (self.max_score is None or group.min_score <= self.max_score)
        )


class GroupPage(NamedTuple):
    """One page of a listing."""

    groups: list[dict[str, Any]]
    total: int | None
    """Number of groups in this state; None with a filter, which would need a full scan."""
    next_offset: int | None
    """Offset of the next page; None at the end."""


def list_groups(
    state: RunState,
    where: GroupState,
    wanted: GroupFilter,
    *,
    offset: int,
    limit: int,
    now: float,
) -> GroupPage:
    """Describe up to `limit` groups in one state from a position on; `now` is the Unix time."""
    is_filtered = wanted != GroupFilter()
    total = _count(state, where)
    length = _MAX_SCANNED if is_filtered else limit
    if where is GroupState.QUEUED:
        seen = state.queue.window(offset, length)
    else:
        seen = list(islice(walk_groups(state, where), offset, offset + length))
    found: list[dict[str, Any]] = []
    position = offset
    for position, group in enumerate(seen, start=offset):
        if wanted.accepts(group):
            found.append({"position": position, **describe_group(state, group, where, now=now)})
            if len(found) == limit:
                break
    following = position + 1 if seen else offset
    return GroupPage(
        groups=found,
        total=None if is_filtered else total,
        next_offset=following if following < total else None,
    )


def describe_group(
    state: RunState, group: QueuedGroup, where: GroupState, *, now: float
) -> dict[str, Any]:
    """Return the description of a group, without its tokens."""
    env = state.envs.find(group.env_id)
    return {
        "id": group.group_id,
        "state": where.value,
        "env_id": group.env_id,
        "env_name": None if env is None else env.real_name,
        "num_sequences": group.num_sequences,
        "num_tokens": group.num_tokens,
        "num_bytes": group.num_bytes,
        "lane": group.wire_format,
        "policy_version": group.known_version,
        "staleness": state.staleness_of(group),
        "received_at": group.received_at,
        "age_s": max(0.0, now - group.received_at),
        "min_score": group.min_score,
        "max_score": group.max_score,
    }


def _count(state: RunState, where: GroupState) -> int:
    if where is GroupState.QUEUED:
        return len(state.queue)
    if where is GroupState.PAST:
        return len(state.past)
    return sum(1 for _ in walk_groups(state, where))


def describe_envs(state: RunState, *, offset: int, limit: int, now: float) -> dict[str, Any]:
    """Describe up to `limit` environments in order of registration; `now` is the Unix time."""
    described = [
        {
            "env_id": env.env_id,
            "name": env.real_name,
            "is_connected": env.is_connected,
            "is_expired": env.is_expired,
            "registered_at": env.last_update,
            "last_seen": env.last_seen,
            "silent_s": max(0.0, now - env.last_seen),
            "queued_sequences": state.queue.sequences_by_env.get(env.env_id, 0),
            "buffered_sequences": state.envs.buffered_sequences_of(env.env_id),
            "weight": env.weight,
            "group_size": env.group_size,
            "min_batch_allocation": env.min_batch_allocation,
            "max_token_length": env.max_token_length,
        }
        for env in islice(state.envs, offset, offset + limit)
    ]
    following = offset + len(described)
    next_offset = following if described and following < len(state.envs) else None
    return {"envs": described, "total": len(state.envs), "next_offset": next_offset}


groups_router = APIRouter(tags=["inspection"])

_INT64_MAX = 2**63 - 1
_MAX_OFFSET = 2**53
GroupId = Annotated[int, Path(ge=0, le=_INT64_MAX)]
Offset = Annotated[int, Query(ge=0, le=_MAX_OFFSET, description="Position of the first entry.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of entries.")]
Score = Annotated[float | None, Query(allow_inf_nan=False)]


@groups_router.get("/groups", response_model=None)
async def get_groups(
    run: RunOfApp,
    state: GroupState = GroupState.QUEUED,
    env_id: Annotated[int | None, Query(ge=0, le=_INT64_MAX)] = None,
    min_score: Score = None,
    max_score: Score = None,
    offset: Offset = 0,
    limit: Limit = 100,
) -> Response:
    """List groups that are queued, buffered, in flight or past, without removing any.

    `min_score` and `max_score` select groups with a score in that range. With filters at most ten
    thousand groups are scanned; `next_offset` is the offset of the next page, null at the end.
    """
    wanted = GroupFilter(env_id, min_score, max_score)
    page = list_groups(run.state, state, wanted, offset=offset, limit=limit, now=run.now)
    return json_response(page._asdict())


@groups_router.get("/groups/{group_id}", responses=refused(404, 410))
async def get_group(group_id: GroupId, run: RunOfApp) -> dict[str, Any]:
    """Describe one group; 410 if it is no longer kept, 404 if it never existed."""
    found = find_group(run.state, group_id)
    if found is None:
        raise _missing(group_id, run)
    return describe_group(run.state, *found, now=run.now)


@groups_router.delete("/groups/{group_id}", responses=refused(404, 409, 410))
async def remove_group(group_id: GroupId, run: RunOfApp) -> dict[str, Any]:
    """Remove a queued or buffered group from the run, such as one that can never be delivered.

    409 if it has left the queue, 410 if it is no longer kept, 404 if it never existed.
    """
    if await run.remove_group(group_id):
        return {"status": "removed", "group_id": group_id}
    found = find_group(run.state, group_id)
    if found is None:
        raise _missing(group_id, run)
    raise HTTPException(409, f"group {group_id} has left the queue ({found[1].value})")


@groups_router.get(
    "/groups/{group_id}/payload",
    response_model=None,
    responses={**refused(404, 410), **IN_EITHER_FORMAT},
)
async def get_group_payload(group_id: GroupId, run: RunOfApp, request: Request) -> Response:
    """Return one group as it was posted, as JSON or, by `Accept`, MessagePack."""
    payload = await run.payload(group_id)
    if payload is None:
        is_known = find_group(run.state, group_id) is not None
        raise _without_payload(group_id) if is_known else _missing(group_id, run)
    wanted = format_of_accept(request.headers.get("accept"))
    # Conversion is CPU-bound; a thread leaves the event loop free.
    try:
        content = await asyncio.to_thread(
            convert_payload, payload, wanted.wire_format, accepts_zstd=wanted.accepts_zstd
        )
    except Exception as error:
        raise _without_payload(group_id) from error
    return PiecesResponse([content], media_type=MEDIA_TYPES[wanted.wire_format])


def _without_payload(group_id: int) -> HTTPException:
    return HTTPException(410, f"the payload of group {group_id} is missing or damaged in the store")


def _missing(group_id: int, run: RunOfApp) -> HTTPException:
    latest = run.state.latest_group_id
    if latest is None or group_id > latest:
        return HTTPException(404, f"no group has the id {group_id}")
    kept = run.limits.keep_past_groups
    return HTTPException(
        410, f"group {group_id} is no longer kept: only the last {kept} delivered groups are"
    )


@groups_router.get("/envs", response_model=None)
async def list_envs(run: RunOfApp, offset: Offset = 0, limit: Limit = 100) -> Response:
    """List environments in order of registration, including disconnected and expired ones."""
    return json_response(describe_envs(run.state, offset=offset, limit=limit, now=run.now))
