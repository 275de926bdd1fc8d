"""Caches of finished sequences, for requests that begin with the same tokens.

A conversation sends its earlier turns again with every request. Their keys and values are copied,
and only the tokens after them are computed:

    finished     system, question, answer                      saved
    request      system, question, answer, next question       computed: the next question

Sequences are found by the hashes of their blocks of tokens, each of which includes the blocks
before it, and compared token by token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from example_trainer.torch_engine.attention import SavedSlot

__all__ = ["FoundPrefix", "PrefixPool"]

_BLOCK = 16
"""Tokens of a block; fewer tokens in common are computed again."""


@dataclass(frozen=True, eq=False)
class _SavedSequence:
    """The caches of a finished sequence."""

    tokens: tuple[int, ...]
    """[C]"""
    caches: SavedSlot


class FoundPrefix(NamedTuple):
    """The beginning that a request shares with a saved sequence."""

    caches: SavedSlot
    length: int
    """Number of its tokens."""


class PrefixPool:
    """Saved sequences, of which the ones that were not used for the longest time are removed."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, _SavedSequence] = OrderedDict()
        """The one used last is the last."""
        self._by_block: dict[int, dict[int, _SavedSequence]] = {}
        """Sequences that have a block, the newest last."""
        self.num_tokens = 0
        """Of all sequences."""

    def add(self, tokens: Sequence[int], caches: SavedSlot) -> None:
        """Keep a sequence, in place of one that it continues."""
        earlier = self._longest(tokens)
        if earlier is not None and earlier.tokens == tuple(tokens[: len(earlier.tokens)]):
            self._remove(earlier)
        sequence = _SavedSequence(tuple(tokens), caches)
        self._sequences[id(sequence)] = sequence
        for key in _block_keys(sequence.tokens):
            self._by_block.setdefault(key, {})[id(sequence)] = sequence
        self.num_tokens += len(sequence.tokens)

    def find(self, tokens: Sequence[int]) -> FoundPrefix | None:
        """Return the longest beginning of `tokens` that is found, without the last token."""
        sequence = self._longest(tokens)
        length = 0 if sequence is None else _common_length(sequence.tokens, tuple(tokens[:-1]))
        if sequence is None or length < _BLOCK:
            return None
        self._sequences.move_to_end(id(sequence))
        return FoundPrefix(sequence.caches, length)

    def length(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens that `find` finds."""
        found = self.find(tokens)
        return 0 if found is None else found.length

    def shrink(self, max_tokens: int) -> None:
        """Remove sequences until they have at most `max_tokens` tokens."""
        while self.num_tokens > max_tokens:
            self._remove(next(iter(self._sequences.values())))

    def clear(self) -> None:
        self._sequences.clear()
        self._by_block.clear()
        self.num_tokens = 0

    def _longest(self, tokens: Sequence[int]) -> _SavedSequence | None:
        found = None
        for key in _block_keys(tokens):
            sequences = self._by_block.get(key)
            if sequences is None:
                break
            found = next(reversed(sequences.values()))
        return found

    def _remove(self, sequence: _SavedSequence) -> None:
        del self._sequences[id(sequence)]
        for key in _block_keys(sequence.tokens):
            sequences = self._by_block[key]
            del sequences[id(sequence)]
            if not sequences:
                del self._by_block[key]
        self.num_tokens -= len(sequence.tokens)


def _block_keys(tokens: Sequence[int]) -> Iterator[int]:
    key = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        key = hash((key, tuple(tokens[end - _BLOCK : end])))
        yield key


def _common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the number of equal tokens at the beginning, by comparing ever smaller slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
