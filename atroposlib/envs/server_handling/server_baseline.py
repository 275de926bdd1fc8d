"""The request pipeline that every inference server shares.

    health -> semaphore of the split -> attempt -> call of the engine -> record
       ^                                              |
       +------ server down: wait, not an attempt -----+

A request is never answered by a guess: while the server is down it waits, a refusal is raised as
it came, and anything else is repeated up to `MAX_ATTEMPTS` times.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    OpenaiConfig,
    ServerBaseline,
)
from atroposlib.envs.server_handling.health import ServerHealth
from atroposlib.envs.server_handling.loop_turns import SEND_COST_S, LoopTurns
from atroposlib.envs.server_handling.reasoning import (
    VALID_REASONING_EFFORTS,
    ReasoningConfig,
)
from atroposlib.envs.server_handling.request_failures import RequestFailures, how_to_start
from atroposlib.envs.server_handling.request_stats import RequestStats, request_metrics
from atroposlib.envs.server_handling.retry import (
    ServerDownError,
    backoff_s,
    is_outage_suspect,
    retry_after_s,
)
from atroposlib.envs.server_handling.semaphore import (
    AsyncSemWithAdaptiveWeight,
    SemaphoreWithOwnSlot,
)
from atroposlib.errors import EngineSetupError, NoTextCompletionsError

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "RAISE_WHEN_DOWN",
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "OpenaiConfig",
    "ReasoningConfig",
    "ServerBaseline",
    "TokensAndLogprobs",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

TokensAndLogprobs = tuple[list[int], list[list[int]], list[list[float]], list[Any]]
"""Prompt ids [P], and per completion its ids [n][C], logprobs [n][C] and finish reason [n]."""

RAISE_WHEN_DOWN: ContextVar[bool] = ContextVar("RAISE_WHEN_DOWN", default=False)
"""Set by a caller that has other servers: a request meeting a server that is down raises
`ServerDownError` instead of waiting. A context variable, so that no engine sees it as a kwarg."""


class APIServer(ABC):
    """One inference server: limits, retries, health and metrics around an engine's calls.

    A subclass supplies the calls (`_chat_completion_wrapper` and its siblings) and a probe.

    Attributes:
        config: Settings of this server.
        reasoning_config: Reasoning asked for in chat requests, None for none.
        sem: Slots of training requests.
        eval_sem: Slots of evaluation requests.
        request_timings: Seconds of the newest training requests; `eval_request_timings` likewise.
        attempts_list: Attempts of the newest training requests; `eval_attempts_list` likewise.
        num_answered: Requests that had an answer, of both splits.
        num_failed: Requests that were given up.
        last_failure: What the latest of those failed with, or None.
        setup_error: The latest refusal for a wrong address, model, key or tokenizer, or None.
        health_poll_s: Pause between probes of a server that is down.
        max_backoff_s: Longest wait between two attempts.
        gives_token_ids: Whether it may report the ids it sampled; False where the protocol has
            none, and once the server turned out to have none.
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
        self.train_stats = RequestStats(config.rolling_buffer_length)
        self.eval_stats = RequestStats(config.rolling_buffer_length)
        # The contract's names of the same lists.
        self.request_timings = self.train_stats.timings_s
        self.attempts_list = self.train_stats.attempts
        self.eval_request_timings = self.eval_stats.timings_s
        self.eval_attempts_list = self.eval_stats.attempts
        self.initialized = False
        self.num_answered = 0
        self.num_failed = 0
        self.last_failure: Exception | None = None
        self.setup_error: EngineSetupError | None = None
        self._turns = LoopTurns()

    @property
    def takes_structural_tags(self) -> bool:
        """Whether `structured_outputs` of a request for tokens may hold a `structural_tag`."""
        return False

    def share_turns(self, turns: LoopTurns) -> None:
        """Take turns on the event loop together with the other servers that were given `turns`."""
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
        """Keep `server_healthy` true to the facts; runs in the background.

        Called at the first request and after a failure, when no earlier call is still running.

        Args:
            chat_completion: Whether the first request was a chat.
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

    async def _probe(self) -> bool:
        """Ask once, cheaply, whether the server is up; without a way to ask, the last verdict."""
        return self.server_healthy

    def expect_tokenizer(self, tokenizer: Any, *, name: str, is_for_all: bool = False) -> None:
        """Compare the engine's ids with a tokenizer's at the first request; here nothing is known.

        Args:
            tokenizer: Makes the ids that are sent, or trained on.
            name: What it was loaded from, for messages.
            is_for_all: Whether requests for text are trained on as well, not only those for ids.
        """
        return

    async def _check_identity(self, *, gives_tokens: bool) -> None:
        """Compare the engine with the settings, once; raises `EngineSetupError` if they differ."""
        return

    def _note_first_answer(self) -> None:
        """Log what is odd about a server that answers all the same."""
        return

    async def _explain(self, error: Exception) -> EngineSetupError | None:
        """Return what is wrong with the settings when a server refuses a request, if known."""
        return None

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the server's answer to a chat, with the configured reasoning fields added.

        Args:
            **kwargs: `messages` and anything the engine takes; `split` ("train" or "eval") picks
                the limit, `skip_reasoning=True` leaves the reasoning fields out.
        """
        if not kwargs.pop("skip_reasoning", False):
            kwargs = self._inject_reasoning_kwargs(kwargs)
        return await self._request(self._chat_completion_wrapper, kwargs, is_chat=True)

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the server's continuation of a `prompt`."""
        return await self._request(self._completion_wrapper, kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return prompt ids, and per completion its sampled ids, their logprobs and its end."""
        return await self._request(
            self._tokens_and_logprobs_completion_wrapper, kwargs, gives_tokens=True
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return `prompt_tokens`, `prompt_topk_token_ids` and `prompt_topk_logprobs`."""
        return await self._request(self._get_logprobs_wrapper, kwargs, gives_tokens=True)

    async def update_weight(self, weight: float) -> None:
        """Set the share of this server's slots that may be used."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        """Add this server's timings and attempts to `metrics_dict` and return it."""
        metrics = {} if metrics_dict is None else metrics_dict
        metrics.update(request_metrics(server_name, train=self.train_stats, eval_=self.eval_stats))
        return metrics

    async def close(self) -> None:
        """End the health check; subclasses also close their connections."""
        await self.health.close()

    def with_own_slot(self) -> APIServer:
        """Return a view of this server for someone who already holds one of its train slots.

        The view shares everything with this server. Its first request in flight runs in the
        held slot, further ones take slots as usual.
        """
        view = copy.copy(self)
        view.sem = SemaphoreWithOwnSlot(self.sem)
        return view

    def _inject_reasoning_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs` with the reasoning fields this server's provider understands."""
        if self.reasoning_config is None:
            return kwargs
        return self.reasoning_config.add_to(kwargs, base_url=self._request_url())

    def _request_url(self) -> str | None:
        """Return where requests go, as far as it is known."""
        return self.config.known_base_url

    @property
    def is_probed(self) -> bool:
        """Whether the server is asked if it is up: it has a known address, and may be asked."""
        return self._checks_health

    async def probe(self) -> bool:
        """Ask once whether the server is up, leaving `server_healthy` as it is."""
        return await self._probe()

    @property
    def _checks_health(self) -> bool:
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
        is_training = kwargs.pop("split", "train") == "train"
        sem = self.sem if is_training else self.eval_sem
        if not self.initialized:
            self.initialized = True
            if self._checks_health:
                self._start_check(is_chat=is_chat)
            else:
                self.server_healthy = True  # nobody would ever correct an earlier verdict
        failures = RequestFailures(self.health.name, self.config)
        started: float | None = None
        while True:
            await self._wait_until_healthy(failures)
            try:
                async with sem:
                    await self._check_identity(gives_tokens=gives_tokens)
                    await self._turns.turn(SEND_COST_S)
                    started = time.monotonic() if started is None else started
                    answer = await call(**kwargs)
            except Exception as error:  # noqa: BLE001 - one request: judged, counted, re-raised
                try:
                    await self._after_failure(error, failures, is_chat=is_chat)
                except Exception as final:
                    self.num_failed += 1
                    self.last_failure = final
                    raise
                continue
            stats = self.train_stats if is_training else self.eval_stats
            stats.record(seconds=time.monotonic() - started, num_attempts=failures.num_attempts + 1)
            self.num_answered += 1
            if self.num_answered == 1:
                self._note_first_answer()
            return answer

    async def _wait_until_healthy(self, failures: RequestFailures) -> None:
        deadline = time.monotonic() + self.config.startup_timeout
        while not self.server_healthy:
            if RAISE_WHEN_DOWN.get():
                raise ServerDownError(f"inference server {self.health.name} is down")
            if not self.health.has_answered and time.monotonic() > deadline:
                self.setup_error = failures.as_never_answered()
                raise self.setup_error
            await asyncio.sleep(self.health_poll_s)

    async def _after_failure(
        self, error: Exception, failures: RequestFailures, *, is_chat: bool
    ) -> None:
        """Raise what is final; otherwise count the failure and wait until a retry makes sense."""
        try:
            explained = await self._explain(error)
            if explained is not None:
                raise explained from None  # the original may repeat the key
            failures.note(error, url=self._request_url() or self.health.name)
        except NoTextCompletionsError:
            raise  # the caller may ask a chat instead
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
        if not self._checks_health:
            return True
        if not await self.health.confirm(self._probe):
            self._start_check(is_chat=is_chat)
        return self.server_healthy
