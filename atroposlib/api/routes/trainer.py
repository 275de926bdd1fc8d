"""What a trainer calls: register, fetch batches, acknowledge them, report its policy."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request
from starlette.responses import Response

from atroposlib.api.delivery import AckResult, Handout
from atroposlib.api.records import PayloadFlaw
from atroposlib.api.responses import PiecesResponse, json_response, wait_until_gone
from atroposlib.api.routes.dependencies import RunOfApp, advertises_lanes
from atroposlib.api.routes.documentation import IN_EITHER_LANE, refused
from atroposlib.api.routes.reading import in_threads
from atroposlib.api.run import RegistrationConflictError, Run
from atroposlib.api.schemas import Policy, Registration
from atroposlib.wire import (
    MEDIA_TYPES,
    AcceptedLane,
    StoredPayload,
    batch_pieces,
    convert_payload,
    is_spliceable,
    lane_of_accept,
)

__all__ = [
    "acknowledge_batch",
    "get_batch",
    "register",
    "release_consumer",
    "return_batch",
    "router",
    "set_policy",
]

router = APIRouter(tags=["trainer"])

_INT64_MAX = 2**63 - 1
Found = tuple[Handout, list[StoredPayload]]


@router.post("/register", dependencies=[advertises_lanes], responses=refused(409))
async def register(registration: Registration, run: RunOfApp) -> dict[str, Any]:
    """Start a run, or join it with the same settings (`starting_step` aside); 409 otherwise.

    A trainer takes the place of a `consumer` whatever the settings. A consumer gets 409 while a
    trainer is registered, or another consumer is at work.
    """
    try:
        answer: dict[str, Any] = {"uuid": await run.register_trainer(registration)}
    except RegistrationConflictError as error:
        raise HTTPException(409, str(error)) from error
    if registration.consumer is not None:
        answer["consumer"] = registration.consumer  # older services do not know it
    return answer


@router.delete("/register", responses=refused(404))
async def release_consumer(
    run: RunOfApp,
    consumer: Annotated[str, Query(max_length=64, description="The `uuid` of a consumer.")],
) -> dict[str, Any]:
    """Free the place of a consumer that ends; groups and environments stay for who registers next.

    404 when it does not hold the place any more.
    """
    if not await run.release_consumer(consumer):
        raise HTTPException(404, "no consumer is registered under this id")
    return {"status": "success"}


@router.get("/batch", response_model=None, responses={**IN_EITHER_LANE, **refused(409, 429)})
async def get_batch(
    request: Request,
    run: RunOfApp,
    lease: Annotated[
        float | None,
        Query(ge=1, le=86400, description="Seconds the batch is yours before it goes back."),
    ] = None,
    wait: Annotated[
        float, Query(ge=0, le=300, description="Seconds to wait for a batch if there is none.")
    ] = 0.0,
    consumer: Annotated[
        str | None,
        Query(max_length=64, description="The `uuid` of a consumer: only while it is registered."),
    ] = None,
) -> Response:
    """Return the oldest batch of exactly `batch_size` sequences, or null.

    This GET changes the state: the batch leaves the queue. Without a lease the step grows once the
    body was sent in full; with one, once `batch_id` is acknowledged. A batch that did not arrive
    is the next to leave. The first call lets environments register.
    """
    accepted = lane_of_accept(request.headers.get("accept"))
    if run.state.registration is None:
        message = "Trainer not registered. Call /register first."
        return _small({"status": "error", "message": message, "batch": []}, accepted)
    if consumer is not None:
        _require_consumer(run, consumer)
    found = await _next_batch(request, run, lease_s=lease, wait_s=wait)
    if found is None:
        return _small({"batch": None}, accepted)
    handout, payloads = found
    lost = partial(run.give_back, handout.token)
    if consumer is not None:  # a trainer may have come while this waited
        try:
            _require_consumer(run, consumer)
        except BaseException:
            await lost()
            raise
    envelope: dict[str, Any] = {}
    if lease is not None:
        envelope = {
            "batch_id": handout.token,
            "lease_expires_in_s": lease,
            "policy_versions": [
                # A group in the binary format carries its own.
                group.known_version if group.lane == "json" else None
                for group in handout.groups
            ],
        }
    try:
        pieces = await _pieces_of(request, payloads, accepted, envelope)
    except BaseException as error:
        if not await _set_aside_unreadable(request, run, found, accepted, error):
            raise
        # Terminates: the run has fewer groups after each call.
        return await get_batch(request, run, lease=lease, wait=wait, consumer=consumer)
    return PiecesResponse(
        pieces,
        media_type=MEDIA_TYPES[accepted.lane],
        headers={"Vary": "Accept"},
        # Groups in the binary lane are compressed, or not, by who sent them.
        deflater=request.app.state.deflater if accepted.lane == "json" else None,
        on_arrived=partial(run.acknowledge, handout.token) if lease is None else None,
        on_lost=lost,
    )


def _require_consumer(run: Run, consumer: str) -> None:
    """Refuse a consumer whose place was taken; it must not take the trainer's batches."""
    if not run.state.is_consumer(consumer):
        by = run.state.consumer or "a trainer"
        raise HTTPException(409, f"{by} has registered in place of this consumer")
    run.hear_consumer()


async def _next_batch(
    request: Request, run: Run, *, lease_s: float | None, wait_s: float
) -> Found | None:
    """Wait for a batch, at most as long as the client does."""
    if not wait_s:
        return await run.next_batch(lease_s=lease_s)
    finding = asyncio.ensure_future(run.next_batch(lease_s=lease_s, wait_s=wait_s))
    leaving = asyncio.ensure_future(wait_until_gone(request.receive))
    try:
        await asyncio.wait((finding, leaving), return_when=asyncio.FIRST_COMPLETED)
        # A client that left at the moment its batch was found: sending tells.
        return await finding if finding.done() else None
    finally:
        leaving.cancel()
        finding.cancel()


async def _pieces_of(
    request: Request,
    payloads: list[StoredPayload],
    accepted: AcceptedLane,
    envelope: dict[str, Any],
) -> list[bytes]:
    """Write a batch; groups of the other lane are converted beside the event loop."""
    lane, accepts_zstd = accepted
    if not all(is_spliceable(p, lane, accepts_zstd=accepts_zstd) for p in payloads):
        payloads = await in_threads(request, partial(_converted, payloads, accepted))
    return batch_pieces(payloads, lane, envelope=envelope, accepts_zstd=True)


def _converted(payloads: list[StoredPayload], accepted: AcceptedLane) -> list[StoredPayload]:
    lane, accepts_zstd = accepted
    return [
        StoredPayload(lane, convert_payload(payload, lane, accepts_zstd=accepts_zstd))
        for payload in payloads
    ]


async def _set_aside_unreadable(
    request: Request, run: Run, found: Found, accepted: AcceptedLane, error: BaseException
) -> bool:
    """Set aside the damaged groups of a batch that could not be written.

    Returns:
        True if there were any; otherwise the batch is returned, to be delivered next.
    """
    token = found[0].token
    try:
        flaws = {}
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            flaws = await in_threads(request, partial(_flaws_of, found, accepted))
        if flaws and await run.set_aside(token, flaws) == "returned":
            return True
    except BaseException:
        await run.give_back(token)
        raise
    await run.give_back(token)
    return False


def _flaws_of(found: Found, accepted: AcceptedLane) -> dict[int, PayloadFlaw]:
    """Name the groups of a batch whose damaged payloads cannot be converted.

    Only groups stored without a checksum, by an earlier version, can be damaged here: a payload
    whose checksum holds is intact, whatever made the conversion fail.

    Raises:
        MemoryError: memory ran out, which says nothing about a payload.
    """
    handout, payloads = found
    flaws: dict[int, PayloadFlaw] = {}
    for group, payload in zip(handout.groups, payloads, strict=True):
        if group.checksum is not None:
            continue
        try:
            _converted([payload], accepted)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - damaged bytes fail in many ways
            flaws[group.group_id] = "damaged"
    return flaws


def _small(content: dict[str, Any], accepted: AcceptedLane) -> Response:
    if accepted.lane == "json":
        return json_response(content)
    return Response(msgspec.msgpack.encode(content), media_type=MEDIA_TYPES["msgpack"])


@router.post("/batch/{batch_id}/ack", responses=refused(404, 409))
async def acknowledge_batch(
    batch_id: str,
    run: RunOfApp,
    steps_done: Annotated[
        int | None,
        Query(
            ge=0,
            le=_INT64_MAX,
            description="Optimizer steps the trainer has done, with that of this batch if it was "
            "trained on. The step grows by one only where it is smaller; by default it always "
            "does. 0: the batch was not trained on.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Count a leased batch as delivered; may be repeated.

    The step grows by one, or stays, as `steps_done` says. 409 when the batch went to somebody else
    meanwhile, 404 when there is no such batch.
    """
    result = await run.acknowledge(batch_id, steps_done=steps_done)
    _refuse_stale(batch_id, result)
    done = {"acked": "acknowledged", "repeated": "already acknowledged"}
    return {"status": done[result], "current_step": run.state.step}


@router.post("/batch/{batch_id}/nack", responses=refused(404, 409))
async def return_batch(batch_id: str, run: RunOfApp) -> dict[str, Any]:
    """Give a leased batch back: it is the next to leave; may be repeated.

    409 when it went to somebody else meanwhile or was acknowledged, 404 when there is none.
    """
    result = await run.give_back(batch_id, reason="refused")
    _refuse_stale(batch_id, result)
    done = {"returned": "returned", "repeated": "already returned"}
    return {"status": done[result], "current_step": run.state.step}


def _refuse_stale(batch_id: str, result: AckResult) -> None:
    if result == "unknown":
        raise HTTPException(404, f"there is no batch {batch_id[:100]!r}; was the run reset?")
    if result == "expired":
        raise HTTPException(
            409,
            f"batch {batch_id} has moved on: its lease expired and it was handed out again, "
            "or it was acknowledged",
        )


@router.post("/policy")
async def set_policy(policy: Policy, run: RunOfApp) -> dict[str, Any]:
    """Note which version of the policy the trainer serves now."""
    await run.set_policy_version(policy.version)
    return {"status": "success", "policy_version": run.state.policy_version}
