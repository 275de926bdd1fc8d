"""Continuous batching: one thread generates for all requests, one token of each per step.

    submit ─► waiting ─► running (slots of the cache) ─► finished
                 ▲             │
                 └─────────────┘  the caches are full, or the weights were replaced: the caches
                                  of prompt and completion are computed again

Completions of one prompt often begin with the same tokens. Until they sample different ones, they
are a branch, which has one slot and is computed once:

    slot 0: 7 + 1 =   ─►   slot 0: 7 + 1 = 8      (5 of 8 completions)
                           slot 1: 7 + 1 = 9      (3 completions, with a copy of the caches)

Only the thread touches the sequences and the model; others hand it commands, which run between two
steps. transformers' own continuous batching has one set of sampling settings for all requests, no
most likely tokens or prompt logprobs, and keeps caches of old weights; see also `attention`.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from atroposlib.errors import InferenceError
from example_trainer.torch_engine.attention import PackedBatch, PackedTokens, SlotCache
from example_trainer.torch_engine.grammars import Grammar, GrammarState, constrain
from example_trainer.torch_engine.prefixes import PrefixPool
from example_trainer.torch_engine.sampling import (
    PastTokens,
    SampledRows,
    SamplingSettings,
    sample_rows,
)
from example_trainer.torch_engine.weights import replace_weights

logger = logging.getLogger(__name__)

PauseMode = Literal["wait", "abort", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("wait", "abort", "keep")
_SCORED_ROWS = 256
"""Tokens of a prompt whose logprobs are computed at a time, which bounds the memory."""
_NOT_FINITE = (
    "the model's logits are NaN or infinite: its weights have such numbers, or their type cannot "
    "represent the activations"
)
_OR_EXCLUDED = "; or the other settings exclude every token that the grammar allows"
TopEntries = list[tuple[int, float]]
"""Token ids and their logprobs, most likely first."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class PromptRequest:
    """One prompt and how its completions are sampled, within the limits of the engine."""

    prompt_ids: tuple[int, ...]
    """[P], at least one."""
    num_completions: int = 1
    max_tokens: int = 16
    """Completion tokens; 0 with `prompt_top` computes the logprobs of the prompt only."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    grammar: Grammar | None = None
    """Limits the tokens of the completions; None: any text."""
    seed: int | None = None
    """The completion with index i uses `seed + i`; None: from the engine's seed."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion, of which they are part."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion after `sampling.min_tokens`."""
    num_top: int = 0
    """Most likely tokens to return for each completion token."""
    prompt_top: int | None = None
    """Most likely tokens to return for each prompt token; None: no logprobs of the prompt."""

    @cached_property
    def distinct_D(self) -> torch.Tensor:
        """Distinct tokens of the prompt."""
        return torch.tensor(list(set(self.prompt_ids)))


class Completion:
    """The tokens of one completion; grows while it is generated."""

    def __init__(self, request: PromptRequest, index: int, generator: random.Random) -> None:
        self.request = request
        self.index = index
        self.generator = generator
        self.grammar: GrammarState | None = None
        if request.grammar is not None:
            self.grammar = request.grammar.start(request.stop_ids)
        self.tokens: list[int] = []
        """[C]"""
        self.counts: Counter[int] = Counter()
        """Number of times that each token was sampled."""
        self.logprobs: list[float] = []
        """[C]"""
        self.tops: list[TopEntries] = []
        """[C][K] if requested."""
        self.version_runs: list[tuple[str | None, int]] = []
        """Weight versions that sampled the tokens, each with its number of tokens, in order."""
        self.finish_reason: str | None = None
        """`stop`, `length`, `abort`; None while it is generated."""
        self.stop_reason: int | str | None = None
        """The stop token or text that ended it; None for the end of the turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def all_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.tokens]

    @property
    def past(self) -> PastTokens:
        return PastTokens(self.request.distinct_D, self.counts, self.tokens)

    def problem_of(self, logprob: float) -> str | None:
        """Return why the completion cannot go on by a token with this logprob; None if it can."""
        if self.grammar is not None and self.grammar.failure is not None:
            return self.grammar.failure
        # NaN if any logit of the row is NaN or infinite; minus infinity if no token is allowed.
        if math.isfinite(logprob):
            return None
        return _NOT_FINITE if self.grammar is None else _NOT_FINITE + _OR_EXCLUDED

    def append(self, token: int, logprob: float, top: TopEntries, version: str | None) -> None:
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        self.counts[token] += 1
        self.logprobs.append(logprob)
        if self.request.num_top:
            self.tops.append(top)
        last, count = self.version_runs[-1] if self.version_runs else (version, 0)
        if last == version:
            self.version_runs[-1:] = [(version, count + 1)]
        else:
            self.version_runs.append((version, 1))


class Job:
    """A request in the engine, with the callbacks that receive its results in the thread."""

    def __init__(
        self,
        request: PromptRequest,
        *,
        on_done: Callable[[Job], None],
        on_token: Callable[[Completion], None] | None = None,
        find_stop: Callable[[Completion], str | None] | None = None,
    ) -> None:
        self.request = request
        self.on_done = on_done
        self.on_token = on_token
        """Called after each token and at the end of a completion."""
        self.find_stop = find_stop
        """Returns the stop text that a completion contains since its last token."""
        self.completions: list[Completion] = []
        self.prompt_logprobs: list[tuple[float, TopEntries]] | None = None
        """[P-1] logprob and most likely tokens of the prompt's tokens after the first."""
        self.error: Exception | None = None
        """Set before `on_done` if the request failed."""
        self.num_open = request.num_completions

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are requested and not computed yet."""
        return self.request.prompt_top is not None and self.prompt_logprobs is None


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine."""

    max_model_len: int
    """Tokens of prompt and completion."""
    max_num_seqs: int = 256
    """Sequences that run at the same time."""
    max_cache_tokens: int = 1 << 20
    """Tokens of the caches, with padding to the longest sequence."""
    max_new_tokens: int = 8192
    """Prompt tokens that start in one step, unless one prompt is longer."""
    state_tokens: int = 0
    """Tokens whose caches take the memory of a sequence's states in recurrent layers."""


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
    """Prompt tokens whose caches were copied from finished sequences."""


_Member = tuple[Job, Completion]


class _Branch(NamedTuple):
    """Sequences that have the same tokens so far, at least one."""

    members: list[_Member]

    @property
    def tokens(self) -> list[int]:
        return self.members[0][1].all_ids

    @property
    def last_token(self) -> int:
        return self.members[0][1].tokens[-1]

    @property
    def num_tokens(self) -> int:
        return self.members[0][1].num_tokens


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
    ) -> None:
        self.limits = limits
        self.model = model
        self._cache = SlotCache(device=next(model.parameters()).device, dtype=model.dtype)
        self._prefixes = PrefixPool(whole=limits.state_tokens > 0)
        self.keeps_prefixes = keeps_prefixes
        """Whether the caches of finished sequences are used by requests that continue them."""
        self._is_processed = is_processed
        self._seeds = random.Random(seed)
        self.weight_version = weight_version
        """Version of the weights in use; None if unknown."""
        self.reports_failures = True
        """Whether the log has the traceback of a failed step."""
        self._waiting: deque[_Member] = deque()
        self._running: list[_Branch] = []
        """The position is the slot in the cache."""
        self._starting: list[_Member] = []
        """Taken from the queue in the current step."""
        self._held: list[Job] = []
        """Requests that arrived while a pause waits for the others."""
        self._is_paused = False
        self._pauses: list[Future[None]] = []
        """Pauses that wait for running requests."""
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_preemptions = 0
        self._num_cached_tokens = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused or a pause waits for running requests."""
        return self._is_paused or bool(self._pauses)

    @property
    def is_alive(self) -> bool:
        """Whether the generation thread is running."""
        return self._thread.is_alive()

    def counts(self) -> EngineCounts:
        return EngineCounts(
            self._num_running,
            len(self._waiting) + sum(job.num_open for job in self._held),
            self._num_prompt_tokens,
            self._num_generated_tokens,
            self._cache.num_slots * self._cache.length / self.limits.max_cache_tokens,
            self._num_preemptions,
            self._num_cached_tokens,
        )

    @property
    def _num_running(self) -> int:
        """Running sequences, of which a branch may have several."""
        return sum(len(branch.members) for branch in self._running)

    def _running_members(self) -> list[_Member]:
        return [member for branch in self._running for member in branch.members]

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
        return self._call(self._drop_caches)

    def reload(self, folder: Path, *, version: str | None) -> Future[None]:
        """Load the weights of a checkpoint and discard all caches.

        The future raises `ConfigError` if the checkpoint is not one of the model; the weights are
        then unchanged. Without a `version`, that of the new weights is unknown.
        """

        def replace() -> None:
            replace_weights(self.model, folder)
            self.weight_version = version
            self._drop_caches()

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
            self._step()
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
        return not self._is_paused and bool(self._running or self._waiting)

    def _take(self, job: Job) -> None:
        if self._pauses:
            self._held.append(job)
            return
        request = job.request
        for index in range(request.num_completions):
            completion = Completion(request, index, random.Random(self._seed_of(request, index)))
            job.completions.append(completion)
            self._waiting.append((job, completion))
        self._num_prompt_tokens += len(request.prompt_ids)

    def _seed_of(self, request: PromptRequest, index: int) -> int:
        if request.seed is None:
            return self._seeds.getrandbits(64)
        # `Random` drops the sign, so that -1 and 1 would be the same seed.
        return (request.seed + index) % 2**64

    def _pause(self, mode: PauseMode, paused: Future[None]) -> None:
        if mode == "abort":
            self._abort([job for job, _ in (*self._running_members(), *self._waiting)])
        self._pauses.append(paused)
        if mode != "wait" or self._is_paused:
            self._is_paused = True
            self._end_pauses()

    def _resume(self) -> None:
        self._is_paused = False
        self._end_pauses()

    def _end_waiting_pauses(self) -> None:
        """Pause, if pauses wait for requests and all of these have ended, in whatever way."""
        if self._pauses and not (self._running or self._waiting):
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
        for job, completion in self._remove(jobs):
            _finish(job, completion, "abort")

    def _remove(self, jobs: Iterable[Job]) -> list[_Member]:
        """Take requests out of the engine; return their open completions."""
        removed = {id(job) for job in jobs}
        self._held = [job for job in self._held if id(job) not in removed]
        entries = [each for each in self._waiting if id(each[0]) in removed]
        self._waiting = deque(each for each in self._waiting if id(each[0]) not in removed)
        entries += [each for each in self._running_members() if id(each[0]) in removed]
        kept = (
            [each for each in branch.members if id(each[0]) not in removed]
            for branch in self._running
        )
        self._place([[_Branch(members)] if members else [] for members in kept])
        return entries

    def _end_failed(self, jobs: Iterable[Job]) -> None:
        """End requests whose `error` is set; other requests go on."""
        failed = {id(job): job for job in jobs}
        self._remove(failed.values())
        self._cache.replace_nan()
        for job in failed.values():
            job.on_done(job)

    def _fail_all(self, error: Exception) -> None:
        open_entries = (*self._running_members(), *self._starting, *self._waiting)
        jobs = {id(job): job for job, _ in open_entries}
        jobs |= {id(job): job for job in self._held}
        self._running, self._starting, self._held = [], [], []
        self._waiting.clear()
        self._cache.clear()
        self._prefixes.clear()
        for job in jobs.values():
            job.error = error
            job.on_done(job)

    def _drop_caches(self) -> None:
        self._prefixes.clear()
        if not self._running:
            self._cache.clear()
            return
        self._waiting.extendleft(reversed(self._running_members()))
        self._running = []
        self._cache.erase()

    def _step(self) -> None:
        """Generate one token for each running sequence and start waiting ones."""
        self._make_room()
        starts = self._admit()
        packed = PackedTokens()
        for branch in self._running:
            packed.add_running(branch.last_token, branch.num_tokens - 1)
        for slot, start in enumerate(starts, len(self._running)):
            packed.add_start(slot, start.tokens, num_cached=self._load_prefix(slot, start))
        logits, scored = _forward(self.model, self._cache, packed, starts)
        self._running += starts
        self._starting = []
        _keep_prompt_logprobs(starts, scored)
        self._sample(logits)

    def _make_room(self) -> None:
        """Return the newest sequences to the queue while the caches would exceed their limit.

        Any sequence may need a slot of its own after this step.
        """
        while self._running:
            num_sequences = self._num_running
            length = max(branch.num_tokens for branch in self._running)
            if num_sequences == 1 or self._fits(num_sequences, length):
                self._reserve(num_sequences, length)
                return
            newest = self._running[-1].members
            self._waiting.appendleft(newest.pop())
            if not newest:
                self._running.pop()
            self._num_preemptions += 1

    def _fits(self, num_slots: int, length: int) -> bool:
        return self._cache.padded_size(num_slots, length) <= self.limits.max_cache_tokens

    def _admit(self) -> list[_Branch]:
        """Take sequences that fit from the queue; those with the same tokens are a branch."""
        starts: dict[tuple[bool, tuple[int, ...]], _Branch] = {}
        num_slots, num_new = self._num_running, 0
        length = max((branch.num_tokens for branch in self._running), default=0)
        while self._waiting and num_slots < self.limits.max_num_seqs:
            job, completion = self._waiting[0]
            tokens = tuple(completion.all_ids)
            longest = max(length, len(tokens))
            if num_slots and not self._fits(num_slots + 1, longest):
                break
            # Cached tokens are computed too if their logprobs are requested.
            key = job.wants_prompt_logprobs, tokens
            num_cached = 0 if job.wants_prompt_logprobs else self._prefixes.length(tokens)
            adds = 0 if key in starts else len(tokens) - num_cached
            if starts and num_new + adds > self.limits.max_new_tokens:
                break
            self._starting.append(self._waiting.popleft())
            starts.setdefault(key, _Branch([])).members.append((job, completion))
            num_slots, length, num_new = num_slots + 1, longest, num_new + adds
        if starts:
            self._reserve(num_slots, length)
        return list(starts.values())

    def _reserve(self, num_slots: int, length: int) -> None:
        self._prefixes.shrink(self._prefix_limit(self._cache.padded_size(num_slots, length)))
        self._cache.reserve(num_slots, length)

    def _prefix_limit(self, reserved: int = 0) -> int:
        """Return the tokens of finished sequences to keep: at most a half, and what others leave.

        `reserved`: Tokens that running sequences are about to have.
        """
        limit = self.limits.max_cache_tokens
        used = max(reserved, self._cache.num_slots * self._cache.length)
        return max(0, min(limit - used, limit // 2))

    def _load_prefix(self, slot: int, start: _Branch) -> int:
        """Copy the caches of the tokens that a finished sequence has too; return their number."""
        if _wants_prompt_logprobs(start):
            return 0
        found = self._prefixes.find(start.tokens)
        if found is None:
            return 0
        self._cache.load(slot, found.caches, found.length)
        self._num_cached_tokens += found.length
        return found.length

    def _save_prefix(self, slot: int, completion: Completion) -> None:
        """Keep the caches of a finished sequence; of several completions of a prompt, the first."""
        if not self.keeps_prefixes or completion.index or not completion.tokens:
            return
        length = completion.num_tokens - 1  # the last token was sampled, not computed
        room, cost = self._prefix_limit(), length + self.limits.state_tokens
        if cost <= room:
            self._prefixes.shrink(room - cost)
            caches = self._cache.save(slot, length)
            self._prefixes.add(completion.all_ids[:length], caches, cost=cost)

    def _sample(self, logits_BV: torch.Tensor) -> None:
        """Append one token to each running sequence, finish those that end, split the branches."""
        slots = [slot for slot, branch in enumerate(self._running) for _ in branch.members]
        completions = [completion for _, completion in self._running_members()]
        logits_MV = logits_BV[torch.tensor(slots, device=logits_BV.device)]
        rows = sample_rows(
            constrain(logits_MV, [each.grammar for each in completions]),
            [each.request.sampling for each in completions],
            [each.past for each in completions],
            [each.generator for each in completions],
            num_top=max(each.request.num_top for each in completions),
            is_processed=self._is_processed,
        )
        finished: list[tuple[Job, Completion, str]] = []
        failed: list[Job] = []
        successors: list[dict[int, _Branch]] = [{} for _ in self._running]
        members = zip(slots, self._running_members(), strict=True)
        for row, (slot, (job, completion)) in enumerate(members):
            if completion.request.max_tokens > 0:
                problem = completion.problem_of(rows.logprobs[row])
                if problem is None:
                    self._append(completion, rows, row)
                else:
                    job.error = InferenceError(problem)
            if job.error is not None:
                failed.append(job)
                continue
            reason = self._reason_to_finish(job, completion)
            if reason is not None:
                self._save_prefix(slot, completion)
                finished.append((job, completion, reason))
                continue
            branch = successors[slot].setdefault(completion.tokens[-1], _Branch([]))
            branch.members.append((job, completion))
            if job.on_token is not None:
                job.on_token(completion)
        self._place([list(branches.values()) for branches in successors])
        for entry in finished:
            _finish(*entry)
        if failed:
            self._end_failed(failed)

    def _append(self, completion: Completion, rows: SampledRows, row: int) -> None:
        num_top = completion.request.num_top
        top: TopEntries = []
        if num_top:
            pairs = zip(rows.top_tokens[row], rows.top_logprobs[row], strict=True)
            top = list(pairs)[:num_top]
        completion.append(rows.tokens[row], rows.logprobs[row], top, self.weight_version)
        self._num_generated_tokens += 1

    def _reason_to_finish(self, job: Job, completion: Completion) -> str | None:
        request = completion.request
        if completion.tokens and completion.tokens[-1] in request.stop_ids:
            completion.stop_reason = completion.tokens[-1]
            return "stop"
        if job.find_stop is not None and (text := job.find_stop(completion)) is not None:
            completion.stop_reason = text
            return "stop"
        is_full = completion.num_tokens >= self.limits.max_model_len
        return "length" if is_full or len(completion.tokens) >= request.max_tokens else None

    def _place(self, successors: Sequence[Sequence[_Branch]]) -> None:
        """Give each branch one of the first slots, with its caches.

        `successors`: For each slot in use, the branches whose caches are in it; often one, several
        where a branch was split, none where all sequences have ended.
        """
        count = sum(map(len, successors))
        placed: dict[int, _Branch] = {}
        moving: list[tuple[int, _Branch]] = []
        for slot, branches in enumerate(successors):
            for branch in branches:
                if slot < count and slot not in placed:
                    placed[slot] = branch
                else:
                    moving.append((slot, branch))
        free = [slot for slot in range(count) if slot not in placed]
        length = max((branch.num_tokens for _, branch in moving), default=0)
        self._cache.copy([source for source, _ in moving], free, length=length)
        placed |= {slot: branch for slot, (_, branch) in zip(free, moving, strict=True)}
        self._running = [placed[slot] for slot in range(count)]
        if not self._running:
            self._cache.clear()


def _finish(job: Job, completion: Completion, reason: str) -> None:
    completion.finish_reason = reason
    if job.on_token is not None:
        job.on_token(completion)
    job.num_open -= 1
    if job.num_open == 0:
        job.on_done(job)


def _forward(
    model: Any, cache: SlotCache, packed: PackedTokens, starts: Sequence[_Branch]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the logits (B, V) of all branches, and of each start's prompt if requested."""
    rows = list(range(packed.num_running))
    scored_rows: list[int] = []
    for start, new in zip(starts, packed.starts, strict=True):
        rows.append(new.first + new.length - 1)
        if _wants_prompt_logprobs(start):
            scored_rows += range(new.first, new.first + new.length - 1)
    batch = PackedBatch(packed, cache)
    logits = model(
        input_ids=batch.tokens_N.unsqueeze(0),
        position_ids=batch.positions_N.unsqueeze(0),
        use_cache=False,
        logits_to_keep=torch.tensor(rows + scored_rows, device=cache.device),
        batch=batch,
    ).logits[0]
    if cache.device.type == "mps":  # without float64, which sampling needs
        logits = logits.cpu()
    scored: list[torch.Tensor | None] = []
    first = len(rows)
    for start in starts:
        count = start.num_tokens - 1 if _wants_prompt_logprobs(start) else 0
        scored.append(logits[first : first + count] if count else None)
        first += count
    return logits[: len(rows)], scored


def _wants_prompt_logprobs(start: _Branch) -> bool:
    return start.num_tokens > 1 and any(job.wants_prompt_logprobs for job, _ in start.members)


def _keep_prompt_logprobs(starts: Sequence[_Branch], scored: Sequence[torch.Tensor | None]) -> None:
    for start, logits_PV in zip(starts, scored, strict=True):
        for job, _ in start.members:
            if job.request.prompt_top is None or job.prompt_logprobs is not None:
                continue
            job.prompt_logprobs = (
                [] if logits_PV is None
                else _prompt_entries(logits_PV, start.tokens, job.request.prompt_top)
            )  # fmt: skip
            if any(math.isnan(logprob) for logprob, _ in job.prompt_logprobs):
                job.error = InferenceError(_NOT_FINITE)


def _prompt_entries(
    logits_PV: torch.Tensor, tokens: Sequence[int], num_top: int
) -> list[tuple[float, TopEntries]]:
    """Return the logprob and the most likely tokens at the positions after the first."""
    targets_P1 = torch.tensor(tokens[1:], device=logits_PV.device).unsqueeze(1)
    parts = zip(logits_PV.split(_SCORED_ROWS), targets_P1.split(_SCORED_ROWS), strict=True)
    return [entry for part in parts for entry in _entries_of_part(*part, num_top)]


def _entries_of_part(
    logits_PV: torch.Tensor, targets_P1: torch.Tensor, num_top: int
) -> list[tuple[float, TopEntries]]:
    logprobs_PV = torch.log_softmax(logits_PV.float(), dim=-1)
    chosen = logprobs_PV.gather(1, targets_P1).squeeze(1).tolist()
    if not num_top:
        return [(value, []) for value in chosen]
    top = logprobs_PV.topk(min(num_top, logprobs_PV.shape[1]), dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    tops = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return list(zip(chosen, tops, strict=True))
