"""Prefix trees: equal beginnings of sequences become one row in which every token stands once.

    prompt a b | c d          row (1, M)   prompt a b c d e f
    prompt a b | e f    -->   depth        0      1 2 3 4 3 4       c d and e f are branches
    prompt a b | e f g                                        g     continues the branch e f

A group of G completions of R tokens after one prompt of P tokens takes `P + G * R` tokens instead
of `G * (P + R)`. The hidden state of a token depends on the tokens before it only, so that equal
prefixes have equal hidden states, and one row serves all sequences. Labels, advantages and logprobs
remain those of the single sequences: `nodes_T` names the token of the row, the node, that computes
each token of the concatenated sequences.

The row is in depth-first order: a token is followed by all of its descendants. A token attends to
itself and its ancestors, hence these rules for the attention:

- token q attends to token k if `k <= q < subtree_ends_M[k]`;
- a run of tokens without a branch between them attends to itself causally;
- all tokens that attend to one token of a run from outside form one range, after the run;
- a small subtree attends to itself under a mask, which costs less than a block for each branch.

Pure. `tree_attention` computes with the plan, `batch` decides which sequences share a row.

Shape suffixes: M tokens of the tree's row, T tokens of the concatenated sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

MIN_SHARED_TOKENS = 16
"""Shorter common parts are computed for each sequence: another block of attention costs more."""
SMALL_SUBTREE_TOKENS = 256
"""Up to this size, the attention in a subtree is one block, and any common part is shared."""


class AttentionBlock(NamedTuple):
    """A range of tokens that attends to a range of keys: causally, by a mask, or to all of them."""

    queries: slice
    keys: slice
    is_causal: bool
    """Whether both ranges are the same run."""
    mask_LL: torch.Tensor | None = None
    """(L, L) bool, whether a query attends to a key, if both ranges are the same small subtree."""


@dataclass(frozen=True)
class PrefixTree:
    """Sequences as one row, in depth-first order."""

    tokens_1M: torch.Tensor
    """(1, M) int64 inputs."""
    position_ids_1M: torch.Tensor
    """(1, M) int64 depth in the tree, the position in each sequence that contains the token."""
    subtree_ends_M: torch.Tensor
    """(M,) int64 index after the last descendant of each token."""
    nodes_T: torch.Tensor
    """(T,) int64 index in the row of each token of the concatenated sequences."""
    blocks: tuple[AttentionBlock, ...]
    """Blocks that contain each pair of a token and an ancestor or itself once. First those of runs
    and small subtrees with themselves, which contain each query once."""
    longest: int
    """Tokens of the longest sequence."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the row, M."""
        return int(self.tokens_1M.numel())

    def to(self, device: str | torch.device) -> PrefixTree:
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def num_tree_tokens(
    sequences: Sequence[Sequence[int]],
    *,
    min_shared: int = MIN_SHARED_TOKENS,
    max_small: int = SMALL_SUBTREE_TOKENS,
) -> int:
    """Return the tokens of the row that `build_prefix_tree` returns for these sequences."""
    lengths = sum(len(sequence) for sequence in sequences)
    return lengths - sum(_sorted_prefixes(sequences, min_shared, max_small).shared)


def in_tree_order(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the sequences in depth-first order: neighbors share the most."""
    return _sorted_prefixes(sequences, min_shared=1, max_small=0).order


def build_prefix_tree(
    sequences: Sequence[Sequence[int]],
    *,
    min_shared: int = MIN_SHARED_TOKENS,
    max_small: int = SMALL_SUBTREE_TOKENS,
) -> PrefixTree:
    """Arrange sequences, of which at least one has a token, as one row.

    Args:
        sequences: Token ids of each sequence.
        min_shared: Fewest tokens for which sequences are joined outside of small subtrees.
        max_small: Most tokens of a small subtree.
    """
    order, shared, arrays = _sorted_prefixes(sequences, min_shared, max_small)
    lengths = [len(array) for array in arrays]
    num_nodes = sum(lengths) - sum(shared)
    tokens_M, depths_M, ends_M = (np.empty(num_nodes, dtype=np.int64) for _ in range(3))
    nodes_of: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(arrays)
    run_starts: list[int] = []
    path = nodes_of[0]  # nodes of the previous sequence
    start = 0
    for index, depth in zip(order, shared, strict=True):
        if depth < len(path) or not run_starts:
            run_starts.append(start)
        ends_M[path[depth:]] = start
        end = start + lengths[index] - depth
        tokens_M[start:end] = arrays[index][depth:]
        depths_M[start:end] = np.arange(depth, lengths[index])
        path = np.concatenate([path[:depth], np.arange(start, end)])
        nodes_of[index] = path
        start = end
    ends_M[path] = num_nodes
    return PrefixTree(
        tokens_1M=torch.from_numpy(tokens_M)[None],
        position_ids_1M=torch.from_numpy(depths_M)[None],
        subtree_ends_M=torch.from_numpy(ends_M),
        nodes_T=torch.from_numpy(np.concatenate(nodes_of)),
        blocks=_attention_blocks(sorted({*run_starts, num_nodes}), ends_M, max_small),
        longest=max(lengths),
    )


def _attention_blocks(
    bounds: Sequence[int], ends_M: np.ndarray, max_small: int
) -> tuple[AttentionBlock, ...]:
    """Cut the attention into blocks; `bounds` are the starts of the runs, and M.

    Of the tokens of a run, those nearer to the root have more descendants. Tokens with the same
    descendants outside of the run are the keys of one block, whose queries are these descendants.
    The run ends where a small subtree begins.
    """
    own, full = [], []
    covered = 0
    for start, end in itertools.pairwise(bounds):
        if start < covered:  # inside of a small subtree
            continue
        tokens = np.arange(start, end)
        ends = ends_M[start:end]
        small = tokens[(ends > end) & (ends - tokens <= max_small)]
        if len(small):
            end = int(small[0])
            covered = int(ends_M[end])
        if start < end:
            own.append(AttentionBlock(slice(start, end), slice(start, end), True))
        if end < covered:
            subtree = slice(end, covered)
            own.append(AttentionBlock(subtree, subtree, False, _ancestors_LL(ends_M, subtree)))
        cuts = start + 1 + np.flatnonzero(np.diff(ends_M[start:end]))
        pieces = [start, *cuts.tolist(), end]
        for first, after in itertools.pairwise(pieces):
            last_query = int(ends_M[first])
            if first < after and last_query > end:
                full.append(AttentionBlock(slice(end, last_query), slice(first, after), False))
    return (*own, *full)


def _ancestors_LL(ends_M: np.ndarray, subtree: slice) -> torch.Tensor:
    """Return whether each token of a subtree attends to each of its tokens."""
    tokens = np.arange(subtree.start, subtree.stop)
    is_before = tokens[None] <= tokens[:, None]
    return torch.from_numpy(is_before & (tokens[:, None] < ends_M[subtree][None]))


class _SortedPrefixes(NamedTuple):
    order: list[int]
    """Indices of the sequences in lexicographic order."""
    shared: list[int]
    """Tokens that each sequence, in that order, shares with the previous one; 0 for the first."""
    arrays: list[np.ndarray]
    """Token ids of the sequences, in the given order."""


def _sorted_prefixes(
    sequences: Sequence[Sequence[int]], min_shared: int, max_small: int
) -> _SortedPrefixes:
    """Sort sequences, so that those with a common prefix are neighbors.

    The number of tokens that two of them share is the minimum of `shared` between them.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    # Big-endian bytes of numbers from 0 have the order of the numbers.
    keys = [array.astype(">i8").tobytes() for array in arrays]
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    shared = [0] * len(order)
    for place in range(1, len(order)):
        shared[place] = _common_length(arrays[order[place - 1]], arrays[order[place]])
    lengths = [len(arrays[index]) for index in order]
    return _SortedPrefixes(order, _worth_sharing(shared, lengths, min_shared, max_small), arrays)


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differences = np.flatnonzero(first[:length] != second[:length])
    return int(differences[0]) if len(differences) else length


def _worth_sharing(
    shared: Sequence[int], lengths: Sequence[int], min_shared: int, max_small: int
) -> list[int]:
    """Lower numbers of shared tokens to the last branching point before them if it is near.

    Lowering is always correct: the tokens between are computed for each sequence. Within a small
    subtree nothing is lowered.
    """
    result = list(shared)
    ranges = [(0, len(shared), 0)]  # neighbors, and the depth at which they branch off together
    while ranges:
        first, after, branch_depth = ranges.pop()
        if after - first < 2:
            continue
        depth = min(shared[first + 1 : after])
        num_later = sum(lengths[first:after]) - depth * (after - first)
        if depth - branch_depth >= min_shared or 1 + num_later <= max_small:
            branch_depth = depth
        cuts = [place for place in range(first + 1, after) if shared[place] == depth]
        for place in cuts:
            result[place] = branch_depth
        pairs = itertools.pairwise([first, *cuts, after])
        ranges += [(start, end, branch_depth) for start, end in pairs]
    return result
