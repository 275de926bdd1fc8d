"""Caches that a starting sequence copies from another one, instead of computing them.

    waiting      instructions, question          the longest known beginning of its tokens, in
    running      instructions, question  ──────► the slot of a sequence that runs,
    ended        instructions, question  ──────► or saved when a sequence ended

A sequence that has more in common with one that starts in the same step waits for the next step,
in which that one runs.

Recurrent layers have the states after the last token only, so that a running sequence cannot be
copied. A sequence that begins like an earlier one is computed in two parts, and the states between
them are saved for those that begin so too.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from example_trainer.torch_engine.attention import NewTokens, SavedSlot, SlotCache
from example_trainer.torch_engine.jobs import Completion, PromptRequest
from example_trainer.torch_engine.prefixes import BLOCK_TOKENS, PrefixPool, common_length

__all__ = ["SharedCaches"]

_AWAITED_TOKENS = 64
"""A sequence waits a step for one that starts if it has this many more tokens from that one.

With recurrent layers, a beginning is saved if it has this many more tokens than are known.
"""
_RECENT_BLOCKS = 1 << 16
"""Blocks of earlier prompts that are recognized, with recurrent layers."""

_Value = TypeVar("_Value")


class _KnownPrefix(NamedTuple):
    """The beginning of a sequence whose caches are known; at most one of the sources is set."""

    length: int
    """Number of its tokens."""
    saved: SavedSlot | None = None
    """Caches of a sequence that ended, or of a beginning."""
    slot: int | None = None
    """Slot of a running sequence."""


class SharedCaches:
    """Finds, copies and saves the caches of beginnings that several sequences have.

    A step of the engine calls its methods in this order:

        for each waiting sequence    begin_step (once), known_length, should_wait, note_start
        for each starting one        load, beginning_to_keep
        after the forward pass       end_step; save, for each sequence that ends

    Attributes:
        is_enabled: Whether caches are shared.
        num_copied_tokens: Tokens whose caches were copied so far.
    """

    def __init__(
        self, cache: SlotCache, *, is_enabled: bool, max_tokens: int, state_tokens: int
    ) -> None:
        """`max_tokens` and `state_tokens`: as in `EngineLimits`, of all caches."""
        self.is_enabled = is_enabled
        self.num_copied_tokens = 0
        self._cache = cache
        self._max_tokens = max_tokens
        self._state_tokens = state_tokens
        self._saved = PrefixPool(whole=state_tokens > 0)
        self._running: Sequence[PromptRequest] = ()
        """By slot."""
        self._slots: dict[int, int] = {}
        """Slots of running sequences by the keys of their prompts."""
        self._starting: dict[int, PromptRequest] = {}
        """Sequences that start in this step by the keys of their prompts."""
        self._recent: OrderedDict[int, None] = OrderedDict()
        """Keys of prompts that started before; the newest is the last."""
        self._kept_lengths: dict[int, int] = {}
        """Beginnings to keep in this step, by the identity of the request."""

    @property
    def cost(self) -> int:
        """Memory of the saved caches, in tokens."""
        return self._saved.cost

    @property
    def _has_states(self) -> bool:
        """Whether there are recurrent layers, so that running sequences cannot be copied."""
        return self._state_tokens > 0

    def begin_step(self, running: Sequence[PromptRequest]) -> None:
        """Look at the running sequences, by slot, in a step that starts others."""
        if self.is_enabled and not self._has_states:
            self._running = running
            self._slots = {
                key: slot for slot, request in enumerate(running) for key in request.block_keys
            }

    def known_length(self, completion: Completion) -> int:
        """Return the number of tokens of a sequence whose caches need not be computed."""
        return self._find(completion).length

    def should_wait(self, completion: Completion, num_known: int, *, reserved: int) -> bool:
        """Whether a sequence that starts in this step has many more than the known tokens.

        `reserved`: Tokens that running sequences are about to have.
        """
        other = _longest_match(completion, self._starting)
        shared = 0 if other is None else _shared_length(completion, other)
        if other is None or shared < num_known + _AWAITED_TOKENS:
            return False
        if not self._has_states:
            return True
        if shared == len(other.prompt_ids):
            shared -= 1  # its last token is computed after those that are kept
        if not self._can_keep(shared, reserved=reserved):
            return False
        self._kept_lengths[id(other)] = max(shared, self._kept_lengths.get(id(other), 0))
        return True

    def note_start(self, completion: Completion, num_known: int) -> None:
        """Let sequences with more of these tokens wait for the next step."""
        if not self.is_enabled:
            return
        request = completion.request
        self._starting.update(dict.fromkeys(request.block_keys, request))
        if self._has_states:
            blocks = itertools.takewhile(self._recent.__contains__, request.block_keys)
            length = min(BLOCK_TOKENS * sum(1 for _ in blocks), completion.num_tokens - 1)
            length = completion.whole_length(length)
            if length >= num_known + _AWAITED_TOKENS and self._can_keep(length):
                self._kept_lengths[id(request)] = length
            self._note_recent(request.block_keys)

    def _note_recent(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._recent[key] = None
            self._recent.move_to_end(key)
        while len(self._recent) > _RECENT_BLOCKS:
            self._recent.popitem(last=False)

    def beginning_to_keep(self, completion: Completion, num_cached: int) -> int:
        """Return the number of first tokens to keep of a sequence that starts; 0: none.

        `num_cached`: Tokens whose caches were copied.
        """
        length = self._kept_lengths.get(id(completion.request), 0)
        return length if num_cached < length < completion.num_tokens else 0

    def end_step(self, started: Iterable[tuple[NewTokens, Completion]]) -> None:
        """Keep the caches of first tokens, after the forward pass that started the sequences."""
        for new, completion in started:
            if new.kept_at:
                self._save(new.slot, completion, new.kept_at, is_beginning=True)
        self._forget_step()

    def _forget_step(self) -> None:
        """Release the requests, whose images take memory, and the states between two parts."""
        self._running, self._slots, self._starting, self._kept_lengths = (), {}, {}, {}
        self._cache.states.drop_kept()

    def load(self, slot: int, completion: Completion) -> int:
        """Copy the caches of the longest known beginning; return its number of tokens."""
        known = self._find(completion)
        if known.saved is not None:
            self._cache.load(slot, known.saved, known.length)
        elif known.slot is not None:
            self._cache.copy([known.slot], [slot], length=known.length)
        self.num_copied_tokens += known.length
        return known.length

    def save(self, slot: int, completion: Completion) -> None:
        """Keep the caches of a finished sequence; of several completions of a prompt, the first."""
        if not self.is_enabled or completion.index or not completion.tokens:
            return
        self._save(slot, completion, completion.num_tokens - 1)  # the last one was not computed

    def _save(
        self, slot: int, completion: Completion, length: int, *, is_beginning: bool = False
    ) -> None:
        if self._can_keep(length):
            cost = length + self._state_tokens
            self._saved.shrink(self._room() - cost)
            caches = self._cache.save(slot, length, is_beginning=is_beginning)
            self._saved.add(completion.identity_ids[:length], caches, cost=cost)

    def make_room(self, num_tokens: int) -> None:
        """Discard saved caches, so that running sequences can have this many tokens."""
        self._saved.shrink(self._room(num_tokens))

    def clear(self) -> None:
        """Discard the saved caches."""
        self._saved.clear()
        self._recent.clear()
        self._forget_step()

    def _room(self, reserved: int = 0) -> int:
        """Return the tokens whose caches may be saved: at most a half, and what others leave.

        `reserved`: Tokens that running sequences are about to have.
        """
        used = max(reserved, self._cache.num_slots * self._cache.length)
        return max(0, min(self._max_tokens - used, self._max_tokens // 2))

    def _can_keep(self, length: int, *, reserved: int = 0) -> bool:
        return length + self._state_tokens <= self._room(reserved)

    def _find(self, completion: Completion) -> _KnownPrefix:
        """Return the longest known beginning of a sequence, with whole images."""
        found = self._saved.find(completion.identity_ids)
        known = _KnownPrefix(0)
        if found is not None:
            known = _KnownPrefix(completion.whole_length(found.length), found.caches)
        slot = _longest_match(completion, self._slots)
        if slot is not None:
            length = _shared_length(completion, self._running[slot])
            if length > known.length:
                known = _KnownPrefix(length, slot=slot)
        return known


def _longest_match(completion: Completion, known: Mapping[int, _Value]) -> _Value | None:
    """Return the value of the last block of the prompt that is known, with those before it."""
    found = None
    for key in completion.request.block_keys:
        if key not in known:
            break
        found = known[key]
    return found


def _shared_length(completion: Completion, other: PromptRequest) -> int:
    """Return the number of tokens that a sequence has in common with a prompt.

    Its last token is always computed, and images as a whole.
    """
    length = common_length(other.identity_ids, tuple(completion.identity_ids[:-1]))
    return completion.whole_length(length)
