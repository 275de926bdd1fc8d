"""The request pipeline of every inference server: slots, health, retries, metrics, versions.

    health -> slot of the split's semaphore -> attempt -> call of the engine -> record
       ^                                                     |
       +--------- server down: wait, not an attempt ---------+

While the server is down, requests wait; a refusal is raised unchanged; any other failure is retried
up to `MAX_ATTEMPTS` times. Health is probed only at start and after failures:

    request fails -> confirm() -> one shared probe -> up: retry / down: watch() until it is back

An answer with tokens may name the weights that sampled them. An integer name is interpreted as the
policy version that the trainer reports to the service. `sampled_versions` collects the versions of
a rollout.

Invariants: one slot is held per attempt; an attempt that fails because the server went down is
counted as an outage, not as an attempt.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from atroposlib.envs.server_handling.config import (
    VALID_REASONING_EFFORTS,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    how_to_start,
)
from atroposlib.envs.server_handling.retry import (
    MAX_ATTEMPTS,
    MAX_OUTAGES,
    RetriesExhaustedError,
    ServerDownError,
    as_context_overflow,
    as_setup_error,
    backoff_s,
    describe,
    describe_connection,
    is_outage_suspect,
    is_retryable,
    retry_after_s,
)
from atroposlib.errors import EngineSetupError, NoTextCompletionsError
from atroposlib.scored_data import (
    VersionRun,
    WeightSpan,
    cut_runs,
    join_runs,
    read_spans,
)
from atroposlib.utils.aio import LoopTurns, end_task
from atroposlib.utils.tracing import model_span, note_answer

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "OpenaiConfig",
    "ReasoningConfig",
    "ServerBaseline",
]

logger = logging.getLogger(__name__)

SEND_COST_S = 0.0004
"""Estimated CPU time to send one request, in seconds: render the prompt, encode, write the body."""

ROUTE_COST_S = 0.0001
"""Estimated CPU time to choose a server for one request and acquire its slot, in seconds."""


class AsyncSemWithAdaptiveWeight(asyncio.Semaphore):
    """Admits about `weight * max_val` holders at once, first come first served.

    At weight 1 it is a plain semaphore; at weight 0 or below it admits no holder; above 1 it
    admits more than `max_val`. Changing the weight never evicts holders, and wakes the waiters
    that now fit.

    Invariant: `_value` is `max_val` minus the number of holders; a granted waiter counts as a
    holder from the moment it is granted, before it runs.
    """

    _value: int

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.max_val = value
        self.weight = 1.0
        self._queue: deque[asyncio.Future[None]] = deque()

    def min_val(self) -> float:
        """Return the bound that `_value` must exceed for a slot to be free."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        self.weight = weight
        self._admit_waiters()

    def locked(self) -> bool:
        return bool(self._queue) or not self._has_slot()

    async def acquire(self) -> Literal[True]:
        """Wait for a slot and take it; cancelling is safe."""
        if not self.locked():
            self._value -= 1
            return True
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # `_admit_waiters` may have dropped it already
                    self._queue.remove(turn)
            else:  # granted and cancelled in the same tick: pass the slot on
                self.release()
            raise
        return True

    def release(self) -> None:
        self._value += 1
        self._admit_waiters()

    def _has_slot(self) -> bool:
        return self._value > self.min_val()

    def _admit_waiters(self) -> None:
        while self._queue and self._has_slot():
            turn = self._queue.popleft()
            if turn.done():  # cancelled, its owner has not run yet
                continue
            self._value -= 1
            turn.set_result(None)


class SemaphoreWithOwnSlot(AsyncSemWithAdaptiveWeight):
    """View of a semaphore for a caller that already holds one of its slots.

    The first `acquire` uses the held slot, so that the caller cannot deadlock; further ones wait
    for slots of the original. Weight and counts are those of the original.
    """

    def __init__(self, original: AsyncSemWithAdaptiveWeight) -> None:
        self._original = original
        self._own_is_free = True
        self._num_shared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def update_weight(self, weight: float) -> None:
        self._original.update_weight(weight)

    def locked(self) -> bool:
        return not self._own_is_free and self._original.locked()

    async def acquire(self) -> Literal[True]:
        if self._own_is_free:
            self._own_is_free = False
            return True
        await self._original.acquire()
        self._num_shared += 1
        return True

    def release(self) -> None:
        if self._num_shared:
            self._num_shared -= 1
            self._original.release()
        else:
            self._own_is_free = True


T = TypeVar("T")

TokensAndLogprobs = tuple[list[int], list[list[int]], list[list[float]], list[Any]]
"""Prompt ids [P], and per completion its ids [n][C], logprobs [n][C] and finish reason [n]."""


class SharedSearch(Generic[T]):
    """Lets concurrent callers share one running search; the caller stores the result."""

    def __init__(self) -> None:
        self.running: asyncio.Task[T] | None = None

    async def result(self, find: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running or a new search; cancelling does not stop the search."""
        if self.running is None or not _is_running(self.running):
            self.running = asyncio.create_task(find())
            # Its callers may all be cancelled, and then none reads its error.
            self.running.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self.running)


def _is_running(task: asyncio.Task[Any] | None) -> bool:
    # A task of a closed loop never finishes.
    return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()


REMINDER_S = 60.0
"""Seconds between two log lines about a server that does not answer."""


class ServerHealth:
    """Health of one server, and the task that updates it.

    Invariant: while `is_up` is False because of a probe, one watcher task runs that resets it, also
    if it is cancelled. A value set by a caller holds until the next probe.

    Attributes:
        has_answered: Whether the server ever answered; until then its address may be wrong.
    """

    def __init__(
        self, name: str, *, startup_timeout_s: float | None = None, remedy: str = ""
    ) -> None:
        self.name = name
        self._remedy = remedy
        self._startup_timeout_s = startup_timeout_s
        self._next_line = 0.0
        self.watcher: asyncio.Task[None] | None = None
        self.has_answered = False
        self._is_up = True
        self._probing: SharedSearch[bool] = SharedSearch()

    @property
    def is_up(self) -> bool:
        """Whether requests may be sent; True until the first failed probe."""
        return self._is_up

    @is_up.setter
    def is_up(self, value: bool) -> None:
        if value and not self._is_up:
            logger.info("inference server %s answers again", self.name)
        elif not value and (self._is_up or time.monotonic() >= self._next_line):
            until = "until it does"
            if not self.has_answered and self._startup_timeout_s is not None:
                until = f"for it for up to {self._startup_timeout_s:g} s (startup_timeout)"
                until += f"; {self._remedy}" if self._remedy else ""
            logger.warning(
                "inference server %s does not answer; requests wait %s", self.name, until
            )
            self._next_line = time.monotonic() + REMINDER_S
        self._is_up = value

    def start_watching(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `watch` in the background, unless it already runs on this event loop."""
        if not _is_running(self.watcher):
            self.watcher = asyncio.create_task(watch())
            self.watcher.add_done_callback(self._forget_if_cancelled)

    def _forget_if_cancelled(self, watcher: asyncio.Task[None]) -> None:
        # Its event loop ends: requests on a later one would wait for a state that nothing updates.
        if watcher.cancelled():
            self._is_up = True

    async def confirm(self, probe: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Probe once and store the result; concurrent callers share the probe."""
        self.is_up = await self._probing.result(probe)
        self.has_answered = self.has_answered or self.is_up
        return self.is_up

    async def close(self) -> None:
        for task in (self.watcher, self._probing.running):
            if task is not None and _is_running(task):
                await end_task(task)


class RequestFailures:
    """The failures of one request.

    A failure because the server went down does not count as an attempt and may happen `MAX_OUTAGES`
    times. Other transient failures are retried until `MAX_ATTEMPTS` attempts were made.

    Attributes:
        num_attempts: Attempts that failed at a server that was up.
        num_outages: Attempts that failed because the server was down.
    """

    def __init__(self, server_name: str, config: APIServerConfig) -> None:
        self.num_attempts = 0
        self.num_outages = 0
        self._server_name = server_name
        self._config = config
        self._last_error: Exception | None = None

    def note(self, error: Exception, *, url: str) -> None:
        """Record an error; raise if it is final.

        Raises:
            ContextOverflowError: the prompt is too long for the engine.
            EngineSetupError: address, model or key are wrong.
            Exception: `error` itself, if the same request cannot succeed later.
        """
        self._last_error = error
        overflow = as_context_overflow(error)
        if overflow is not None:
            raise overflow from error
        wrong_setup = as_setup_error(
            error, url=url, model=self._config.model_name, api_key=self._config.api_key
        )
        if wrong_setup is not None:
            raise wrong_setup from None  # the original may repeat the key
        if not is_retryable(error):
            raise error

    def count(self, error: Exception, *, was_down: bool) -> bool:
        """Count a transient failure; return whether it was an attempt rather than an outage.

        Raises:
            RetriesExhaustedError: the limit of attempts or of outages is exceeded.
        """
        if was_down:
            self.num_outages += 1
            if self.num_outages <= MAX_OUTAGES:
                return False
        self.num_attempts += 1
        if self.num_attempts >= MAX_ATTEMPTS or self.num_outages > MAX_OUTAGES:
            raise RetriesExhaustedError(
                f"inference server {self._server_name} failed {self.num_attempts} attempts and was "
                f"down during {self.num_outages} others; the last error was {describe(error)}",
                error,
                num_attempts=self.num_attempts,
            ) from error
        return True

    def never_answered_error(self) -> EngineSetupError:
        tried = f" ({describe_connection(self._last_error)})" if self._last_error else ""
        return EngineSetupError(
            f"inference server {self._server_name} has not answered within "
            f"{self._config.startup_timeout:g} seconds{tried}; {how_to_start(self._config)}. "
            "A server that takes longer to start needs a larger startup_timeout "
            "(--openai.startup_timeout)"
        )


@dataclass
class RequestStats:
    """Timings of one split (training or evaluation) of one server.

    Attributes:
        max_length: Maximum number of recent requests kept.
        timings_s: Seconds from the first attempt to the answer, oldest first.
        attempts: Attempts made per answered request, oldest first.
    """

    max_length: int
    timings_s: list[float]
    attempts: list[int]

    def record(self, *, seconds: float, num_attempts: int) -> None:
        _append_bounded(self.timings_s, seconds, self.max_length)
        _append_bounded(self.attempts, num_attempts, self.max_length)

    def metrics(self, prefix: str, *, attempts_name: str) -> dict[str, float]:
        """Return the statistics of timings and attempts, as far as there is data."""
        metrics = {}
        if self.timings_s:
            timings = np.asarray(self.timings_s)
            metrics = {
                f"{prefix}request_time_avg": float(timings.mean()),
                f"{prefix}request_time_std": float(timings.std()),
                f"{prefix}request_time_99p": float(np.percentile(timings, 99)),
            }
        if self.attempts:
            metrics[attempts_name] = float(np.mean(self.attempts))
        return metrics


def _append_bounded(values: list[T], value: T, max_length: int) -> None:
    values.append(value)
    del values[:-max_length]


class APIServer(ABC):
    """One inference server: limits, retries, health and metrics around an engine's calls.

    A subclass implements the engine calls (`_chat_completion_wrapper` etc.) and a probe.

    Attributes:
        config: Settings of this server.
        reasoning_config: Reasoning options added to chat requests, or None.
        sem: Slots of training requests.
        eval_sem: Slots of evaluation requests.
        request_timings: Seconds of recent training requests; `eval_request_timings` likewise.
        attempts_list: Attempts of recent training requests; `eval_attempts_list` likewise.
        num_answered: Number of answered requests, of both splits.
        num_failed: Number of requests that failed finally.
        last_failure: Error of the latest failed request, or None.
        setup_error: The latest refusal for a wrong address, model, key or tokenizer, or None.
        health_poll_s: Seconds between probes of a server that is down.
        max_backoff_s: Maximum seconds between two attempts.
        gives_token_ids: Whether the server may report sampled ids; False if the protocol has none,
            or once the server has returned none.
    """

    health_poll_s = 1.0
    max_backoff_s = 10.0
    gives_token_ids = True

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        self.config = config
        self.reasoning_config = reasoning_config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        self.health = ServerHealth(
            config.shown_base_url,
            startup_timeout_s=config.startup_timeout,
            remedy=how_to_start(config),
        )
        # Monitors clear these lists or assign new ones.
        self.request_timings: list[float] = []
        self.attempts_list: list[int] = []
        self.eval_request_timings: list[float] = []
        self.eval_attempts_list: list[int] = []
        self.initialized = False
        self.num_answered = 0
        self.num_failed = 0
        self.last_failure: Exception | None = None
        self.setup_error: EngineSetupError | None = None
        self._turns = LoopTurns()

    @property
    def takes_structural_tags(self) -> bool:
        """Whether token requests accept a `structural_tag` in `structured_outputs`."""
        return False

    def share_turns(self, turns: LoopTurns) -> None:
        """Share one budget of event-loop work with the other servers that received `turns`."""
        self._turns = turns

    @property
    def server_healthy(self) -> bool:
        """Whether requests are sent rather than held; True until the first failed probe."""
        return self.health.is_up

    @server_healthy.setter
    def server_healthy(self, value: bool) -> None:
        self.health.is_up = value

    @property
    def check_task(self) -> asyncio.Task[None] | None:
        """The running or last health check, None before the first request."""
        return self.health.watcher

    @abstractmethod
    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Keep `server_healthy` up to date; runs in the background.

        Called at the first request and after a failure, unless an earlier call is still running.
        """

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        """Make one chat request."""

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        """Make one completion request."""

    @abstractmethod
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        """Make one completion request that returns the engine's own ids and logprobs."""

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        """Make one request for prompt logprobs."""
        raise NotImplementedError(f"{type(self).__name__} does not offer prompt logprobs")

    async def probe(self) -> bool:
        """Probe once whether the server is up, without changing `server_healthy`.

        Returns the last known state by default.
        """
        return self.server_healthy

    def expect_tokenizer(self, tokenizer: Any, *, name: str, is_for_all: bool = False) -> None:
        """Compare the engine's ids with a tokenizer's at the first request; no-op by default.

        With `is_for_all`, text requests are checked too, since they are trained on.
        """
        return

    async def _check_identity(self, *, gives_tokens: bool) -> None:
        """Compare the engine with the settings, once; raises `EngineSetupError` if they differ."""
        return

    def _note_first_answer(self) -> None:
        """Log a mismatch with the settings that did not prevent the first answer."""
        return

    async def _explain(self, error: Exception) -> EngineSetupError | None:
        """Return the setup error that explains a refused request, if known."""
        return None

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the server's answer to a chat, with the configured reasoning fields added.

        Args:
            **kwargs: `messages` and engine options; `split` ("train" or "eval") selects the
                slots, `skip_reasoning=True` leaves the reasoning fields out, and
                `raise_when_down=True` raises `ServerDownError` instead of waiting for the server.
        """
        if not kwargs.pop("skip_reasoning", False):
            kwargs = self._inject_reasoning_kwargs(kwargs)
        return await self._request(self._chat_completion_wrapper, kwargs, is_chat=True)

    async def completion(self, **kwargs: Any) -> Completion:
        return await self._request(self._completion_wrapper, kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return prompt ids, and per completion its ids, their logprobs and its finish reason."""
        return await self._request(
            self._tokens_and_logprobs_completion_wrapper, kwargs, gives_tokens=True
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return `prompt_tokens`, `prompt_topk_token_ids` and `prompt_topk_logprobs`."""
        return await self._request(self._get_logprobs_wrapper, kwargs, gives_tokens=True)

    async def update_weight(self, weight: float) -> None:
        """Set the share of the server's slots that may be used."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        """Add this server's timings and attempts to `metrics_dict` and return it."""
        metrics = {} if metrics_dict is None else metrics_dict
        prefix = f"server/{server_name or 'server'}_"
        attempts_name = f"{prefix}average_num_attempts"
        metrics |= self._stats(is_training=True).metrics(prefix, attempts_name=attempts_name)
        attempts_name = f"{prefix}eval_retry_rate"
        stats = self._stats(is_training=False)
        metrics |= stats.metrics(f"{prefix}eval_", attempts_name=attempts_name)
        return metrics

    def _stats(self, *, is_training: bool) -> RequestStats:
        lists = (
            (self.request_timings, self.attempts_list)
            if is_training
            else (self.eval_request_timings, self.eval_attempts_list)
        )
        return RequestStats(self.config.rolling_buffer_length, *lists)

    async def close(self) -> None:
        await self.health.close()

    def with_own_slot(self) -> APIServer:
        """Return a view of this server for a caller that holds one of its training slots.

        The view shares all state with this server. Its first request in flight uses the held slot;
        further ones acquire slots as usual.
        """
        view: Any = object.__new__(_view_type(type(self)))
        view.__dict__ = self.__dict__
        view.own_sem = SemaphoreWithOwnSlot(self.sem)
        return view  # type: ignore[no-any-return]

    def _inject_reasoning_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.reasoning_config is None:
            return kwargs
        return self.reasoning_config.add_to(kwargs, base_url=self._request_url())

    def _request_url(self) -> str | None:
        """Return the URL of requests; None if unknown."""
        return self.config.known_base_url

    @property
    def is_probed(self) -> bool:
        """Whether the server's health is probed: its URL is known and health checks are on."""
        return self.config.health_check and self.config.known_base_url is not None

    def _start_check(self, *, is_chat: bool) -> None:
        self.health.start_watching(lambda: self.check_server_status_task(is_chat))

    async def _request(
        self,
        call: Callable[..., Awaitable[T]],
        kwargs: dict[str, Any],
        *,
        is_chat: bool = False,
        gives_tokens: bool = False,
    ) -> T:
        """Run one request through the pipeline; cancelling frees its slot."""
        kwargs = {**kwargs, "model": self.config.model_name}
        kwargs.pop("skip_reasoning", None)
        raise_when_down = kwargs.pop("raise_when_down", False)
        is_training = kwargs.pop("split", "train") == "train"
        sem = self.sem if is_training else self.eval_sem
        if not self.initialized:
            self.initialized = True
            if self.is_probed:
                self._start_check(is_chat=is_chat)
            else:
                self.server_healthy = True  # an earlier value would never be corrected
        failures = RequestFailures(self.health.name, self.config)
        names = (self.config.model_name, self.health.name)
        started: float | None = None
        while True:
            await self._wait_until_healthy(failures, raise_when_down=raise_when_down)
            try:
                async with sem:
                    await self._check_identity(gives_tokens=gives_tokens)
                    await self._turns.turn(SEND_COST_S)
                    started = time.monotonic() if started is None else started
                    with model_span("chat" if is_chat else "text_completion", *names) as span:
                        answer = await call(**kwargs)
                        note_answer(span, answer)
            except Exception as error:  # noqa: BLE001 - one request: classified, counted, re-raised
                try:
                    await self._after_failure(error, failures, is_chat=is_chat)
                except Exception as final:
                    self.num_failed += 1
                    self.last_failure = final
                    raise
                continue
            stats = self._stats(is_training=is_training)
            stats.record(seconds=time.monotonic() - started, num_attempts=failures.num_attempts + 1)
            self.num_answered += 1
            if self.num_answered == 1:
                self._note_first_answer()
            return answer

    async def _wait_until_healthy(
        self, failures: RequestFailures, *, raise_when_down: bool
    ) -> None:
        deadline = time.monotonic() + self.config.startup_timeout
        while not self.server_healthy:
            if raise_when_down:
                raise ServerDownError(f"inference server {self.health.name} is down")
            if not self.health.has_answered and time.monotonic() > deadline:
                self.setup_error = failures.never_answered_error()
                raise self.setup_error
            await asyncio.sleep(self.health_poll_s)

    async def _after_failure(
        self, error: Exception, failures: RequestFailures, *, is_chat: bool
    ) -> None:
        """Raise a final error; otherwise count the failure and wait before the next attempt."""
        try:
            explained = await self._explain(error)
            if explained is not None:
                raise explained from None  # the original may repeat the key
            failures.note(error, url=self._request_url() or self.health.name)
        except NoTextCompletionsError:
            raise  # the caller may send a chat instead
        except EngineSetupError as wrong:
            self.setup_error = wrong
            raise
        was_down = is_outage_suspect(error) and not await self._is_up(is_chat=is_chat)
        if not failures.count(error, was_down=was_down):
            return
        wait_s = backoff_s(
            failures.num_attempts, longest_s=self.max_backoff_s, draw=random.random()
        )
        await asyncio.sleep(max(wait_s, retry_after_s(error) or 0.0))

    async def _is_up(self, *, is_chat: bool) -> bool:
        if not self.is_probed:
            return True
        if not await self.health.confirm(self.probe):
            self._start_check(is_chat=is_chat)
        return self.server_healthy


@lru_cache(maxsize=64)
def _view_type(kind: type[APIServer]) -> type[APIServer]:
    """Return a class of servers that have a `sem` of their own and the state of another one."""
    body = {"__slots__": ("own_sem",), "sem": property(lambda view: view.own_sem)}
    return type(kind.__name__, (kind,), body)


def failing_over(server: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a request to one of several servers, which raises if that is down.

    Servers of other classes receive `kwargs` unchanged.
    """
    return {**kwargs, "raise_when_down": True} if isinstance(server, APIServer) else kwargs


FROM_TEXT = "tokenized_from_text"
"""Key of a node's metadata and field of a group: the tokens were encoded from text."""

TOKEN_VERSIONS = "token_versions"
"""Key of a node's metadata and field of a group: runs of policy versions, see `scored_data`."""

_OPEN: ContextVar[tuple[SampledVersions, ...]] = ContextVar("sampled_versions", default=())


class VersionedTokens(tuple[list[int], list[list[int]], list[list[float]], list[Any]]):
    """An answer with tokens and logprobs, unpacked and compared like the plain tuple.

    Attributes:
        weight_versions: [n] the engine's name for the weights of each completion, of its first
            token if they changed; None if it does not report one. Names are chosen when weights
            are loaded into the engine.
        weight_spans: [n] the spans of each completion, in token order.
    """

    weight_versions: list[str | None]
    weight_spans: list[list[WeightSpan]]

    def __new__(
        cls,
        tokens: TokensAndLogprobs,
        weight_versions: Sequence[str | None],
        weight_spans: Sequence[Sequence[WeightSpan]] | None = None,
    ) -> VersionedTokens:
        self = super().__new__(cls, tokens)
        self.weight_versions = list(weight_versions)
        self.weight_spans = [list(spans) for spans in weight_spans or ()] or [
            [WeightSpan(version, len(ids))]
            for version, ids in zip(weight_versions, tokens[1], strict=True)
        ]
        return self


def spans_in(answer: Any) -> list[list[WeightSpan]]:
    """Return the spans of each completion of an answer with tokens."""
    if isinstance(answer, VersionedTokens):
        return answer.weight_spans
    return [[WeightSpan(None, len(ids))] for ids in answer[1]]


def with_spans(tokens: TokensAndLogprobs, reported: Sequence[Any]) -> TokensAndLogprobs:
    """Return an answer with the spans that the engine reports for each completion.

    Args:
        tokens: the answer.
        reported: [n] lists of `{"version": "12", "num_tokens": 57}` in token order, or None.

    Raises:
        InferenceError: spans do not cover the tokens of their completion.
    """
    if not any(reported):
        return tokens
    spans = [
        read_spans(given, len(ids), completion_index=i)
        for i, (given, ids) in enumerate(zip(reported, tokens[1], strict=True))
    ]
    names = [of_completion[0].version if of_completion else None for of_completion in spans]
    return VersionedTokens(tokens, names, spans)


def join_answers(parts: Sequence[TokensAndLogprobs]) -> TokensAndLogprobs:
    """Join the answers to the parts of one request, with the first part's prompt."""
    if len(parts) == 1:
        return parts[0]
    tokens: TokensAndLogprobs = (
        parts[0][0],
        [ids for part in parts for ids in part[1]],
        [logprobs for part in parts for logprobs in part[2]],
        [reason for part in parts for reason in part[3]],
    )
    spans = [of_completion for part in parts for of_completion in spans_in(part)]
    names = [of_completion[0].version if of_completion else None for of_completion in spans]
    return VersionedTokens(tokens, names, spans)


def policy_version_of(weight_version: Any, reported: int | None) -> int | None:
    """Return the policy version of tokens.

    This is the engine's name of its weights if it is an integer, else the version that the service
    reported when the completion was requested.
    """
    text = str(weight_version)
    return int(text) if text.isascii() and text.isdigit() else reported


def runs_of_spans(spans: Sequence[WeightSpan], reported: int | None) -> list[VersionRun]:
    """Return the policy versions of a completion; see `policy_version_of`."""
    return join_runs((policy_version_of(span.version, reported), span.num_tokens) for span in spans)


def oldest_of_runs(runs: Sequence[VersionRun], reported: int | None) -> int | None:
    """Return the oldest known version of a completion; `reported` if it has no token."""
    known = [version for version, _ in runs if version is not None]
    return min(known, default=None if runs else reported)


class SampledVersions:
    """Policy versions and finish reasons of everything sampled while this collection is open.

    Attributes:
        oldest: The smallest version; None while none is known.
        has_text: Whether the tokens of any completion were encoded from its text.
    """

    def __init__(self) -> None:
        self.oldest: int | None = None
        self._reasons: dict[int, str] = {}
        self._runs: list[tuple[list[int], list[VersionRun]]] = []
        self.has_text = False

    def add(self, version: int) -> None:
        self.oldest = version if self.oldest is None else min(self.oldest, version)

    def add_finish_reason(self, tokens: Sequence[int], reason: str) -> None:
        self._reasons[hash(tuple(tokens))] = reason

    def finish_reasons(self, sequences: Sequence[Sequence[int]]) -> list[str | None] | None:
        """Return [G] the finish reason of each of [G][L] sequences; None if all are unknown.

        A sequence that differs from the recorded tokens has no reason.
        """
        reasons = [self._reasons.get(hash(tuple(tokens))) for tokens in sequences]
        return reasons if any(reason is not None for reason in reasons) else None

    def add_runs(self, tokens: list[int], runs: list[VersionRun]) -> None:
        """Record the versions of the tokens of a sequence.

        A recorded sequence that this one continues is forgotten: its versions are contained.
        """
        self._runs = [
            (earlier, known)
            for earlier, known in self._runs
            if not (
                len(earlier) < len(tokens)
                and tokens[: len(earlier)] == earlier
                and cut_runs(runs, len(earlier)) == known
            )
        ]
        self._runs.append((tokens, runs))

    def token_versions(
        self, sequences: Sequence[Sequence[int]]
    ) -> list[list[VersionRun] | None] | None:
        """Return [G] the versions of each of [G][L] sequences; None if all are unknown.

        A sequence may be a recorded one, or the beginning of one. Equal sequences have the versions
        of the equal recorded ones, in order.
        """
        left = list(self._runs)
        found: list[list[VersionRun] | None] = []
        for sequence in map(list, sequences):
            equal = [record for record in left if record[0] == sequence]
            if len(equal) > 1:
                left.remove(equal[0])
            longer = (record for record in left if record[0][: len(sequence)] == sequence)
            match = equal[0] if equal else next(longer, None)
            found.append(None if match is None else cut_runs(match[1], len(sequence)))
        return found if any(runs is not None for runs in found) else None


@contextmanager
def sampled_versions() -> Iterator[SampledVersions]:
    """Collect the versions of everything sampled in this context and in tasks started in it."""
    versions = SampledVersions()
    token = _OPEN.set((*_OPEN.get(), versions))
    try:
        yield versions
    finally:
        _OPEN.reset(token)


def note_sampled(
    version: int | None,
    *,
    tokens: Sequence[int] = (),
    finish_reason: str | None = None,
    is_from_text: bool = False,
    runs: Sequence[VersionRun] = (),
) -> None:
    """Record a completion in every open collection of this task.

    Args:
        version: Policy version of the completion; None if unknown.
        tokens: [L] its whole sequence, including the prompt.
        finish_reason: Reason for which it ended; None if unknown.
        is_from_text: Whether its tokens were encoded from text.
        runs: Policy versions of the L tokens; empty if the engine does not name them.
    """
    for versions in _OPEN.get():
        if version is not None:
            versions.add(version)
        if finish_reason is not None:
            versions.add_finish_reason(tokens, finish_reason)
        if runs:
            versions.add_runs(list(tokens), list(runs))
        versions.has_text = versions.has_text or is_from_text


def note_node(tokens: list[int], metadata: Mapping[str, Any] | None) -> None:
    """Record a sequence of another process in every open collection; repetitions change nothing."""
    fields = metadata or {}
    runs = join_runs(fields.get(TOKEN_VERSIONS) or ())
    is_known = all((tokens, runs) in versions._runs for versions in _OPEN.get())
    note_sampled(
        fields.get("policy_version"),
        tokens=tokens,
        finish_reason=fields.get("finish_reason"),
        is_from_text=bool(fields.get(FROM_TEXT)),
        runs=() if is_known else runs,
    )
