"""Saved caches of sequences, for requests that begin with the same tokens.

A conversation sends its earlier turns again with every request. Their keys and values are copied,
and only the tokens after them are computed:

    finished     system, question, answer                      saved
    request      system, question, answer, next question       computed: the next question

With recurrent layers, whose states are those after the last token, a request has to continue all
tokens of a sequence.

Sequences are found by the hashes of their blocks of tokens, each of which includes the blocks
before it, and compared token by token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from example_trainer.torch_engine.attention import SavedSlot

__all__ = ["BLOCK_TOKENS", "FoundPrefix", "PrefixPool", "block_keys", "common_length"]

BLOCK_TOKENS = 16
"""Tokens of a block; fewer tokens in common are computed again."""


@dataclass(frozen=True, eq=False)
class _SavedSequence:
    """The caches of a finished sequence."""

    tokens: tuple[int, ...]
    """[C]"""
    caches: SavedSlot
    cost: int
    """Memory, in tokens."""


class FoundPrefix(NamedTuple):
    """The beginning that a request shares with a saved sequence."""

    caches: SavedSlot
    length: int
    """Number of its tokens."""


class PrefixPool:
    """Saved sequences, of which the ones that were not used for the longest time are removed.

    `whole`: Whether a request has to continue a sequence as a whole, as with recurrent layers,
    whose states are those after its last token.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._sequences: OrderedDict[int, _SavedSequence] = OrderedDict()
        """The one used last is the last."""
        self._by_block: dict[int, dict[int, _SavedSequence]] = {}
        """Sequences that have a block, or end with it if they are used as a whole; newest last."""
        self.cost = 0
        """Memory of all sequences, in tokens."""

    def add(self, tokens: Sequence[int], caches: SavedSlot, *, cost: int) -> None:
        """Keep a sequence, in place of one that can be used for the same requests only."""
        sequence = _SavedSequence(tuple(tokens), caches, cost)
        earlier = self._longest(sequence.tokens)
        if earlier is not None and earlier.tokens == (
            sequence.tokens if self._whole else sequence.tokens[: len(earlier.tokens)]
        ):
            self._remove(earlier)
        self._sequences[id(sequence)] = sequence
        for key in self._keys_of(sequence):
            self._by_block.setdefault(key, {})[id(sequence)] = sequence
        self.cost += cost

    def find(self, tokens: Sequence[int]) -> FoundPrefix | None:
        """Return the longest beginning of `tokens` that is found, without the last token."""
        wanted = tuple(tokens[:-1])
        sequence = self._longest(wanted)
        length = 0 if sequence is None else common_length(sequence.tokens, wanted)
        if sequence is None or length < BLOCK_TOKENS:
            return None
        self._sequences.move_to_end(id(sequence))
        return FoundPrefix(sequence.caches, length)

    def shrink(self, max_cost: int) -> None:
        """Remove sequences until they take at most `max_cost`."""
        while self.cost > max_cost:
            self._remove(next(iter(self._sequences.values())))

    def clear(self) -> None:
        self._sequences.clear()
        self._by_block.clear()
        self.cost = 0

    def _longest(self, tokens: tuple[int, ...]) -> _SavedSequence | None:
        found = None
        for key in block_keys(tokens):
            sequences = self._by_block.get(key, {})
            if self._whole:
                ends = (each for each in sequences.values() if _begins_with(tokens, each.tokens))
                found = max(ends, key=lambda each: len(each.tokens), default=found)
            elif sequences:
                found = next(reversed(sequences.values()))
            else:
                break
        return found

    def _keys_of(self, sequence: _SavedSequence) -> list[int]:
        keys = list(block_keys(sequence.tokens))
        return keys[-1:] if self._whole else keys

    def _remove(self, sequence: _SavedSequence) -> None:
        del self._sequences[id(sequence)]
        for key in self._keys_of(sequence):
            sequences = self._by_block[key]
            del sequences[id(sequence)]
            if not sequences:
                del self._by_block[key]
        self.cost -= sequence.cost


def block_keys(tokens: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each whole block, which depends on the blocks before it too."""
    key = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        key = hash((key, tuple(tokens[end - BLOCK_TOKENS : end])))
        yield key


def _begins_with(tokens: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    return tokens[: len(beginning)] == beginning


def common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the number of equal tokens at the beginning, by comparing ever smaller slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
