"""What anybody may ask about the run; nothing here changes it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from atroposlib.api.responses import PiecesResponse
from atroposlib.api.routes.dependencies import RunOfApp, advertises_lanes
from atroposlib.api.settings import ApiSettings
from atroposlib.wire import convert_payload

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


@router.get("/wandb_info", dependencies=[advertises_lanes])
async def wandb_info(run: RunOfApp) -> dict[str, Any]:
    """Return the trainer's run group and project, null before it registered."""
    registration = run.state.registration
    if registration is None:
        return {"group": None, "project": None}
    return {"group": registration.wandb_group, "project": registration.wandb_project}


@router.get("/info", dependencies=[advertises_lanes])
async def info(run: RunOfApp) -> dict[str, Any]:
    """Return the batch size and the length limit, -1 before the trainer registered."""
    registration = run.state.registration
    if registration is None:
        return {"batch_size": -1, "max_token_len": -1}
    return {"batch_size": registration.batch_size, "max_token_len": registration.max_token_len}


@router.get("/status")
async def get_status(run: RunOfApp, request: Request) -> dict[str, Any]:
    """Return the step and the number of queued groups.

    What these figures do not contain is named only while there is some: `buffered_sequences`,
    `in_flight_batches` and of them `leased_batches`, `returned_batches` that leave next,
    `expired_envs`, `set_aside_records` that could not be applied, `set_aside_groups` whose payloads
    are missing or damaged and `set_aside_group_ids` of the last of them, `store_full` (why new
    groups are rejected), `policy_version`, `run`, `consumer` (the `name` of a tool
    that stands in for a trainer and `idle_s`, seconds since it asked for a batch), and `stalls`:
    why queued groups make no batch.
    """
    state, delivery = run.state, run.state.delivery
    leased = sum(handout.lease_until is not None for handout in delivery.in_flight.values())
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


@router.get("/latest_example", response_model=None)
async def get_latest_example(run: RunOfApp) -> Response | dict[str, Any]:
    """Return the group queued last; empty lists when there is none."""
    latest = run.state.latest_group_id
    payload = None if latest is None else await run.payload(latest)
    if payload is not None:
        with contextlib.suppress(Exception):  # a damaged one, from before there were checksums
            # Converting is work for a core; other requests are served meanwhile.
            return PiecesResponse([await asyncio.to_thread(convert_payload, payload, "json")])
    return {key: [] for key in _NO_EXAMPLE_KEYS}
