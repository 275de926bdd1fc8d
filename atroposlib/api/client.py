"""Clients of the trajectory service, for environments and for trainers.

`TrajectoryApiClient` is asynchronous and for environments; `TrainerClient` is synchronous and for
trainers; `batches` is an iterator for trainers that have their own training loop.

    TrajectoryApiClient ─► AsyncTransport ─┐
                                           ├─► client_transport: retries, errors, formats of bodies
    batches ─► TrainerClient ─► SyncClient ┘

    batches: register ─► [ lease ─► the caller trains ─► acknowledge ] ... ─► `num_steps` are done

Only this module and the `client_*` modules know the routes; none of them imports the service.

The iterator acknowledges a batch when the next one is requested, or explicitly. The last batch of a
run is acknowledged when `with` is left, or when the program ends without an error. Batches that are
not acknowledged are returned to the service when the iterator is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, overload

import msgspec
from typing_extensions import NotRequired, TypedDict

from atroposlib.api.client_transport import (
    BINARY_FORMAT_HEADERS,
    MAX_ANSWER_BYTES,
    POST_RETRY,
    AsyncTransport,
    Body,
    Encoder,
    LeasedBatch,
    NoServiceError,
    RetryRule,
    SyncClient,
    ack_path,
    assigned_id,
    batch_path,
    checked_object,
    delivered_groups,
    encode_body,
    is_on_this_machine,
    leased_batch,
    malformed_answer,
    nack_path,
    object_of,
    plain,
    says_unregistered,
    service_address,
)
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.aio import SideThread
from atroposlib.utils.json_text import json_kind
from atroposlib.utils.text import without_secrets
from atroposlib.wire import encode_group, encode_groups

__all__ = [
    "AsyncBatches",
    "BatchIterator",
    "LeasedBatch",
    "RetryRule",
    "TrainerClient",
    "TrajectoryApiClient",
    "batches",
    "says_unregistered",
]

logger = logging.getLogger(__name__)


_STATUS_ENV_DEFAULTS = {"self_queue_size": 0, "max_group_size": 1, "unallocated_fraction": 1.0}
"""Fields that older services leave out of `GET /status-env`."""


class _EnvAnswer(TypedDict):
    """A response of `POST /register-env`; the other fields need a registered trainer."""

    status: str


class _RegisteredEnv(_EnvAnswer):
    env_id: int
    wandb_name: str
    starting_step: int
    checkpoint_dir: str
    checkpoint_interval: int
    num_steps: int
    run_id: NotRequired[str | None]
    first_ticket: NotRequired[int | None]


class _Info(TypedDict):
    batch_size: int
    max_token_len: int


class _WandbInfo(TypedDict):
    project: str | None
    group: str | None


class _Status(TypedDict):
    current_step: int
    queue_size: int


class _EnvStatus(_Status):
    self_queue_size: NotRequired[int]
    max_group_size: NotRequired[Annotated[int, msgspec.Meta(ge=1)]]
    unallocated_fraction: NotRequired[Annotated[float, msgspec.Meta(ge=0, le=1)]]
    env_weight: NotRequired[float]
    groups_to_start: NotRequired[int | None]
    max_running_sequences: NotRequired[int | None]
    policy_version: NotRequired[int | None]
    run_id: NotRequired[str | None]


class TrajectoryApiClient:
    """Asynchronous client; one per event loop, safe for concurrent use.

    Every method waits for the service and raises `TrajectoryApiError` if it rejects the request or
    cannot be reached. Idempotent requests are retried. A posted group has an `Idempotency-Key`; if
    the service honors it, every retry is safe, also across a restart of the service. Cancelling is
    safe, but a posted group may have arrived.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on one attempt.
        retry: when failed requests are retried.
        post_retry: the same for posted groups.
        token: bearer token, sent to the service; never logged.

    Raises:
        ConfigError: the address or the token cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
        post_retry: RetryRule | None = None,
        token: str | None = None,
    ) -> None:
        self.base_url = service_address(base_url)
        self._side_thread = SideThread()
        self._compresses = not is_on_this_machine(self.base_url)
        self._transport = AsyncTransport(
            self.base_url,
            timeout_s=timeout_s,
            retry=retry or RetryRule(),
            post_retry=post_retry or POST_RETRY,
            token=token,
        )

    async def __aenter__(self) -> TrajectoryApiClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def num_outages(self) -> int:
        """Number of failed attempts to reach the service, which may be another one afterwards."""
        return self._transport.num_outages

    async def close(self) -> None:
        """Close the connections; the client may be used again and then opens new ones."""
        self._side_thread.close()
        await self._transport.close()

    async def register_trainer(self, **registration: Any) -> int:
        """Register a trainer with the fields of `POST /register`; return its id."""
        body = plain(registration)
        answer = await self._transport.send("POST", "/register", body, is_repeatable=True)
        return assigned_id(answer, self.base_url)

    async def register_env(
        self,
        *,
        max_token_length: int,
        desired_name: str,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None = None,
        earlier: tuple[int, str] | None = None,
    ) -> dict[str, Any]:
        """Register an environment; `status` of the response is `success` or asks to wait.

        `earlier` is the id and the run of an earlier registration. If a trainer has taken over that
        run, the environment keeps its id.
        """
        request = {
            "max_token_length": max_token_length,
            "desired_name": desired_name,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": min_batch_allocation,
        }
        if earlier is not None:
            request["env_id"], request["run_id"] = earlier
        answer = await self._transport.send("POST", "/register-env", plain(request))
        answer = self._checked(answer, _EnvAnswer, "POST", "/register-env")
        if answer["status"] != "success":
            return answer
        return self._checked(answer, _RegisteredEnv, "POST", "/register-env")

    async def disconnect_env(self, env_id: int) -> None:
        """Disconnect an environment; raises if its id is unknown."""
        body = plain({"env_id": env_id})
        answer = await self._transport.send("POST", "/disconnect-env", body, is_repeatable=True)
        answer = object_of(answer, "POST", f"{self.base_url}/disconnect-env")
        if answer.get("status") != "success":
            raise TrajectoryApiError(
                f"POST {without_secrets(self.base_url)}/disconnect-env: {answer.get('error')}",
                status=200,
            )

    async def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`; -1 before a trainer registered."""
        return self._checked(await self._get("/info"), _Info, "GET", "/info")

    async def wandb_info(self) -> dict[str, Any]:
        """Return `group` and `project`; None before a trainer registered."""
        return self._checked(await self._get("/wandb_info"), _WandbInfo, "GET", "/wandb_info")

    async def status(self) -> dict[str, Any]:
        """Return `current_step` and `queue_size` (groups)."""
        return self._checked(await self._get("/status"), _Status, "GET", "/status")

    async def status_env(
        self, env_id: int, *, running_sequences: int | None = None
    ) -> dict[str, Any]:
        """Return the queue size in units of one environment; an unknown id raises status 404.

        `running_sequences` reports how many sequences the environment generates now, to a service
        that shares engines.
        """
        report = {} if running_sequences is None else {"running_sequences": running_sequences}
        body = plain({"env_id": env_id, **report})
        answer = await self._transport.send("GET", "/status-env", body, is_repeatable=True)
        answer = self._checked(answer, _EnvStatus, "GET", "/status-env")
        return {**_STATUS_ENV_DEFAULTS, **answer}

    async def batch(self) -> list[dict[str, Any]] | None:
        """Take the next batch; None if no batch is ready. Raises if no trainer is registered."""
        answer = await self._transport.send(
            "GET",
            "/batch",
            headers=BINARY_FORMAT_HEADERS,
            is_repeatable=True,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
        return delivered_groups(answer, self.base_url)

    async def latest_example(self) -> dict[str, Any]:
        answer = await self._get("/latest_example", max_answer_bytes=MAX_ANSWER_BYTES)
        return object_of(answer, "GET", f"{self.base_url}/latest_example")

    async def post_group(
        self, group: Mapping[str, Any], *, key: str | None = None, ticket: str | None = None
    ) -> dict[str, Any]:
        """Post one group.

        Args:
            group: fields of a scored group.
            key: idempotency key: a service that honors keys stores posts with the same key only
                once. None generates a new key.
            ticket: environment and number of the rollout, such as `3-17`, for a service that
                admits groups in the order of their rollouts.

        Raises:
            GroupError: the group is malformed; nothing was sent.
            TrajectoryApiError: the service rejected it, or was unreachable for too long.
        """
        return await self._post("/scored_data", encode_group, group, key, ticket)

    async def post_groups(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        key: str | None = None,
        ticket: str | None = None,
    ) -> dict[str, Any]:
        """Post groups in one request: all are stored or none; otherwise like `post_group`.

        A ticket without groups is returned: its rollout has no group.
        """
        return await self._post("/scored_data_list", encode_groups, groups, key, ticket)

    async def _post(
        self, path: str, encode: Encoder, value: Any, key: str | None, ticket: str | None
    ) -> dict[str, Any]:
        """Post in the best format that the service accepts, and use that format from now on."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        if ticket is not None:
            headers["Rollout-Ticket"] = ticket
        refused: list[Body] = []
        traits = self._transport.traits
        for form in traits.formats():
            # In a thread: a long group must not delay the rollouts that share this event loop.
            body = await self._side_thread.run(
                encode_body, encode, value, form, zstd=self._compresses
            )
            try:
                answer = await self._transport.send(
                    "POST", path, body, headers=headers, is_post=True
                )
                answer = object_of(answer, "POST", self.base_url + path)
            except TrajectoryApiError as error:
                if not traits.may_be_format(error.status, body):
                    raise
                refused.append(body)
                refusal = error
            else:
                traits.drop(refused)
                return answer
        raise refusal

    async def _get(self, path: str, *, max_answer_bytes: int | None = None) -> Any:
        return await self._transport.send(
            "GET", path, is_repeatable=True, max_answer_bytes=max_answer_bytes
        )

    def _checked(self, answer: Any, kind: Any, method: str, path: str) -> dict[str, Any]:
        return checked_object(answer, kind, method, self.base_url + path)


_ROUTE_MISSING = (404, 405)


def current_step(status: Mapping[str, Any], url: str) -> int:
    """Return the steps of the run in a response of `GET /status`.

    Raises:
        TrajectoryApiError: it has none.
    """
    step = status.get("current_step")
    if not isinstance(step, int):
        fault = f"current_step is {json_kind(step)}, expected an integer"
        raise malformed_answer("GET", f"{url}/status", fault)
    return step


class TrainerClient(SyncClient):
    """Synchronous client for trainers; raises and retries like `TrajectoryApiClient`."""

    def wait_until_up(
        self,
        timeout_s: float,
        on_wait: Callable[[float], None] | None = None,
        *,
        poll_s: float = 0.5,
    ) -> None:
        """Wait until the service responds.

        Args:
            timeout_s: limit on the whole wait.
            on_wait: called before every further attempt, with the seconds waited so far.
            poll_s: pause between attempts.

        Raises:
            NoServiceError: the service did not respond in time, or another program responds at its
                address.
            TrajectoryApiError: the token was rejected.
        """
        started = time.monotonic()
        while True:
            try:
                self._read(self._attempt("GET", "/info"), "GET", "/info")
                return
            except NoServiceError:
                raise
            except TrajectoryApiError as error:
                if error.status in (401, 403):
                    raise
                waited_s = time.monotonic() - started
                if waited_s >= timeout_s:
                    raise NoServiceError(
                        f"no trajectory service after {waited_s:.0f} s: {error}",
                        status=error.status,
                    ) from None
            if on_wait is not None:
                on_wait(waited_s)
            self._sleep(min(poll_s, max(0.0, timeout_s - waited_s)))

    def register(self, **registration: Any) -> int:
        """Register with the fields of `POST /register`; return the trainer's id."""
        answer = self._ask("POST", "/register", plain(registration))
        return assigned_id(answer, self.base_url)

    @overload
    def batch(
        self, *, lease_s: None = None, wait_s: float | None = None, key: str | None = None
    ) -> list[dict[str, Any]] | None: ...

    @overload
    def batch(
        self, *, lease_s: float, wait_s: float | None = None, key: str | None = None
    ) -> LeasedBatch | None: ...

    def batch(
        self,
        *,
        lease_s: float | None = None,
        wait_s: float | None = None,
        key: str | None = None,
    ) -> list[dict[str, Any]] | LeasedBatch | None:
        """Take the next batch; None if no batch is ready.

        Args:
            lease_s: duration of the lease, within which the batch must be acknowledged; otherwise
                it is redelivered. None takes it without acknowledgement.
            wait_s: seconds the service may wait for a batch. Services without this option respond
                at once.
            key: idempotency key of this batch, also in a later process: a batch that was sent for
                it and not acknowledged is delivered again at once. None covers the retries of this
                call only.

        Returns:
            The groups; with a lease, the groups and the id to acknowledge.

        Raises:
            TrajectoryApiError: no trainer is registered, or the service is unreachable.
        """
        path = batch_path(lease_s=lease_s, wait_s=wait_s)
        headers = {**BINARY_FORMAT_HEADERS, "Idempotency-Key": key or uuid.uuid4().hex}
        answer = self._ask("GET", path, headers=headers, wait_s=wait_s or 0.0)
        if lease_s is None:
            return delivered_groups(answer, self.base_url)
        return leased_batch(answer, self.base_url)

    def ack(self, batch_id: str | None, *, steps_done: int | None = None) -> None:
        """Acknowledge a leased batch, so that it is not redelivered; idempotent.

        Args:
            batch_id: id of the lease; None, from a service without leases, does nothing.
            steps_done: optimizer steps done, including that of this batch if it was trained on. The
                step of the run grows by one only if it is smaller; 0 never increases it. With None,
                and in services without this option, every batch counts as a step.

        Raises:
            TrajectoryApiError: the lease has expired, and the batch may have been redelivered.
        """
        if batch_id is not None:
            self._ask("POST", ack_path(batch_id, steps_done=steps_done))

    def nack(self, batch_id: str | None) -> None:
        """Return a leased batch, to be redelivered next; arguments and errors as for `ack`."""
        if batch_id is not None:
            self._ask("POST", nack_path(batch_id))

    def set_policy_version(self, version: int) -> bool:
        """Report the version of the weights that the inference engine serves now.

        `version` grows with every update, e.g. the optimizer steps done.

        Returns:
            False if the service is an older one without this route.
        """
        try:
            self._ask("POST", "/policy", plain({"version": version}))
        except TrajectoryApiError as error:
            if error.status in _ROUTE_MISSING:
                return False
            raise
        return True


_LONGEST_WAIT_S = 5.0
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_MOVED_ON = (404, 409)
_AT_EXIT = RetryRule(attempts=2)
"""Few attempts, so that a finished program does not wait for minutes."""


class BatchIterator:
    """Iterator over the batches of one run, created by `batches`.

    Use it from one thread at a time. With `acknowledge="explicit"`, other threads may call `ack`,
    `nack` and `set_policy_version` while one waits for a batch. Each entry is a `LeasedBatch`;
    `docs/wire.md` describes its `groups`.

    Attributes:
        num_acknowledged: batches acknowledged as trained through this iterator.
    """

    def __init__(
        self,
        client: TrainerClient,
        registration: dict[str, Any],
        *,
        lease_s: float,
        acknowledge: Literal["next", "explicit"],
        idle_limit_s: float | None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_acknowledged = 0
        self._client = client
        self._registration = registration
        self._lease_s = lease_s
        self._acknowledges_at_next = acknowledge == "next"
        self._idle_limit_s = idle_limit_s
        self._sleep = sleep
        self._clock = clock
        self._is_registered = self._is_registered_at_exit = False
        self._is_closed = self._is_ending = False
        self._process_id = os.getpid()
        self._held: dict[str, LeasedBatch] = {}
        self._unconfirmed: set[str | None] = set()
        """Ids of held batches whose acknowledgement failed; they are not returned at the end."""
        self._registering = threading.Lock()

    @property
    def held(self) -> list[LeasedBatch]:
        """Batches that are neither acknowledged nor returned, oldest first."""
        return list(self._held.values())

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> LeasedBatch:
        """Acknowledge the last batch and wait for the next.

        Raises:
            StopIteration: the run has done its steps, the iterator is closed, or no batch arrived
                for `idle_limit_s`.
            TrajectoryApiError: the service rejected a request, or was unreachable for too long.
        """
        batch = self.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def ack(self, batch: LeasedBatch, *, is_trained: bool = True) -> None:
        """Acknowledge a batch as trained; a second call changes nothing, unless the first failed.

        If its lease has expired, a warning is logged, since another trainer may have received it.

        Args:
            batch: batch of this iterator.
            is_trained: Whether it was used for an optimizer step. If not, the batch is dropped and
                the service delivers another in its place. Older services count it as a step in
                either case.

        Raises:
            TrajectoryApiError: the service was unreachable for too long.
        """
        if batch.batch_id is not None and batch.batch_id not in self._held:
            return
        try:
            self._client.ack(batch.batch_id, steps_done=None if is_trained else 0)
        except TrajectoryApiError as error:
            if error.status not in _MOVED_ON:
                self._unconfirmed.add(batch.batch_id)
                raise
            logger.warning(
                "batch %s was not acknowledged, its lease had expired: %s", batch.batch_id, error
            )
            is_trained = False
        if batch.batch_id is None or self._held.pop(batch.batch_id, None) is not None:
            self.num_acknowledged += is_trained

    def nack(self, batch: LeasedBatch) -> None:
        """Return a batch; the service redelivers it next, to any trainer of the run."""
        if batch.batch_id is None or self._held.pop(batch.batch_id, None) is None:
            return
        try:
            self._client.nack(batch.batch_id)
        except TrajectoryApiError as error:
            if error.status not in _MOVED_ON:
                raise

    def set_policy_version(self, version: int) -> None:
        """Report the version of the weights; see `TrainerClient.set_policy_version`."""
        self._register()
        self._client.set_policy_version(version)

    def stop_waiting(self) -> None:
        """End a wait in another thread without a batch, at its next request."""
        self._is_ending = True

    def close(self) -> None:
        """Return batches that are not acknowledged, and end; idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._is_ending = True
        atexit.unregister(self._leave_at_exit)
        try:
            for batch in self.held:
                if batch.batch_id not in self._unconfirmed:
                    self.nack(batch)
        except TrajectoryApiError as error:
            logger.warning("a batch will be redelivered when its lease expires: %s", error)
        self._client.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self.leave(is_failed=exc_type is not None)

    def leave(self, *, is_failed: bool = False) -> None:
        """End as `with` does: acknowledge the last batch of the run and return any other.

        Args:
            is_failed: Whether training on the current batch failed; it is then returned even if it
                is the last.
        """
        if not is_failed and self._acknowledges_at_next and not self._is_closed and self._held:
            try:
                status = self._client.status()
                num_leased = max(len(self._held), status.get("leased_batches", 0))
                step = current_step(status, self._client.base_url)
                is_last = step + num_leased >= self._registration["num_steps"]
                for batch in self.held if is_last else ():
                    self.ack(batch)
            except TrajectoryApiError as error:
                logger.warning("the last batch could not be acknowledged: %s", error)
        self.close()

    def _leave_at_exit(self) -> None:
        """End at interpreter exit without `with`; after an uncaught error the batch is returned."""
        if os.getpid() != self._process_id:
            return  # a forked process that never had the batch
        self._client.set_retry(_AT_EXIT)
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self.leave(is_failed=error is not None)

    def next_batch(self) -> LeasedBatch | None:
        """Same as `next`, but return None at the end."""
        if self._is_closed:
            return None
        self._register()
        if self._acknowledges_at_next:
            for batch in self.held:
                self.ack(batch)
        if self._is_over():
            return None
        return self._wait()

    def _wait(self) -> LeasedBatch | None:
        pause_s = _SHORTEST_PAUSE_S
        idle_since = self._clock()
        while not self._is_ending:
            asked_at = self._clock()
            left_s = _LONGEST_WAIT_S
            if self._idle_limit_s is not None:
                left_s = min(left_s, max(0.0, self._idle_limit_s - (asked_at - idle_since)))
            batch = self._take(left_s)
            if batch is not None and batch.groups:
                if batch.batch_id is not None:
                    self._held[batch.batch_id] = batch
                return batch
            now = self._clock()
            is_late = self._idle_limit_s is not None and now - idle_since >= self._idle_limit_s
            if is_late or self._is_over():
                return None
            if now - asked_at < _SHORTEST_PAUSE_S:  # a service without the option `wait`
                self._sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _take(self, wait_s: float) -> LeasedBatch | None:
        try:
            return self._client.batch(lease_s=self._lease_s, wait_s=wait_s)
        except TrajectoryApiError as error:
            if not says_unregistered(error):
                raise
            logger.warning("the service does not know this run; registering again")
            self._is_registered = False
            self._register()
            return None

    def _register(self) -> None:
        with self._registering:
            if self._is_registered:
                return
            step = self._registration["starting_step"] + self.num_acknowledged
            self._client.register(**{**self._registration, "starting_step": step})
            if not self._is_registered_at_exit:
                atexit.register(self._leave_at_exit)
            self._is_registered = self._is_registered_at_exit = True

    def _is_over(self) -> bool:
        # The service counts, since other processes may do steps of this run too.
        step = current_step(self._client.status(), self._client.base_url)
        return bool(step >= self._registration["num_steps"])


def batches(
    base_url: str = "http://localhost:8000",
    *,
    batch_size: int,
    num_steps: int,
    max_token_len: int = 2048,
    starting_step: int = 0,
    lease_s: float = 600.0,
    acknowledge: Literal["next", "explicit"] = "next",
    idle_limit_s: float | None = None,
    service_timeout_s: float = 600.0,
    token: str | None = None,
    **registration: Any,
) -> BatchIterator:
    """Return an iterator over the batches of a run; the first request registers the trainer.

    Iteration ends when the service reports that the run has done `num_steps`. Several processes
    with the same settings share one run, and each receives different batches.

    Args:
        base_url: address of the service.
        batch_size: exact number of sequences per batch; the maximum with `short_batches`.
        num_steps: batches of the whole run, including the `starting_step` earlier ones.
        max_token_len: maximum length of the sequences that environments send, in tokens.
        starting_step: batches trained before, if a run is continued.
        lease_s: duration of a lease, within which a batch must be acknowledged; otherwise it is
            redelivered.
        acknowledge: With `next`, a batch counts as trained when the next one is requested, and the
            last of the run when `with` is left or the program ends without an error. With
            `explicit`, only `ack` acknowledges, and several batches may be held at a time.
        idle_limit_s: also end if no batch arrives within this time; None waits without limit.
        service_timeout_s: maximum wait for an unreachable service; the wait is logged.
        token: bearer token, sent to the service; never logged.
        **registration: further fields of `POST /register`, such as `checkpoint_dir`. `replace=True`
            replaces the settings of a running run, and sets its step to `starting_step`.
            `short_batches=True` accepts fewer sequences if sizes of groups do not add up.

    Raises:
        ConfigError: a number is out of bounds, or the address or the token cannot be used.

    Example:
        >>> with batches("http://localhost:8000", batch_size=32, num_steps=100) as stream:
        ...     for batch in stream:
        ...         train(batch.groups)
    """
    for name, value in (("batch_size", batch_size), ("num_steps", num_steps)):
        if value < 1:
            raise ConfigError(f"{name}: {value} is below 1")
    if acknowledge not in ("next", "explicit"):
        raise ConfigError(f"acknowledge: {acknowledge!r} is neither 'next' nor 'explicit'")
    patience = RetryRule(attempts=None, deadline_s=service_timeout_s)
    fields = {
        "wandb_group": "",
        "wandb_project": "",
        "checkpoint_dir": "",
        "save_checkpoint_interval": num_steps,
        **registration,
        "batch_size": batch_size,
        "max_token_len": max_token_len,
        "starting_step": starting_step,
        "num_steps": num_steps,
    }
    return BatchIterator(
        TrainerClient(base_url, retry=patience, token=token),
        fields,
        lease_s=lease_s,
        acknowledge=acknowledge,
        idle_limit_s=idle_limit_s,
    )


class AsyncBatches:
    """Wrapper of a `BatchIterator` for `async for`; requests are made in a thread.

    Cancelling is safe: a batch that arrives afterwards becomes the next one, or is returned at the
    end.

    Args:
        batches: return value of `batches`; owned by this object.

    Example:
        >>> async with AsyncBatches(batches(url, batch_size=32, num_steps=100)) as stream:
        ...     async for batch in stream:
        ...         await train(batch.groups)
    """

    def __init__(self, batches: BatchIterator) -> None:
        self._batches = batches
        self._side_thread = SideThread()
        self._fetching: asyncio.Task[LeasedBatch | None] | None = None

    def __aiter__(self) -> AsyncBatches:
        return self

    async def __anext__(self) -> LeasedBatch:
        """Acknowledge the last batch and wait for the next; ends and raises as `BatchIterator`."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._side_thread.run(self._batches.next_batch))
        fetching = self._fetching
        await asyncio.wait([fetching])  # leaves it running, or done, if cancelled
        self._fetching = None
        batch = fetching.result()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def ack(self, batch: LeasedBatch, *, is_trained: bool = True) -> None:
        await self._side_thread.run(self._batches.ack, batch, is_trained=is_trained)

    async def nack(self, batch: LeasedBatch) -> None:
        await self._side_thread.run(self._batches.nack, batch)

    async def set_policy_version(self, version: int) -> None:
        await self._side_thread.run(self._batches.set_policy_version, version)

    async def __aenter__(self) -> AsyncBatches:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self._batches.stop_waiting()
        fetching, self._fetching = self._fetching, None
        is_failed = exc_type is not None
        if fetching is not None:
            with contextlib.suppress(Exception):  # the caller will not request this batch again
                is_failed = await fetching is not None or is_failed  # and was not given it
        await self._side_thread.run(partial(self._batches.leave, is_failed=is_failed))
        self._side_thread.close()
