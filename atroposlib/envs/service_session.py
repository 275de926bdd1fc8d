"""The connection of one environment to the trajectory service, and the rules of its capacity.

`EnvSession` retries requests while the service is down or has no trainer yet, and holds back groups
while the environment is not registered. A group keeps one idempotency key until it is accepted:
services that honor keys store it once, older ones at least once.

`EnvRegistration` is a member of every environment. It holds the registered name, step, limits and
queue status. It calls `register_env`, `_register_env`, `get_server_info` and `load_checkpoint` on
its environment, so that overrides apply.

    wandb_info (waits for the trainer) -> register-env (waits for it to start) -> info
    status-env, repeatedly; after an unknown id again register-env

`worker_limit` computes how many rollouts may run. The letters of the formulas are

    B = batch_size, K = max_batches_offpolicy, G = group_size, M = largest group in the queue,
    a = min_batch_allocation, q = own groups in the queue, S = straggler_batches,
    F = finished rollouts whose groups wait for slower ones.

Counts are groups unless the name says sequences; one worker makes one group.

Two counts bound how old a group is when it is trained:

    running + queued sequences              <= K * B         F is not counted
    started, untrained sequences, F too     <= (K + S) * B   at every start of a group

So a group waits in the queue for at most K + S - 1 steps, rounded up, after its last token. Over a
run, the mean number of steps between the start of a group and its batch is at most K + S - 1 too
(Little's law: in each step one batch leaves what at most K + S batches share). For a single group
there is no such bound: a rollout that takes ten steps is ten steps old. `worker_timeout`,
`straggler_timeout_s` and the trainer's `max_token_staleness` bound that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.reporting import Reporter, dated_run_name
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.aio import settle

if TYPE_CHECKING:
    from atroposlib.api.client import TrajectoryApiClient

__all__ = [
    "UNKNOWN_ENV_STATUSES",
    "CapacityLimits",
    "EnvRegistration",
    "EnvSession",
    "QueueStatus",
    "crossed_boundary",
    "derived_batch_size",
    "failure_pause_s",
    "is_outage",
    "is_queue_full",
    "is_run_finished",
    "own_share_groups",
    "worker_limit",
]

logger = logging.getLogger(__name__)

UNKNOWN_BATCH_SIZE = -1
FAILURES_BEFORE_PAUSE = 16
FIRST_FAILURE_PAUSE_S = 0.1
LONGEST_FAILURE_PAUSE_S = 5.0


@dataclass(frozen=True)
class QueueStatus:
    """State of the service's queue for one environment."""

    current_step: int
    """Trainer step."""
    queue_groups: int
    """Groups in the whole queue, in units of this environment's groups."""
    own_queue_groups: int = 0
    """Groups of this environment in the queue."""
    max_group_size: int = 1
    """Sequences in the largest group of the queue."""
    unallocated_fraction: float = 1.0
    """Share of a batch that no environment has reserved, 0 to 1."""
    groups_to_start: int | None = None
    """Maximum number of groups in the making, including running ones; None: no limit."""
    max_running_sequences: int | None = None
    """Maximum number of sequences that the engines generate for it; None: no limit."""

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any], *, unreported_groups: int = 0) -> QueueStatus:
        """Read a `/status-env` reply; keys that an older service lacks take neutral values.

        Args:
            reply: decoded reply.
            unreported_groups: groups that the service has accepted since; they count as queued, so
                that an outdated reply never starts too many rollouts.
        """
        status = cls(
            current_step=int(reply["current_step"]),
            queue_groups=int(reply.get("queue_size", 0)),
            own_queue_groups=int(reply.get("self_queue_size", 0)),
            max_group_size=int(reply.get("max_group_size", 1)),
            unallocated_fraction=float(reply.get("unallocated_fraction", 1.0)),
            groups_to_start=reply.get("groups_to_start"),
            max_running_sequences=reply.get("max_running_sequences"),
        )
        if status.groups_to_start is not None:
            left = max(0, int(status.groups_to_start) - unreported_groups)
            status = replace(status, groups_to_start=left)
        return replace(
            status,
            queue_groups=status.queue_groups + unreported_groups,
            own_queue_groups=status.own_queue_groups + unreported_groups,
        )


@dataclass(frozen=True)
class CapacityLimits:
    """Settings of an environment that limit its rollouts."""

    group_size: int
    """Sequences per group."""
    batch_size: int
    """Sequences per batch; -1 when unknown."""
    max_batches_offpolicy: int
    """Maximum number of batches ahead of the trainer; 0 or less removes the limit."""
    max_workers: int
    """Maximum number of concurrent rollouts."""
    total_steps: int = -1
    """Trainer steps of the run; negative when unknown."""
    min_batch_allocation: float | None = None
    """Share of each batch reserved for this environment; None reserves nothing."""
    straggler_batches: float = 0.0
    """Batches of finished rollouts of unfinished groups, in addition to max_batches_offpolicy."""


def crossed_boundary(*, old_step: int, new_step: int, interval: int) -> int | None:
    """Return the largest multiple of `interval` in (old_step, new_step], or None.

    For example 2 for interval 2 and a change from 0 to 3. None for an interval of 0 or less.
    """
    if interval <= 0 or new_step // interval <= old_step // interval:
        return None
    return new_step // interval * interval


def is_run_finished(*, current_step: int, total_steps: int) -> bool:
    """Whether the trainer has done its steps; a negative total means no end."""
    return 0 <= total_steps <= current_step


def derived_batch_size(
    *, batch_size: int, unallocated_fraction: float, min_batch_allocation: float | None
) -> int:
    """Return the number of sequences of each batch that this environment may fill, -1 when unknown.

    It is the sum of the unreserved and the environment's own share: B = 16 with half of it
    unallocated and a = 0.25 gives 12.
    """
    if batch_size == UNKNOWN_BATCH_SIZE:
        return UNKNOWN_BATCH_SIZE
    return int(batch_size * (unallocated_fraction + (min_batch_allocation or 0.0)))


def is_queue_full(status: QueueStatus, limits: CapacityLimits) -> bool:
    """Whether enough sequences wait for the trainer, so that no rollout may start.

    The queue is full when it holds K batches, unless a reserved share is unfilled:
    `ceil(a*B*K / M) * (M // G) - q > 0`. It is also full when the batch size is unknown, and when
    the queued sequences suffice until the end of the run.

    M is at least G here. Otherwise smaller groups of other environments would make an empty share
    appear filled, and batches that need this environment would never form.
    """
    if limits.batch_size == UNKNOWN_BATCH_SIZE:
        return True
    queued_sequences = status.queue_groups * limits.group_size
    if limits.total_steps >= 0:
        queued_steps = queued_sequences // limits.batch_size
        if status.current_step + queued_steps > limits.total_steps:
            return True
    if limits.max_batches_offpolicy <= 0:
        return False
    if queued_sequences < limits.max_batches_offpolicy * limits.batch_size:
        return False
    return not _has_unfilled_share(status, limits)


def _has_unfilled_share(status: QueueStatus, limits: CapacityLimits) -> bool:
    if limits.min_batch_allocation is None:
        return False
    largest = max(status.max_group_size, limits.group_size)
    packs = _reserved_packs(limits, pack_sequences=largest)
    return packs * (largest // limits.group_size) - status.own_queue_groups > 0


def _reserved_packs(limits: CapacityLimits, *, pack_sequences: int) -> int:
    reserved_sequences = (
        (limits.min_batch_allocation or 0.0) * limits.batch_size * limits.max_batches_offpolicy
    )
    return math.ceil(reserved_sequences / pack_sequences)


def own_share_groups(status: QueueStatus, limits: CapacityLimits) -> int:
    """Return the number of groups that the environment must make to fill its reserved share.

    `max(0, ceil(((ceil(a*B*K / M) + M // G) * M - q*G) / G))`: the reserved sequences in whole
    packs of M, plus some slack, minus the environment's queued sequences.

    With B = 16, K = 3, a = 0.25, M = 8, G = 2, q = 5: (2 + 4) * 8 = 48 sequences wanted, 10
    waiting, so 38 sequences or 19 groups.
    """
    if limits.min_batch_allocation is None:
        return 0
    packs = _reserved_packs(limits, pack_sequences=status.max_group_size)
    packs += status.max_group_size // limits.group_size
    missing_sequences = packs * status.max_group_size - status.own_queue_groups * limits.group_size
    return max(0, math.ceil(missing_sequences / limits.group_size))


def worker_limit(
    status: QueueStatus,
    limits: CapacityLimits,
    *,
    evaluation_ratio: float = 1.0,
    finished_sequences: int = 0,
) -> int:
    """Return the maximum number of workers; running ones above it continue.

    Args:
        status: latest state of the queue.
        limits: the environment's settings.
        evaluation_ratio: share of the workers that a running evaluation allows, 0 to 1.
        finished_sequences: finished rollouts of groups that wait for slower rollouts.

    Returns:
        The number that keeps queue and running rollouts within K derived batches, or more to fill a
        reserved share; at most `int(max_workers * evaluation_ratio)` and the service's limits.
    """
    most = int(limits.max_workers * evaluation_ratio)
    if status.groups_to_start is not None:
        most = min(most, status.groups_to_start)
    if status.max_running_sequences is not None:
        num_occupied = status.max_running_sequences + finished_sequences
        most = min(most, max(1, num_occupied // limits.group_size))
    share = derived_batch_size(
        batch_size=limits.batch_size,
        unallocated_fraction=status.unallocated_fraction,
        min_batch_allocation=limits.min_batch_allocation,
    )
    if share == UNKNOWN_BATCH_SIZE:
        return 0
    if limits.max_batches_offpolicy <= 0:
        return max(0, most)
    bound = limits.max_batches_offpolicy * share
    uncounted = min(finished_sequences, int(limits.straggler_batches * share))
    allowed = (bound + uncounted) // limits.group_size - status.queue_groups
    allowed = max(allowed, own_share_groups(status, limits))
    return max(0, min(most, allowed))


def failure_pause_s(consecutive_failures: int) -> float:
    """Return the seconds to wait before new rollouts after a number of failures in a row.

    A broken inference server or reward function fails every rollout at once; without a pause the
    failures would flood the log. The pause is zero after a few failures.
    """
    excess = consecutive_failures - FAILURES_BEFORE_PAUSE
    if excess < 0:
        return 0.0
    return float(min(LONGEST_FAILURE_PAUSE_S, FIRST_FAILURE_PAUSE_S * 2.0 ** min(excess, 16)))


Answer = TypeVar("Answer")

OUTAGE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
"""Status codes of errors that are temporary."""
UNKNOWN_ENV_STATUSES = frozenset({404, 500})
"""Status codes for an unknown environment id: of this service, and of earlier versions."""

KEY_REUSED = "was used for another body"
"""Part of the service's message about an idempotency key that it knows."""

LONGEST_PAUSE_S = 10.0
LONGEST_RETRY_AFTER_S = 60.0
"""Longest pause that the service can ask for."""
MOST_FAILED_SENDS = 3
OUTAGE_LOG_INTERVAL_S = 30.0


def is_outage(error: TrajectoryApiError) -> bool:
    """Whether the same request may succeed later."""
    return error.status is None or error.status in OUTAGE_STATUSES


@dataclass
class RolloutTicket:
    """Number of a rollout, by which a service with `--ordered-envs` orders groups."""

    registration: int
    """The registration under which it is valid."""
    number: int
    is_sent: bool = False
    """Whether the service has accepted a group with it."""


_ticket_of_rollout: ContextVar[RolloutTicket | None] = ContextVar("ticket_of_rollout", default=None)


class EnvSession:
    """One environment's connection to the service.

    Args:
        client: client of the service.
        retry_s: seconds between two attempts.
        clock: monotonic seconds.

    Attributes:
        env_id: id of the latest registration, None before it.
        num_groups_sent: groups that the service has accepted, over all registrations.
    """

    def __init__(
        self,
        client: TrajectoryApiClient,
        *,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.env_id: int | None = None
        self.num_groups_sent = 0
        self._retry_s = retry_s
        self._run_id: str | None = None
        self._is_sharing_engines = False
        self._num_registrations = 0
        self._outages_at_confirmation = 0
        self._clock = clock
        self._away_since: float | None = None
        self._logged_at: dict[str, float] = {}
        self._is_registered = asyncio.Event()
        self._ticketed_registration: int | None = None
        """Registration from which rollouts are numbered; None: they are not."""
        self._next_ticket = 0
        self._returning: set[asyncio.Task[None]] = set()

    @property
    def is_registered(self) -> bool:
        """Whether the service knows this environment, by its latest reply."""
        return self._is_registered.is_set()

    @property
    def is_forgotten(self) -> bool:
        """Whether the service forgot this environment, until it is registered again.

        One that never registered, such as in a test of single methods, is not forgotten.
        """
        return self.env_id is not None and not self.is_registered

    @property
    def earlier_registration(self) -> tuple[int, str] | None:
        """Id and run of the latest registration; None before it, or if the run has no name."""
        if self.env_id is None or self._run_id is None:
            return None
        return self.env_id, self._run_id

    async def ask(
        self,
        question: Callable[[], Awaitable[Answer | None]],
        *,
        waiting_for: str,
        may_pass: Callable[[TrajectoryApiError], bool] = is_outage,
        backs_off: bool = False,
    ) -> Answer:
        """Repeat a request until it has an answer.

        Args:
            question: returns None while there is no answer yet; outages count as no answer.
            waiting_for: what is missing while the answer is None, for the log.
            may_pass: Whether an error is an outage and not final.
            backs_off: Whether to double the pause with every outage, up to ten seconds.

        Raises:
            TrajectoryApiError: a final error.
        """
        longest_s = max(self._retry_s, LONGEST_PAUSE_S) if backs_off else self._retry_s
        next_pause_s = self._retry_s
        while True:
            pause_s = self._retry_s
            try:
                answer = await question()
            except TrajectoryApiError as error:
                if not may_pass(error):
                    raise
                asked_s = min(error.retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
                pause_s = max(next_pause_s, asked_s)
                if backs_off:
                    pause_s *= 1.0 + random.random() / 4.0  # else all groups are sent again at once
                next_pause_s = min(2.0 * next_pause_s, longest_s)
                self._log_outage(error)
            else:
                if answer is not None:
                    if self._logged_at:
                        logger.info("the trajectory service has answered; continuing")
                    self._logged_at.clear()
                    self._away_since = None
                    return answer
                self._log_missing(waiting_for)
            await asyncio.sleep(pause_s)

    def _log_outage(self, error: TrajectoryApiError) -> None:
        """Log once per interval that the service is down, for all requests that wait."""
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        reason = f"status {error.status}"
        if now - self._logged_at.get(reason, float("-inf")) < OUTAGE_LOG_INTERVAL_S:
            return
        self._logged_at[reason] = now
        waited_s = now - self._away_since
        so_far = f", for {waited_s:.0f} s so far" if waited_s >= 1 else ""
        logger.warning(
            "the trajectory service is not available (%s); waiting for it%s", error, so_far
        )

    def _log_missing(self, waiting_for: str) -> None:
        """Log once what is missing, for all requests that wait."""
        self._away_since = None
        if waiting_for not in self._logged_at:
            self._logged_at[waiting_for] = self._clock()
            logger.warning("waiting for %s", waiting_for)

    def enter(
        self, env_id: int, *, run_id: str | None = None, first_ticket: int | None = None
    ) -> None:
        """Record a registration; waiting groups are then sent.

        Args:
            env_id: id in the run.
            run_id: the service's name of the run; None if it sends no name.
            first_ticket: number of the next rollout; None: as before, or not numbered.
        """
        self.env_id = env_id
        self._run_id = run_id
        self._num_registrations += 1
        if first_ticket is not None:
            self._ticketed_registration, self._next_ticket = self._num_registrations, first_ticket
        self._outages_at_confirmation = self.client.num_outages
        self._is_registered.set()

    def forget_registration(self) -> None:
        """Hold groups back until the next `enter`, since the service does not know the id."""
        self._is_registered.clear()

    @contextmanager
    def numbered_rollout(self) -> Iterator[None]:
        """Give the next ticket to the groups that are sent inside; return it if none is sent."""
        if self._ticketed_registration is None:
            yield
            return
        ticket = RolloutTicket(self._ticketed_registration, self._next_ticket)
        self._next_ticket += 1
        token = _ticket_of_rollout.set(ticket)
        try:
            yield
        finally:
            _ticket_of_rollout.reset(token)
            if not ticket.is_sent:
                # In its own task, since the rollout may have been cancelled.
                task = asyncio.create_task(self._return_ticket(ticket))
                self._returning.add(task)
                task.add_done_callback(self._returning.discard)

    async def _return_ticket(self, ticket: RolloutTicket) -> None:
        _ticket_of_rollout.set(ticket)
        try:
            await self.send([])
        except TrajectoryApiError as error:
            logger.warning("ticket %d could not be returned: %s", ticket.number, error)

    def _ticket_text(self, ticket: RolloutTicket | None) -> dict[str, str]:
        """Return the argument of the client for a ticket, none if it is of another registration."""
        if ticket is None or ticket.registration != self._ticketed_registration:
            return {}
        return {"ticket": f"{self.env_id}-{ticket.number}"}

    async def send(self, groups: Mapping[str, Any] | list[Any], *, key: str | None = None) -> None:
        """Deliver one group (a mapping) or several (a list), and retry during outages.

        The groups get the `env_id` of the registration under which they are sent. After an outage
        the registration is confirmed first: the service may have started a new run, where the id
        belongs to another environment. After a cancellation the delivery is unknown.

        Args:
            groups: the groups of one request.
            key: idempotency key that an earlier process may have used for them; the service then
                has them, and they are not sent again. None makes a new key.

        Raises:
            TrajectoryApiError: the service rejects the groups; the message includes its reason.
            GroupError: a group cannot be encoded.
        """
        is_known, key = key is not None, key or uuid.uuid4().hex
        ticket = _ticket_of_rollout.get()
        num_failures = 0

        async def deliver() -> bool:
            if self.is_forgotten:
                await self._is_registered.wait()
            await self._confirm_registration()
            order = self._ticket_text(ticket)
            if isinstance(groups, list):
                stamped = [{**group, "env_id": self.env_id} for group in groups]
                await self.client.post_groups(stamped, key=key, **order)
            else:
                await self.client.post_group({**groups, "env_id": self.env_id}, key=key, **order)
            return True

        def may_pass(error: TrajectoryApiError) -> bool:
            nonlocal num_failures
            num_failures += error.status == 500
            return is_outage(error) or (error.status == 500 and num_failures < MOST_FAILED_SENDS)

        waiting_for = "the service to take a group"
        try:
            await self.ask(deliver, waiting_for=waiting_for, may_pass=may_pass, backs_off=True)
        except TrajectoryApiError as error:
            if not (is_known and KEY_REUSED in str(error)):
                raise
            # Sent by an earlier process, under the id and a ticket of its registration.
            logger.info("the service has this group already; it is not sent again")
            ticket = None  # not settled: it is returned at the end of the rollout
        self.num_groups_sent += len(groups) if isinstance(groups, list) else 1
        if ticket is not None:
            ticket.is_sent = True

    async def status(self, env_id: int, *, running_sequences: int | None = None) -> dict[str, Any]:
        """Return the queue's status for this environment.

        `running_sequences` is sent to services that share engines, by their last reply.

        Raises:
            TrajectoryApiError: with status 404, if the id is unknown or belongs to another run.
        """
        run_id = self._run_id
        if self._is_sharing_engines and running_sequences is not None:
            status = await self.client.status_env(env_id, running_sequences=running_sequences)
        else:
            status = await self.client.status_env(env_id)
        self._is_sharing_engines = "max_running_sequences" in status
        if run_id is not None and status.get("run_id", run_id) != run_id:
            raise TrajectoryApiError(
                f"environment id {env_id} is of another run than the one served now: a trainer "
                "has replaced its settings, or a new run was started",
                status=404,
            )
        return status

    async def _confirm_registration(self) -> None:
        """After an outage, wait for a new registration if the service does not know this one."""
        num_outages, num_registrations = self.client.num_outages, self._num_registrations
        if self.env_id is None or num_outages == self._outages_at_confirmation:
            return
        try:
            await self.status(self.env_id)
            self._outages_at_confirmation = num_outages
        except TrajectoryApiError as error:
            if error.status not in UNKNOWN_ENV_STATUSES:
                raise
            if self._num_registrations == num_registrations:
                self.forget_registration()
            await self._is_registered.wait()

    async def leave(self, *, timeout_s: float) -> None:
        """Disconnect and close the client; failures are only logged."""
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        try:
            if self.env_id is not None and self.is_registered:
                await asyncio.wait_for(self.client.disconnect_env(self.env_id), timeout_s)
                logger.info("disconnected from the trajectory service")
        except (TrajectoryApiError, asyncio.TimeoutError) as error:
            logger.warning("could not disconnect from the trajectory service: %r", error)
        finally:
            self.forget_registration()
            await self.client.close()


class RegisteringEnv(Protocol):
    """Attributes and methods of an environment that `EnvRegistration` uses."""

    config: BaseEnvConfig
    server: Any
    retry_interval_s: float

    @property
    def desired_name(self) -> str: ...
    async def _register_env(self) -> dict[str, Any]: ...
    async def register_env(self) -> None: ...
    async def get_server_info(self) -> None: ...
    def load_checkpoint(self) -> None: ...


class EnvRegistration:
    """The registration of one environment, and the settings and status of the service.

    Args:
        env: The environment.
        reporter: Opens the metrics log under the registered name.
        token: Returns the service's token, or None; called for each session.

    Attributes:
        service_session: Connection to the service under `serve`, otherwise None.
        env_id: Id of the registration, None before it.
        status_dict: Latest `/status-env` reply, None before the first.
        curr_step: Trainer step that the environment has handled.
        trainer_steps: Number of steps that the trainer registered, -1 when unknown.
        max_token_len: Token limit of the trainer, -1 when unknown.
        max_num_workers: Maximum number of concurrent rollouts.
        count_running: Returns the number of sequences that run now, or None if it is unknown.
        checkpoint_interval: Trainer steps between two checkpoints.
    """

    def __init__(
        self, env: RegisteringEnv, reporter: Reporter, *, token: Callable[[], str | None]
    ) -> None:
        self.service_session: EnvSession | None = None
        self.env_id: int | None = None
        self.status_dict: dict[str, Any] | None = None
        self.curr_step = 0
        self.trainer_steps = -1
        self.max_token_len = -1
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.wandb_prepend: str | None = None
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self._env = env
        self._reporter = reporter
        self._token = token
        self._asked_steps = env.config.total_steps
        self._groups_in_status = 0
        self.count_running: Callable[[], int | None] = lambda: None
        self.max_num_workers = self._most_workers()

    def open_session(self) -> EnvSession:
        from atroposlib.api.client import RetryRule, TrajectoryApiClient

        client = TrajectoryApiClient(
            self._env.config.rollout_server_url,
            # The session retries posts itself, since their id may have changed in between.
            post_retry=RetryRule(attempts=1),
            token=self._token(),
        )
        self.service_session = EnvSession(client, retry_s=self._env.retry_interval_s)
        return self.service_session

    def numbered_rollout(self) -> AbstractContextManager[None]:
        """Number the rollout inside, if the service admits groups in the order of rollouts."""
        session = self.service_session
        return nullcontext() if session is None else session.numbered_rollout()

    def session(self) -> EnvSession:
        """Return the open connection to the service, or open one."""
        return self.service_session or self.open_session()

    async def open_wandb(self) -> None:
        """Implement `BaseEnv.setup_wandb`."""
        if not self._env.config.use_wandb or self.wandb_project is not None:
            return
        session = self.session()

        async def project_and_group() -> dict[str, Any] | None:
            reply = await session.client.wandb_info()
            return reply if reply["project"] is not None else None

        reply = await session.ask(project_and_group, waiting_for="the trainer to register")
        self.wandb_project, self.wandb_group = reply["project"], reply["group"]
        stem = self._env.config.wandb_name
        self._reporter.start_run_log(name=dated_run_name(stem, now=time.time()) if stem else None)

    async def ask_to_register(self) -> dict[str, Any]:
        """Implement `BaseEnv._register_env`."""
        session = self.session()
        # If a trainer took over from an export or another trainer, the environment keeps its id.
        earlier = session.earlier_registration
        return await session.client.register_env(
            **({} if earlier is None else {"earlier": earlier}),
            max_token_length=self._env.config.max_token_length,
            desired_name=self._env.desired_name,
            weight=self._env.config.inference_weight,
            group_size=self._env.config.group_size,
            min_batch_allocation=self._env.config.min_batch_allocation,
        )

    async def register(self) -> None:
        """Implement `BaseEnv.register_env`."""
        session = self.session()

        async def accepted() -> dict[str, Any] | None:
            reply = await self._env._register_env()
            return reply if reply["status"] == "success" else None

        reply = await session.ask(accepted, waiting_for="the trainer to start")
        is_first = session.env_id is None
        self.env_id = reply["env_id"]
        self.wandb_prepend = reply["wandb_name"]
        if is_first or reply["starting_step"] < self.curr_step:
            # A later step is left to `env_step_checks`: boundaries may lie on the way to it.
            self.curr_step = reply["starting_step"]
        self.checkpoint_dir = reply["checkpoint_dir"]
        self.checkpoint_interval = reply["checkpoint_interval"]
        self.trainer_steps = reply["num_steps"]
        self._env.config.total_steps = self._last_step(reply["num_steps"])
        session.enter(
            reply["env_id"], run_id=reply.get("run_id"), first_ticket=reply.get("first_ticket")
        )
        self._reporter.name_metrics_file(reply["wandb_name"])
        logger.info("registered as %s at step %d", self.wandb_prepend, self.curr_step)
        if is_first and self.curr_step > 0:
            self._env.load_checkpoint()

    def _last_step(self, trainer_steps: int) -> int:
        asked = self._asked_steps
        if asked == -1:
            if trainer_steps == -1:
                raise ConfigError(
                    "total_steps is -1, but the trainer registered no number of steps either; "
                    "set --env.total_steps"
                )
            return trainer_steps
        if self._env.config.end_with_trainer and 0 < trainer_steps < asked:
            return trainer_steps
        return asked

    async def fetch_settings(self) -> None:
        """Implement `BaseEnv.get_server_info`."""
        session = self.session()
        info = await session.ask(session.client.info, waiting_for="the trainer's settings")
        if info["batch_size"] != -1:
            self._env.config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            self.max_token_len = info["max_token_len"]
        if self.max_token_len <= 0:
            logger.info("the trainer sets no length limit; groups of any length are sent")
        batch_size, group_size = self._env.config.batch_size, self._env.config.group_size
        if batch_size == -1:
            raise ConfigError(
                "no batch size is known: the trainer registered none and env.batch_size is -1"
            )
        if group_size > batch_size:
            raise ConfigError(
                f"group_size is {group_size} but the trainer's batch_size is {batch_size}; "
                "a group must fit into one batch"
            )

    async def fetch_status(self) -> None:
        """Implement `BaseEnv.get_status`."""
        session = self.session()
        groups_in_status = 0

        async def status() -> dict[str, Any] | None:
            nonlocal groups_in_status
            for _ in range(2):  # the second time under a new registration
                groups_in_status = session.num_groups_sent
                try:
                    if session.env_id is not None:
                        return await session.status(
                            session.env_id, running_sequences=self.count_running()
                        )
                except TrajectoryApiError as error:
                    if error.status not in UNKNOWN_ENV_STATUSES:
                        raise
                    logger.warning(
                        "the service does not know this environment (%s); registering again", error
                    )
                session.forget_registration()
                await settle(self._env.register_env())
                await settle(self._env.get_server_info())
            return None

        self.status_dict = await session.ask(status, waiting_for="the status of the queue")
        self._groups_in_status = groups_in_status
        self._env.server.policy_version = self.status_dict.get("policy_version")
        self.max_num_workers = self._most_workers()
        if self._env.config.inference_weight >= 0:
            await settle(self._env.server.update_weight(self.status_dict.get("env_weight", 1.0)))

    def _most_workers(self) -> int:
        if self._env.config.max_num_workers != -1:
            return self._env.config.max_num_workers
        return self._env.config.max_num_workers_per_node * len(self._env.server.servers)

    @property
    def derived_batch_size(self) -> int:
        """Number of sequences of each batch that this environment may fill, -1 when unknown."""
        if self.status_dict is None:
            return self._env.config.batch_size
        return derived_batch_size(
            batch_size=self._env.config.batch_size,
            unallocated_fraction=self.status_dict.get("unallocated_fraction", 1.0),
            min_batch_allocation=self._env.config.min_batch_allocation,
        )

    def queue_status(self) -> QueueStatus:
        """Return the latest status, plus the groups sent since."""
        reply = self.status_dict or {"current_step": self.curr_step, "queue_size": 0}
        unreported = self.session().num_groups_sent - self._groups_in_status
        status = QueueStatus.from_reply(reply, unreported_groups=unreported)
        if self._env.config.inference_weight < 0:  # excluded from the sharing of engines
            return replace(status, max_running_sequences=None)
        return status

    def capacity_limits(self) -> CapacityLimits:
        return CapacityLimits(
            group_size=self._env.config.group_size,
            batch_size=self._env.config.batch_size,
            max_batches_offpolicy=self._env.config.max_batches_offpolicy,
            max_workers=self.max_num_workers,
            total_steps=self._env.config.total_steps,
            min_batch_allocation=self._env.config.min_batch_allocation,
            straggler_batches=self._env.config.straggler_batches,
        )

    @property
    def are_starts_held_back(self) -> bool:
        """Whether no rollout may start: the environment is forgotten, or the queue is full."""
        return self.session().is_forgotten or is_queue_full(
            self.queue_status(), self.capacity_limits()
        )
