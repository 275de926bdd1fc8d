"""Which sequences share a micro-batch: as many tokens in each as in the others; pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["balanced_bins", "plan_microbatches"]


def balanced_bins(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Spread sequences over bins so that the fullest holds few more tokens than the others.

    The longest first, each into the bin that is emptiest so far: the fullest bin holds at most 4/3
    of what the best spread would need.

    Args:
        lengths: Tokens of each sequence.
        num_bins: Bins, at least 1; some stay out of the result when there are fewer sequences.

    Returns:
        Indices into `lengths` per bin, rising in each, bins by their first index; every index
        once.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (LPT).
    """
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins}: needs at least one bin")
    bins: list[list[int]] = [[] for _ in range(min(num_bins, len(lengths)))]
    loads = [(0, number) for number in range(len(bins))]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = heapq.heappop(loads)
        bins[number].append(index)
        heapq.heappush(loads, (load + lengths[index], number))
    # A sequence without tokens may leave its bin the emptiest: another bin then stays empty.
    return sorted(sorted(indices) for indices in bins if indices)


def plan_microbatches(
    lengths: Sequence[int],
    *,
    num_microbatches: int,
    max_tokens: int | None = None,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Return which sequences each micro-batch packs into its one row.

    Args:
        lengths: Tokens of each sequence.
        num_microbatches: How many there are, where `max_tokens` allows it.
        max_tokens: Tokens of a micro-batch; there are more of them when it takes that, and one
            sequence that is longer has its own. None: no limit.
        multiple_of: Their number is a multiple of this where there are sequences enough: each of
            so many ranks then gets the same number.

    Returns:
        Indices into `lengths` per micro-batch, as `balanced_bins` orders them.
    """
    count = max(1, num_microbatches)
    if max_tokens is not None:
        count = max(count, -(-sum(lengths) // max_tokens))
    while True:
        count = -(-count // multiple_of) * multiple_of
        bins = balanced_bins(lengths, count)
        if max_tokens is None or count >= len(lengths):
            return bins
        if all(len(b) == 1 or sum(lengths[i] for i in b) <= max_tokens for b in bins):
            return bins
        count += 1
