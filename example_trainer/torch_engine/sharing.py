"""Caches that a starting sequence copies from another one, instead of computing them.

    waiting      instructions, question          the longest known beginning of its tokens, in
    running      instructions, question  ──────► the slot of a sequence that runs,
    finished     instructions, question  ──────► or saved when a sequence ended

A sequence that has more in common with one that starts in the same step waits for the next step,
in which that one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from example_trainer.torch_engine.attention import SavedSlot, SlotCache
from example_trainer.torch_engine.jobs import Completion, PromptRequest
from example_trainer.torch_engine.prefixes import PrefixPool, common_length

__all__ = ["SharedCaches"]

_AWAITED_TOKENS = 64
"""A sequence waits a step for one that starts if it has this many more tokens from that one."""

_Value = TypeVar("_Value")


class _KnownPrefix(NamedTuple):
    """The beginning of a sequence whose caches are known; at most one of the sources is set."""

    length: int
    """Number of its tokens."""
    saved: SavedSlot | None = None
    """Caches of a finished sequence."""
    slot: int | None = None
    """Slot of a running sequence."""


class SharedCaches:
    """Finds, copies and saves the caches of beginnings that several sequences have.

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
        self._finished = PrefixPool(whole=state_tokens > 0)
        self._running: Sequence[PromptRequest] = ()
        """By slot."""
        self._slots: dict[int, int] = {}
        """Slots of running sequences by the keys of their prompts."""
        self._starting: dict[int, PromptRequest] = {}
        """Sequences that start in this step by the keys of their prompts."""

    @property
    def cost(self) -> int:
        """Memory of the saved caches, in tokens."""
        return self._finished.cost

    @property
    def _shares_prompts(self) -> bool:
        """Whether the caches of running sequences are used; states are those of the last token."""
        return self.is_enabled and not self._state_tokens

    def begin_step(self, running: Sequence[PromptRequest]) -> None:
        """Look at the running sequences, by slot, in a step that starts others."""
        self._starting = {}
        if self._shares_prompts:
            self._running = running
            self._slots = {
                key: slot for slot, request in enumerate(running) for key in request.block_keys
            }

    def known_length(self, completion: Completion) -> int:
        """Return the number of tokens of a sequence whose caches need not be computed."""
        return self._find(completion).length

    def should_wait(self, completion: Completion, num_known: int) -> bool:
        """Whether a sequence that starts in this step has many more than the known tokens."""
        other = _longest_match(completion, self._starting)
        return other is not None and (
            _shared_length(completion, other) >= num_known + _AWAITED_TOKENS
        )

    def note_start(self, request: PromptRequest) -> None:
        """Let sequences with more of these tokens wait for the next step."""
        if self._shares_prompts:
            self._starting.update(dict.fromkeys(request.block_keys, request))

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
        length = completion.num_tokens - 1  # the last token was sampled, not computed
        room, cost = self._room(), length + self._state_tokens
        if cost <= room:
            self._finished.shrink(room - cost)
            caches = self._cache.save(slot, length)
            self._finished.add(completion.identity_ids[:length], caches, cost=cost)

    def make_room(self, num_tokens: int) -> None:
        """Discard saved caches, so that running sequences can have this many tokens."""
        self._finished.shrink(self._room(num_tokens))

    def clear(self) -> None:
        """Discard the saved caches."""
        self._finished.clear()

    def _room(self, reserved: int = 0) -> int:
        """Return the tokens of finished sequences to keep: at most a half, and what others leave.

        `reserved`: Tokens that running sequences are about to have.
        """
        used = max(reserved, self._cache.num_slots * self._cache.length)
        return max(0, min(self._max_tokens - used, self._max_tokens // 2))

    def _find(self, completion: Completion) -> _KnownPrefix:
        """Return the longest known beginning of a sequence, with whole images."""
        found = self._finished.find(completion.identity_ids)
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
