"""Continuous batching: all running sequences get one token in each step, waiting ones start.

    add ─► waiting ─► running (slots of the cache) ─► finished
              ▲             │
              └─────────────┘  the caches are full, or the weights were replaced: the caches of
                               prompt and completion are computed again

Completions of one prompt often begin with the same tokens. Until they sample different ones, they
are a branch, which has one slot and is computed once:

    slot 0: 7 + 1 =   ─►   slot 0: 7 + 1 = 8      (5 of 8 completions)
                           slot 1: 7 + 1 = 9      (3 completions, with a copy of the caches)

A prompt that begins like one that runs gets a copy of its caches; see `sharing`.

transformers' own continuous batching has one set of sampling settings for all requests, no most
likely tokens or prompt logprobs, and keeps caches of old weights; see also `attention`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from atroposlib.errors import InferenceError
from example_trainer.torch_engine.attention import (
    PackedBatch,
    PackedTokens,
    SlotCache,
)
from example_trainer.torch_engine.grammars import constrain
from example_trainer.torch_engine.images import encoder_outputs
from example_trainer.torch_engine.jobs import (
    NOT_FINITE,
    Completion,
    Job,
    TopEntries,
)
from example_trainer.torch_engine.sampling import SampledRows, sample_rows
from example_trainer.torch_engine.sharing import SharedCaches

_SCORED_ROWS = 256
"""Tokens of a prompt whose logprobs are computed at a time, which bounds the memory."""


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


Member = tuple[Job, Completion]


class _Branch(NamedTuple):
    """Sequences that have the same tokens so far, at least one."""

    members: list[Member]

    @property
    def completion(self) -> Completion:
        return self.members[0][1]

    @property
    def tokens(self) -> list[int]:
        return self.completion.all_ids

    @property
    def last_token(self) -> int:
        return self.completion.tokens[-1]

    @property
    def num_tokens(self) -> int:
        return self.completion.num_tokens


class SequenceBatch:
    """The sequences that run and wait; only one thread uses it.

    Attributes:
        model: Its attention uses the caches of the batch.
        limits: Sizes of the batch.
        shared: Caches that sequences have from others which begin with the same tokens.
        weight_version: Version of the weights in use; None if unknown.
        num_generated_tokens: Tokens that were sampled so far.
        num_preemptions: Sequences that returned to the queue because the caches were full.
    """

    def __init__(
        self,
        model: Any,
        limits: EngineLimits,
        *,
        is_processed: bool,
        keeps_prefixes: bool,
        weight_version: str | None,
        image_token_id: int | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self.weight_version = weight_version
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self._is_processed = is_processed
        self._image_token_id = image_token_id
        self._cache = SlotCache(device=next(model.parameters()).device, dtype=model.dtype)
        self.shared = SharedCaches(
            self._cache,
            is_enabled=keeps_prefixes,
            max_tokens=limits.max_cache_tokens,
            state_tokens=limits.state_tokens,
        )
        self._waiting: deque[Member] = deque()
        self._running: list[_Branch] = []
        """The position is the slot in the cache."""
        self._starting: list[Member] = []
        """Taken from the queue in the current step."""

    @property
    def num_running(self) -> int:
        """Running sequences, of which a branch may have several."""
        return sum(len(branch.members) for branch in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not (self._running or self._waiting)

    @property
    def cache_use(self) -> float:
        """Part of `max_cache_tokens` that is reserved, 0 to 1."""
        return self._cache.num_slots * self._cache.length / self.limits.max_cache_tokens

    def jobs(self) -> list[Job]:
        """Return the requests that have sequences here, each once."""
        members = (*self._running_members(), *self._starting, *self._waiting)
        return list({id(job): job for job, _ in members}.values())

    def _running_members(self) -> list[Member]:
        return [member for branch in self._running for member in branch.members]

    def add(self, job: Job, completion: Completion) -> None:
        """Let a sequence wait for its start."""
        self._waiting.append((job, completion))

    def remove(self, jobs: Iterable[Job]) -> list[Member]:
        """Remove the sequences of requests, and return them."""
        removed = {id(job) for job in jobs}
        entries = [each for each in self._waiting if id(each[0]) in removed]
        self._waiting = deque(each for each in self._waiting if id(each[0]) not in removed)
        entries += [each for each in self._running_members() if id(each[0]) in removed]
        kept = (
            [each for each in branch.members if id(each[0]) not in removed]
            for branch in self._running
        )
        self._place([[_Branch(members)] if members else [] for members in kept])
        return entries

    def clear(self) -> list[Job]:
        """Remove everything after a failure; return the requests."""
        jobs = self.jobs()
        self._running, self._starting = [], []
        self._waiting.clear()
        self._cache.clear()
        self.shared.clear()
        return jobs

    def drop_caches(self) -> None:
        """Discard the caches; those of running sequences are computed again."""
        self.shared.clear()
        if not self._running:
            self._cache.clear()
            return
        self._waiting.extendleft(reversed(self._running_members()))
        self._running = []
        self._cache.erase()

    def step(self) -> None:
        """Generate one token for each running sequence and start waiting ones."""
        self._make_room()
        starts = self._admit()
        packed = PackedTokens()
        for branch in self._running:
            packed.add_running(branch.last_token, branch.num_tokens - 1)
        for slot, start in enumerate(starts, len(self._running)):
            num_cached = kept_at = 0
            if not _wants_prompt_logprobs(start):
                num_cached = self.shared.load(slot, start.completion)
                kept_at = self.shared.beginning_to_keep(start.completion, num_cached)
            packed.add_start(slot, start.tokens, num_cached=num_cached, kept_at=kept_at)
        logits, scored = _forward(
            self.model, self._cache, packed, starts, **self._image_inputs(packed, starts)
        )
        completions = [start.completion for start in starts]
        self.shared.save_beginnings(zip(packed.starts, completions, strict=True))
        self._running += starts
        self._starting = []
        _keep_prompt_logprobs(starts, scored)
        self._sample(logits)

    def _image_inputs(self, packed: PackedTokens, starts: Sequence[_Branch]) -> dict[str, Any]:
        """Return the arguments of a model that reads images, none for others."""
        if self._image_token_id is None:
            return {}
        parts = [
            branch.completion.positions(branch.num_tokens - 1, branch.num_tokens)
            for branch in self._running
        ]
        for start, new in zip(starts, packed.starts, strict=True):
            parts.append(start.completion.positions(new.num_cached, start.num_tokens))
        # The first of the four are those of the text.
        positions_4N = torch.cat([torch.tensor([packed.positions]), torch.cat(parts, dim=1)])
        images = (start.completion.request.images for start in starts)
        outputs = encoder_outputs(
            self.model,
            packed.tokens,
            list(zip(packed.starts, images, strict=True)),
            image_token_id=self._image_token_id,
        )
        return {"position_ids": positions_4N.unsqueeze(1).to(self._cache.device), **outputs}

    def _make_room(self) -> None:
        """Return the newest sequences to the queue while the caches would exceed their limit.

        Any sequence may need a slot of its own after this step.
        """
        while self._running:
            num_sequences = self.num_running
            length = max(branch.num_tokens for branch in self._running)
            if num_sequences == 1 or self._fits(num_sequences, length):
                self._reserve(num_sequences, length)
                return
            newest = self._running[-1].members
            self._waiting.appendleft(newest.pop())
            if not newest:
                self._running.pop()
            self.num_preemptions += 1

    def _fits(self, num_slots: int, length: int) -> bool:
        return self._cache.padded_size(num_slots, length) <= self.limits.max_cache_tokens

    def _admit(self) -> list[_Branch]:
        """Take sequences that fit from the queue; those with the same tokens are a branch."""
        starts: dict[tuple[bool, tuple[int, ...]], _Branch] = {}
        num_slots, num_new = self.num_running, 0
        length = max((branch.num_tokens for branch in self._running), default=0)
        while self._waiting and num_slots < self.limits.max_num_seqs:
            job, completion = self._waiting[0]
            tokens = tuple(completion.identity_ids)
            longest = max(length, len(tokens))
            reserved = self._cache.padded_size(num_slots + 1, longest)
            if num_slots and reserved > self.limits.max_cache_tokens:
                break
            if not starts:
                self.shared.begin_step([branch.completion.request for branch in self._running])
            # Cached tokens are computed too if their logprobs are requested.
            can_share = not job.wants_prompt_logprobs
            key = can_share, tokens
            num_known = self.shared.known_length(completion) if can_share else 0
            adds = 0 if key in starts else len(tokens) - num_known
            if starts and num_new + adds > self.limits.max_new_tokens:
                break
            if adds and can_share:
                if self.shared.should_wait(completion, num_known, reserved=reserved):
                    break
                self.shared.note_start(completion, num_known)
            self._starting.append(self._waiting.popleft())
            starts.setdefault(key, _Branch([])).members.append((job, completion))
            num_slots, length, num_new = num_slots + 1, longest, num_new + adds
        if starts:
            self._reserve(num_slots, length)
        return list(starts.values())

    def _reserve(self, num_slots: int, length: int) -> None:
        self.shared.make_room(self._cache.padded_size(num_slots, length))
        self._cache.reserve(num_slots, length)

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
                self.shared.save(slot, completion)
                finished.append((job, completion, reason))
                continue
            branch = successors[slot].setdefault(completion.tokens[-1], _Branch([]))
            branch.members.append((job, completion))
            if job.on_token is not None:
                job.on_token(completion)
        self._place([list(branches.values()) for branches in successors])
        for job, completion, reason in finished:
            job.end(completion, reason)
        if failed:
            self._end_failed(failed)

    def _append(self, completion: Completion, rows: SampledRows, row: int) -> None:
        num_top = completion.request.num_top
        top: TopEntries = []
        if num_top:
            pairs = zip(rows.top_tokens[row], rows.top_logprobs[row], strict=True)
            top = list(pairs)[:num_top]
        completion.append(rows.tokens[row], rows.logprobs[row], top, self.weight_version)
        self.num_generated_tokens += 1

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

    def _end_failed(self, jobs: Sequence[Job]) -> None:
        """End requests whose `error` is set; other requests go on."""
        self.remove(jobs)
        self._cache.replace_nan()
        for job in {id(job): job for job in jobs}.values():
            job.on_done(job)


def _forward(
    model: Any, cache: SlotCache, packed: PackedTokens, starts: Sequence[_Branch], **inputs: Any
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the logits (B, V) of all branches, and of each start's prompt if requested.

    `inputs`: Further arguments of the model; `position_ids` in place of those of text.
    """
    rows = list(range(packed.num_running))
    scored_rows: list[int] = []
    for start, new in zip(starts, packed.starts, strict=True):
        rows.append(new.first + new.length - 1)
        if _wants_prompt_logprobs(start):
            scored_rows += range(new.first, new.first + new.length - 1)
    batch = PackedBatch(packed, cache)
    logits = model(
        input_ids=batch.tokens_N.unsqueeze(0),
        use_cache=False,
        logits_to_keep=torch.tensor(rows + scored_rows, device=cache.device),
        batch=batch,
        **{"position_ids": batch.positions_N.unsqueeze(0), **inputs},
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
                job.error = InferenceError(NOT_FINITE)


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
