"""The thread that generates for all requests, and the commands that others hand to it.

Only the thread touches the sequences and the model; commands run between two steps.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from atroposlib.errors import InferenceError
from example_trainer.torch_engine.batching import EngineLimits, SequenceBatch
from example_trainer.torch_engine.jobs import Completion, Job, PromptRequest
from example_trainer.torch_engine.weights import replace_weights

logger = logging.getLogger(__name__)

PauseMode = Literal["wait", "abort", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("wait", "abort", "keep")
Result = TypeVar("Result")


class EngineCounts(NamedTuple):
    """State of the engine for `/metrics`."""

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    cache_use: float
    """Part of `max_cache_tokens` that is reserved, 0 to 1."""
    preemptions: int
    """Sequences returned to the queue because the caches were full."""
    cached_tokens: int
    """Prompt tokens whose caches were copied from other sequences."""


class TorchEngine:
    """Generates for many requests at the same time; `close` ends its thread."""

    def __init__(
        self,
        model: Any,
        limits: EngineLimits,
        *,
        is_processed: bool = False,
        keeps_prefixes: bool = True,
        seed: int = 0,
        weight_version: str | None = None,
        image_token_id: int | None = None,
    ) -> None:
        """`image_token_id`: Token of images if the model is one of `IMAGE_MODELS`."""
        self.batch = SequenceBatch(
            model,
            limits,
            is_processed=is_processed,
            keeps_prefixes=keeps_prefixes,
            weight_version=weight_version,
            image_token_id=image_token_id,
        )
        """Its methods are called in the thread only."""
        self._seeds = random.Random(seed)
        self.reports_failures = True
        """Whether the log has the traceback of a failed step."""
        self._held: list[Job] = []
        """Requests that arrived while a pause waits for the others."""
        self._is_paused = False
        self._pauses: list[Future[None]] = []
        """Pauses that wait for running requests."""
        self._num_prompt_tokens = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def weight_version(self) -> str | None:
        """Version of the weights in use; None if unknown."""
        return self.batch.weight_version

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused or a pause waits for running requests."""
        return self._is_paused or bool(self._pauses)

    @property
    def is_alive(self) -> bool:
        """Whether the generation thread is running."""
        return self._thread.is_alive()

    def counts(self) -> EngineCounts:
        batch = self.batch
        return EngineCounts(
            batch.num_running,
            batch.num_waiting + sum(job.num_open for job in self._held),
            self._num_prompt_tokens,
            batch.num_generated_tokens,
            batch.cache_use,
            batch.num_preemptions,
            batch.shared.num_copied_tokens,
        )

    def submit(self, job: Job) -> None:
        """Add a request; its callbacks receive the results."""
        self._command(lambda: self._take(job))

    def abort(self, jobs: Iterable[Job]) -> None:
        """End requests; `on_done` is called with completions whose reason is `abort`."""
        given = list(jobs)
        self._command(lambda: self._abort(given))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating; the future is done once no request is being generated.

        `keep` freezes running requests, `abort` ends them, `wait` lets them finish. Requests that
        arrive later wait for `resume`.
        """
        paused: Future[None] = Future()
        paused.set_running_or_notify_cancel()  # from now on, a caller cannot cancel it
        self._command(lambda: self._pause(mode, paused))
        return paused

    def resume(self) -> Future[None]:
        return self._call(self._resume)

    def reset_caches(self) -> Future[None]:
        """Discard the caches; those of running requests are computed again."""
        return self._call(self.batch.drop_caches)

    def reload(self, folder: Path, *, version: str | None) -> Future[None]:
        """Load the weights of a checkpoint and discard all caches.

        The future raises `ConfigError` if the checkpoint is not one of the model; the weights are
        then unchanged. Without a `version`, that of the new weights is unknown.
        """

        def replace() -> None:
            replace_weights(self.batch.model, folder)
            self.batch.weight_version = version
            self.batch.drop_caches()

        return self._call(replace)

    def close(self) -> None:
        """End the thread; open requests get `InferenceError`."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def _call(self, function: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)

        self._command(run)
        return future

    def _command(self, function: Callable[[], None]) -> None:
        with self._wake:
            if self._is_closed:
                raise InferenceError("the engine has been closed")
            self._commands.append(function)
            self._wake.notify()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._next_commands():
                self._step_or_fail()
                self._end_waiting_pauses()
            # Requests that were accepted are answered as well.
            for command in self._commands:
                command()
            self._fail_all(InferenceError("the engine is shutting down"))
            self._end_waiting_pauses()

    def _step_or_fail(self) -> None:
        if not self._has_work():
            return
        try:
            self.batch.step()
        except Exception as error:
            level = logging.ERROR if self.reports_failures else logging.DEBUG
            logger.log(level, "a generation step failed; its requests are answered", exc_info=True)
            self._fail_all(error)

    def _next_commands(self) -> bool:
        """Wait for work and run the commands; return False once the engine is closed."""
        with self._wake:
            while not (self._commands or self._is_closed or self._has_work()):
                self._wake.wait()
            if self._is_closed:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            try:
                command()
            except Exception as error:
                logger.exception("a command failed; the requests are answered")
                self._fail_all(error)
        return True

    def _has_work(self) -> bool:
        return not (self._is_paused or self.batch.is_empty)

    def _take(self, job: Job) -> None:
        if self._pauses:
            self._held.append(job)
            return
        request = job.request
        for index in range(request.num_completions):
            completion = Completion(request, index, random.Random(self._seed_of(request, index)))
            job.completions.append(completion)
            self.batch.add(job, completion)
        self._num_prompt_tokens += len(request.prompt_ids)

    def _seed_of(self, request: PromptRequest, index: int) -> int:
        if request.seed is None:
            return self._seeds.getrandbits(64)
        # `Random` drops the sign, so that -1 and 1 would be the same seed.
        return (request.seed + index) % 2**64

    def _pause(self, mode: PauseMode, paused: Future[None]) -> None:
        if mode == "abort":
            self._abort(self.batch.jobs())
        self._pauses.append(paused)
        if mode != "wait" or self._is_paused:
            self._is_paused = True
            self._end_pauses()

    def _resume(self) -> None:
        self._is_paused = False
        self._end_pauses()

    def _end_waiting_pauses(self) -> None:
        """Pause, if pauses wait for requests and all of these have ended, in whatever way."""
        if self._pauses and self.batch.is_empty:
            self._is_paused = True
            self._end_pauses()

    def _end_pauses(self) -> None:
        pauses, self._pauses = self._pauses, []
        for paused in pauses:
            paused.set_result(None)
        held, self._held = self._held, []
        for job in held:
            self._take(job)

    def _abort(self, jobs: Iterable[Job]) -> None:
        aborted = list(jobs)
        removed = {id(job) for job in aborted}
        self._held = [job for job in self._held if id(job) not in removed]
        for job, completion in self.batch.remove(aborted):
            job.end(completion, "abort")

    def _fail_all(self, error: Exception) -> None:
        held, self._held = self._held, []
        for job in (*self.batch.clear(), *held):
            job.error = error
            job.on_done(job)
