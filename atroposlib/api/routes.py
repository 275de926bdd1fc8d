"""Routes of trainers, environments and operators: their bodies, responses and OpenAPI document.

- Trainer: `/register`, `/batch`, `/batch/{id}/ack`, `/batch/{id}/nack`, `/policy`.
- Environment: `/register-env`, `/disconnect-env`, `/status-env`, `/scored_data`,
  `/scored_data_list`.
- Operator: `/`, `/health/live`, `/health/ready`, `/metrics`, `/reset_data`.

    body of a group ── read_groups: format, key, decode (large bodies in a thread) ──► Run.admit
    response of /batch ◄── pieces, sent without joining ◄── Run.next_batch

The read-only routes are in `inspection`.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from atroposlib.api.metrics import ServiceMetrics
from atroposlib.api.queue import AdmittedGroups, OversizedGroupError, Placement
from atroposlib.api.records import PayloadFlaw
from atroposlib.api.responses import PiecesResponse, json_response, wait_for_disconnect
from atroposlib.api.run import RegistrationConflictError, Run
from atroposlib.api.schemas import EnvIdentifier, Policy, RegisterEnv, Registration, ScoredData
from atroposlib.api.state import AckResult, DeliveredBatch, check_key
from atroposlib.api.store.base import WatchedStore
from atroposlib.api.tickets import Ticket, parse_ticket
from atroposlib.errors import AtroposError
from atroposlib.wire import (
    BODY_NOT_TEXT,
    MEDIA_TYPES,
    AcceptedFormat,
    DecodedGroup,
    StoredPayload,
    WireError,
    WireFormat,
    batch_pieces,
    convert_payload,
    decode_group,
    decode_groups,
    format_of_accept,
    format_of_type,
    is_spliceable,
)

T = TypeVar("T")
Decode = Callable[..., list[DecodedGroup]]

_INLINE_BYTES = 128 * 1024
"""Smaller bodies are decoded faster than passed to a thread."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAP_BEGINS = re.compile(rb"[\x80-\x8f\xde\xdf]").match


class PostedGroups(NamedTuple):
    """The groups of one request, with its idempotency key and digest."""

    groups: list[DecodedGroup]
    key: str | None
    digest: int
    ticket: Ticket | None = None


async def read_groups(request: Request, run: Run, decode: Decode) -> PostedGroups:
    """Read the body of a request that posts groups: JSON unless its content type is MessagePack.

    Args:
        request: the request.
        run: counts rejected requests.
        decode: takes body, format and `max_bytes`, the limit on the decompressed size of groups.

    Raises:
        GroupError: the idempotency key or the ticket has invalid characters or is too long.
        WireError: the body is not in its format, or a group in it is malformed.
    """
    key = request.headers.get("idempotency-key")
    if key is not None:
        check_key(key)  # before the body is received, which may be large
    ticket_text = request.headers.get("rollout-ticket")
    ticket = None if ticket_text is None else parse_ticket(ticket_text)
    body = await request.body()
    wire_format: WireFormat = format_of_type(request.headers.get("content-type")) or "json"
    max_bytes: int = request.app.state.settings.max_body_bytes

    def work() -> tuple[list[DecodedGroup], int]:
        groups = decode(body, wire_format, max_bytes=max_bytes)
        return groups, 0 if key is None else zlib.crc32(body) << 32 | len(body) & 0xFFFFFFFF

    try:
        # A MessagePack body may hold a zstd frame; the map of one group holds none.
        may_unfold = wire_format == "msgpack" and not _MAP_BEGINS(body) and _ZSTD_MAGIC in body
        is_small = len(body) <= _INLINE_BYTES and not may_unfold
        groups, digest = work() if is_small else await _in_threads(request, work)
    except WireError as error:
        run.counters[f"groups/refused_{error.kind}"] += 1
        raise
    return PostedGroups(groups, key, digest, ticket)


async def _in_threads(request: Request, work: Callable[[], T]) -> T:
    threads: Executor = request.app.state.threads
    return await asyncio.get_running_loop().run_in_executor(threads, work)


class _EnvIdentifier(msgspec.Struct):
    env_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


_env_id_decoder = msgspec.json.Decoder(_EnvIdentifier)


async def read_env_id(request: Request) -> int:
    """Return the id of the environment, from the body or else from the query.

    Raises:
        RequestValidationError: there is no id, or it is not an integer.
        HTTPException: 400, the body is not text.
    """
    body = await request.body()
    try:
        return _env_id_decoder.decode(body).env_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _read_env_id_laxly(request, body)


def _read_env_id_laxly(request: Request, body: bytes) -> int:
    """Read an id as the framework reads models: also numeric strings and integral floats."""
    where = "body"
    try:
        if body.strip() not in (b"", b"null"):
            body.decode()
            return EnvIdentifier.model_validate_json(body).env_id
        where = "query"
        if "env_id" in request.query_params:
            return EnvIdentifier.model_validate(dict(request.query_params)).env_id
    except UnicodeDecodeError as error:
        raise HTTPException(400, BODY_NOT_TEXT) from error
    except ValidationError as error:
        details = [{**detail, "loc": (where, *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(details) from error
    raise RequestValidationError(
        [{"type": "missing", "loc": ("body", "env_id"), "msg": "Field required"}]
    )


class _RunningReport(msgspec.Struct):
    running_sequences: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None


_running_decoder = msgspec.json.Decoder(_RunningReport)


def _read_running(body: bytes) -> int | None:
    """Return the number of sequences that an environment reports, or None."""
    try:
        return _running_decoder.decode(body).running_sequences
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


async def run_of(request: Request) -> Run:
    """Return the run of the application; load it if that has not happened yet."""
    run: Run = request.app.state.run
    await run.open()  # without a lifespan, the first request opens the run
    return run


_ACCEPT_POST = ", ".join(MEDIA_TYPES.values())


async def _advertise_formats(response: Response) -> None:
    response.headers["Accept-Post"] = _ACCEPT_POST


RunOfApp = Annotated[Run, Depends(run_of)]

advertises_formats = Depends(_advertise_formats)
"""Adds `Accept-Post` to responses: the media types in which groups may be posted."""

Responses = dict[int | str, dict[str, Any]]

_PLACE = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
_PROBLEM = {
    "type": "object",
    "required": ["type", "loc", "msg"],
    "properties": {
        "type": {"type": "string"},
        "loc": {"type": "array", "items": _PLACE, "description": "Location in the request."},
        "msg": {"type": "string", "description": "The error, and the expected value."},
        "input": {"description": "The value at that location, possibly truncated."},
    },
}
_REFUSAL = {
    "type": "object",
    "required": ["detail"],
    "properties": {
        "detail": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PROBLEM}]},
    },
}
_RETRY_AFTER = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait before a retry."}
}
_MEANINGS = {
    400: "The body is not text, or not valid gzip.",
    403: "Not allowed from a web page, or the token has another role.",
    404: "Unknown id.",
    408: "Timeout while the body was read.",
    409: "The run, or the batch, is in a state that does not allow this.",
    410: "The group was delivered and is no longer kept.",
    413: "The body is too large.",
    415: "Unknown encoding of the body.",
    422: "The request is malformed; the detail has the location.",
    429: "Too many batches are not acknowledged.",
    503: "The queue is full, too many requests wait, or the store fails; nothing was stored.",
}


def refused(*statuses: int) -> Responses:
    """Return the `responses` argument of routes that may return these statuses."""
    return {status: _document(status) for status in statuses}


def _document(status: int) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _REFUSAL}}
    if status == 400:
        content["text/plain"] = {"schema": {"type": "string"}}
    document = {"description": _MEANINGS[status], "content": content}
    return document | ({"headers": _RETRY_AFTER} if status in (429, 503) else {})


EVERYWHERE = refused(400, 403, 408, 413, 415, 422, 503)
"""Statuses that any request may receive."""

IN_EITHER_FORMAT: Responses = {200: {"content": {media: {} for media in MEDIA_TYPES.values()}}}
"""Groups, in the requested format."""


trainer_router = APIRouter(tags=["trainer"])

_INT64_MAX = 2**63 - 1
Found = tuple[DeliveredBatch, list[StoredPayload]]
LeaseSeconds = Annotated[
    float | None,
    Query(
        ge=1,
        le=86400,
        description="Duration of the lease in seconds, after which the batch is redelivered.",
    ),
]
WaitSeconds = Annotated[
    float, Query(ge=0, le=300, description="Seconds to wait for a batch if none is ready.")
]
ConsumerId = Annotated[
    str | None,
    Query(
        max_length=64, description="The `uuid` of a consumer; 409 if it is no longer registered."
    ),
]


@trainer_router.post("/register", dependencies=[advertises_formats], responses=refused(409))
async def register(registration: Registration, run: RunOfApp) -> dict[str, Any]:
    """Start a run, or join it with the same settings except `starting_step`; 409 otherwise.

    A trainer replaces a `consumer` regardless of the settings. A consumer gets 409 while a trainer
    is registered, or another consumer is active.
    """
    try:
        answer: dict[str, Any] = {"uuid": await run.register_trainer(registration)}
    except RegistrationConflictError as error:
        raise HTTPException(409, str(error)) from error
    if registration.consumer is not None:
        answer["consumer"] = registration.consumer  # absent in older services
    return answer


@trainer_router.delete("/register", responses=refused(404))
async def release_consumer(
    run: RunOfApp,
    consumer: Annotated[str, Query(max_length=64, description="The `uuid` of a consumer.")],
) -> dict[str, Any]:
    """Unregister a consumer; groups and environments stay for the next registration.

    404 if it is no longer registered.
    """
    if not await run.release_consumer(consumer):
        raise HTTPException(404, "no consumer is registered under this id")
    return {"status": "success"}


@trainer_router.get(
    "/batch", response_model=None, responses={**IN_EITHER_FORMAT, **refused(409, 429)}
)
async def get_batch(
    request: Request,
    run: RunOfApp,
    lease: LeaseSeconds = None,
    wait: WaitSeconds = 0.0,
    consumer: ConsumerId = None,
) -> Response:
    """Return the oldest batch of exactly `batch_size` sequences, or null.

    This GET changes the state: the batch leaves the queue. Without a lease the step grows once the
    body was sent in full; with one, once `batch_id` is acknowledged. A batch that did not arrive is
    redelivered next; a repeated `Idempotency-Key` says that the batch of the earlier request did
    not. After the first call, environments may register.
    """
    accepted = format_of_accept(request.headers.get("accept"))
    if consumer is not None and run.state.registration is not None:
        _require_consumer(run, consumer)
    key = request.headers.get("idempotency-key")
    if key is not None:
        check_key(key)
    found = await _next_batch(request, run, lease_s=lease, wait_s=wait, key=key)
    if found is None and run.state.registration is None:  # in no replica
        message = "Trainer not registered. Call /register first."
        return _small({"status": "error", "message": message, "batch": []}, accepted)
    if found is None:
        return _small({"batch": None}, accepted)
    batch, payloads = found
    lost = partial(run.return_batch, batch.token)
    if consumer is not None:  # a trainer may have registered during the wait
        try:
            _require_consumer(run, consumer)
        except BaseException:
            await lost()
            raise
    envelope: dict[str, Any] = {}
    if lease is not None:
        envelope = {
            "batch_id": batch.token,
            "lease_expires_in_s": lease,
            "policy_versions": [
                # A group in the binary format has its own; as JSON it is delivered without it.
                group.known_version if "json" in (group.wire_format, accepted.wire_format) else None
                for group in batch.groups
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
        media_type=MEDIA_TYPES[accepted.wire_format],
        headers={"Vary": "Accept"},
        # Groups in the binary format keep the compression of their sender.
        deflater=request.app.state.deflater if accepted.wire_format == "json" else None,
        on_arrived=partial(run.acknowledge, batch.token) if lease is None else None,
        on_lost=lost,
    )


def _require_consumer(run: Run, consumer: str) -> None:
    """Reject a consumer that was replaced; it must not take the trainer's batches."""
    if not run.state.is_consumer(consumer):
        by = run.state.consumer or "a trainer"
        raise HTTPException(409, f"{by} has registered in place of this consumer")
    run.note_consumer_request()


async def _next_batch(
    request: Request, run: Run, *, lease_s: float | None, wait_s: float, key: str | None
) -> Found | None:
    """Wait for a batch, until the client disconnects."""
    if not wait_s:
        return await run.next_batch(lease_s=lease_s, key=key)
    finding = asyncio.ensure_future(run.next_batch(lease_s=lease_s, wait_s=wait_s, key=key))
    disconnect = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((finding, disconnect), return_when=asyncio.FIRST_COMPLETED)
        # If the client disconnected just as its batch was found, sending detects it.
        return await finding if finding.done() else None
    finally:
        disconnect.cancel()
        finding.cancel()


async def _pieces_of(
    request: Request,
    payloads: list[StoredPayload],
    accepted: AcceptedFormat,
    envelope: dict[str, Any],
) -> list[bytes]:
    """Write a batch; groups of the other format are converted in a thread."""
    wire_format, accepts_zstd = accepted
    if not all(is_spliceable(p, wire_format, accepts_zstd=accepts_zstd) for p in payloads):
        payloads = await _in_threads(request, partial(_converted, payloads, accepted))
    return batch_pieces(payloads, wire_format, envelope=envelope, accepts_zstd=True)


def _converted(payloads: list[StoredPayload], accepted: AcceptedFormat) -> list[StoredPayload]:
    wire_format, accepts_zstd = accepted
    return [
        StoredPayload(wire_format, convert_payload(payload, wire_format, accepts_zstd=accepts_zstd))
        for payload in payloads
    ]


async def _set_aside_unreadable(
    request: Request, run: Run, found: Found, accepted: AcceptedFormat, error: BaseException
) -> bool:
    """Set aside the damaged groups of a batch that could not be encoded.

    Returns:
        True if there were any; otherwise the batch is returned, to be redelivered next.
    """
    token = found[0].token
    is_set_aside = False
    try:
        flaws = {}
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            flaws = await _in_threads(request, partial(_flaws_of, found, accepted))
        is_set_aside = bool(flaws) and await run.set_aside(token, flaws) == "returned"
        return is_set_aside
    finally:
        if not is_set_aside:
            await run.return_batch(token)


def _flaws_of(found: Found, accepted: AcceptedFormat) -> dict[int, PayloadFlaw]:
    """Find the groups of a batch whose damaged payloads cannot be converted.

    Only groups stored without a checksum, by an earlier version, can be damaged here: a payload
    with a correct checksum is intact, whatever made the conversion fail. Running out of memory does
    not mean that a payload is damaged, so `MemoryError` is raised.
    """
    batch, payloads = found
    flaws: dict[int, PayloadFlaw] = {}
    for group, payload in zip(batch.groups, payloads, strict=True):
        if group.checksum is not None:
            continue
        try:
            _converted([payload], accepted)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - damaged bytes fail in many ways
            flaws[group.group_id] = "damaged"
    return flaws


def _small(content: dict[str, Any], accepted: AcceptedFormat) -> Response:
    if accepted.wire_format == "json":
        return json_response(content)
    return Response(msgspec.msgpack.encode(content), media_type=MEDIA_TYPES["msgpack"])


@trainer_router.post("/batch/{batch_id}/ack", responses=refused(404, 409))
async def acknowledge_batch(
    batch_id: str,
    run: RunOfApp,
    steps_done: Annotated[
        int | None,
        Query(
            ge=0,
            le=_INT64_MAX,
            description="Optimizer steps of the trainer, including that of this batch if it was "
            "trained on. The step grows by one only if it is smaller; by default it always "
            "grows. 0: the batch was not trained on.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Acknowledge a leased batch; idempotent.

    The step grows by one or stays, depending on `steps_done`. 409 if the batch was redelivered
    meanwhile, 404 for an unknown batch.
    """
    result = await run.acknowledge(batch_id, steps_done=steps_done)
    _refuse_stale(batch_id, result)
    done = {"acked": "acknowledged", "repeated": "already acknowledged"}
    return {"status": done[result], "current_step": run.state.step}


@trainer_router.post("/batch/{batch_id}/nack", responses=refused(404, 409))
async def return_batch(batch_id: str, run: RunOfApp) -> dict[str, Any]:
    """Return a leased batch, to be redelivered next; idempotent.

    409 if it was redelivered or acknowledged meanwhile, 404 for an unknown batch.
    """
    result = await run.return_batch(batch_id, reason="refused")
    _refuse_stale(batch_id, result)
    done = {"returned": "returned", "repeated": "already returned"}
    return {"status": done[result], "current_step": run.state.step}


def _refuse_stale(batch_id: str, result: AckResult) -> None:
    if result == "unknown":
        raise HTTPException(404, f"unknown batch {batch_id[:100]!r}; the run may have been reset")
    if result == "expired":
        raise HTTPException(
            409,
            f"batch {batch_id} has moved on: its lease expired and it was redelivered, "
            "or it was acknowledged",
        )


@trainer_router.post("/policy")
async def set_policy(policy: Policy, run: RunOfApp) -> dict[str, Any]:
    """Record the policy version that the trainer serves now."""
    await run.set_policy_version(policy.version)
    return {"status": "success", "policy_version": run.state.policy_version}


environments_router = APIRouter(tags=["environments"])

# The busiest routes read the raw request, at half the cost of the framework. The OpenAPI document
# cannot be derived from them, so these constants describe their bodies.
_KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 255},
    "description": "Makes retries safe: repeated requests are stored once, with the same response.",
}
_TICKET_PARAMETER = {
    "name": "Rollout-Ticket",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 40},
    "description": "Environment id and number of the rollout, such as `3-17`, for admission in the "
    "order of rollouts; numbers start at `first_ticket` of `/register-env`.",
}
_ENV_ID_PARAMETER = {
    "name": "env_id",
    "in": "query",
    "required": False,
    "schema": {"type": "integer"},
    "description": "Instead of a body.",
}


def _documented(
    schema: dict[str, Any], *parameters: dict[str, Any], is_binary: bool
) -> dict[str, Any]:
    content: dict[str, Any] = {MEDIA_TYPES["json"]: {"schema": schema}}
    if is_binary:
        content[MEDIA_TYPES["msgpack"]] = {"schema": {"type": "string", "format": "binary"}}
    body = {"required": is_binary, "content": content}
    return {"requestBody": body, "parameters": [*parameters]}


_GROUP_SCHEMA = ScoredData.model_json_schema()
_GROUP_DOCUMENTATION = _documented(_GROUP_SCHEMA, _KEY_PARAMETER, _TICKET_PARAMETER, is_binary=True)
_GROUPS_DOCUMENTATION = _documented(
    {"type": "array", "items": _GROUP_SCHEMA}, _KEY_PARAMETER, _TICKET_PARAMETER, is_binary=True
)
_ENV_ID_DOCUMENTATION = _documented(
    EnvIdentifier.model_json_schema(), _ENV_ID_PARAMETER, is_binary=False
)


@environments_router.get(
    "/status-env",
    response_model=None,
    openapi_extra=_ENV_ID_DOCUMENTATION,
    responses=refused(404),
)
@environments_router.post(
    "/status-env",
    response_model=None,
    openapi_extra=_ENV_ID_DOCUMENTATION,
    operation_id="post_status_env",
    responses=refused(404),
)
async def get_status_env(request: Request) -> Response:
    """Return the step, the weight of one environment, and the queue size in units of its groups.

    `groups_to_start` is how many groups it may have in progress, null without a limit. If the
    service shares engines, `max_running_sequences` is how many sequences the environment may
    generate at once; `running_sequences` in the body reports how many it generates now. The id is
    in the body (also of a GET) or a query parameter; 404 if unknown.
    This GET stores the largest group that the environment has queued. `run_id` identifies the run;
    it changes when a trainer replaces the settings, which `/register-env` returns.
    """
    run = await run_of(request)
    asked = await read_env_id(request)
    running = None if run.engine_shares is None else _read_running(await request.body())
    view = await run.view_for(asked, running_sequences=running)
    if view is None:
        raise HTTPException(
            404, f"no environment is registered under id {asked}; register the environment again"
        )
    state = run.state
    answer = {**view._asdict(), "policy_version": state.policy_version, "run_id": state.run_id}
    if view.max_running_sequences is None:
        del answer["max_running_sequences"]  # a key that earlier services do not send
    return json_response(answer)


@environments_router.post("/scored_data", response_model=None, openapi_extra=_GROUP_DOCUMENTATION)
async def scored_data(request: Request) -> Response:
    """Store one group; the status is `received`, or `buffered` until smaller groups add up."""
    run = await run_of(request)
    posted = await read_groups(request, run, _decode_one)
    admission = await _admit(run, posted, is_list=False)
    return _answer(reply_of(admission.placements[0]), admission)


def _decode_one(body: bytes, wire_format: WireFormat, *, max_bytes: int) -> list[DecodedGroup]:
    return [decode_group(body, wire_format, max_bytes=max_bytes)]


async def _admit(run: Run, posted: PostedGroups, *, is_list: bool) -> AdmittedGroups:
    try:
        return await run.admit(
            posted.groups, key=posted.key, digest=posted.digest, ticket=posted.ticket
        )
    except OversizedGroupError as error:
        path = (error.index, "tokens") if is_list else ("tokens",)
        raise WireError(str(error), kind="value_error", path=path) from error


def reply_of(placement: Placement) -> dict[str, Any]:
    """Return the response for one group."""
    if placement.buffered_sequences is None:
        return {"status": "received"}
    return {"status": "buffered", "buffer_size": placement.buffered_sequences}


def _answer(content: dict[str, Any], admission: AdmittedGroups) -> Response:
    headers = {"Idempotent-Replayed": "true"} if admission.is_repeat else None
    return json_response(content, headers=headers)


@environments_router.post(
    "/scored_data_list", response_model=None, openapi_extra=_GROUPS_DOCUMENTATION
)
async def scored_data_list(request: Request) -> Response:
    """Store an array of groups, in order, all or none.

    With `Rollout-Ticket` and an empty array, the ticket is returned: its rollout has no group.
    """
    run = await run_of(request)
    posted = await read_groups(request, run, decode_groups)
    admission = await _admit(run, posted, is_list=True)
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(posted.groups)}
    placements = admission.placements
    sizes = [p.buffered_sequences for p in placements if p.buffered_sequences is not None]
    if sizes:
        answer |= {"buffered": len(sizes), "last_buffer_size": sizes[-1]}
    return _answer(answer, admission)


@environments_router.post("/register-env", dependencies=[advertises_formats])
async def register_env_url(request: RegisterEnv, run: RunOfApp) -> dict[str, Any]:
    """Join the run and get an id, or a request to wait until the trainer requests batches."""
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
        **({"first_ticket": 0} if run.awaits_tickets_of(env) else {}),
    }


@environments_router.post("/disconnect-env")
async def disconnect_env(request: EnvIdentifier, run: RunOfApp) -> dict[str, Any]:
    """Disconnect: the environment no longer counts for weights and minimum shares."""
    if not await run.disconnect_env(request.env_id):
        error = f"no environment is registered under id {request.env_id}"
        return {"status": "failure", "error": error}
    return {"status": "success"}


BUSIEST_ROUTES = (
    Route("/scored_data", scored_data, methods=["POST"], include_in_schema=False),
    Route("/status-env", get_status_env, methods=["GET", "POST"], include_in_schema=False),
    Route("/scored_data_list", scored_data_list, methods=["POST"], include_in_schema=False),
)
"""Routes above that bypass the framework; see `server.create_app`."""


operations_router = APIRouter(tags=["operations"])


@operations_router.get("/")
async def root() -> dict[str, Any]:
    """Return the name of the service."""
    return {"message": "AtroposLib API"}


@operations_router.get("/health/live")
async def is_live() -> dict[str, Any]:
    """Respond as long as the process serves requests."""
    return {"status": "live"}


@operations_router.get("/health/ready", response_model=None)
async def is_ready(request: Request) -> Response | dict[str, Any]:
    """Return 200 with counts if batches can be served, else 503 with the reason.

    While there is no space for new groups, the response has the reason as `store_full`.
    """
    run: Run = request.app.state.run
    store: WatchedStore = request.app.state.watched_store
    try:
        await run.open()
        problem = None if run.failure is None else str(run.failure)
    except AtroposError as error:
        problem = str(error)
    problem = problem or await store.problem()
    if problem is not None:
        return JSONResponse({"status": "not ready", "reason": problem}, 503)
    full = {} if run.full_reason is None else {"store_full": run.full_reason}
    return {"status": "ready", **full, "counters": dict(run.state.counters + run.counters)}


@operations_router.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(run: RunOfApp, request: Request) -> Response:
    """Return the metrics in Prometheus text format or, by `Accept`, OpenMetrics."""
    metrics: ServiceMetrics = request.app.state.metrics
    content, media_type = metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": media_type})


@operations_router.get("/reset_data", response_class=PlainTextResponse)
async def reset_data(run: RunOfApp) -> PlainTextResponse:
    """Delete the run and everything in it.

    This GET deletes data, as the contract requires. Running environments then get 404 and register
    again.
    """
    await run.reset()
    return PlainTextResponse("Reset successful")
