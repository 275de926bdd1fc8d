"""The packing rules, on sizes alone: which groups form a batch; pure.

Every function returns positions in the order of its input, so callers decide what a group is.
Groups are never split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "SEARCH_BITS",
    "oldest_combination",
    "pack_exact",
    "pack_with_minimums",
    "scaled_needs",
]

SEARCH_BITS = 1 << 28
"""Bits available to the exact search (32 MiB); it considers the oldest groups that fit."""


def pack_exact(sizes: Iterable[int], *, largest: int, batch_size: int) -> list[int] | None:
    """Choose whole packs until they hold exactly `batch_size` sequences.

    A pack is a run of equally sized groups that together hold `largest` sequences. Packs are taken
    in the order in which they complete; only a part of the last one may be taken.

    Args:
        sizes: sequences per group, oldest first; read only as far as needed.
        largest: the largest size in the queue.
        batch_size: sequences wanted.

    Returns:
        Positions in order of delivery, or None when packs do not add up to `batch_size`.
    """
    open_packs: dict[int, list[int]] = defaultdict(list)
    taken: list[int] = []
    num_sequences = 0
    for position, size in enumerate(sizes):
        pack = open_packs[size]
        pack.append(position)
        if len(pack) * size != largest:
            continue
        del open_packs[size]
        for member in pack:
            taken.append(member)
            num_sequences += size
            if num_sequences >= batch_size:
                return taken if num_sequences == batch_size else None
    return None


def pack_with_minimums(
    groups: Sequence[tuple[int, int | None]],
    *,
    largest: int,
    batch_size: int,
    minimums: Mapping[int, float],
    ownerless_last: bool = False,
) -> list[int] | None:
    """Choose a batch in which some owners have a guaranteed share.

    First every owner with a minimum takes its share, in the order of `minimums`; then the rest is
    filled oldest first. All or nothing: an owner that cannot fill its share prevents the batch.

    Args:
        groups: (size, owner), oldest first; groups with owner None have no guaranteed share.
        largest: the largest size in the queue.
        batch_size: sequences wanted.
        minimums: owner → share of the batch; shares that exceed the batch are scaled down.
        ownerless_last: Whether groups without an owner only fill the remaining space.

    Returns:
        Positions in order of delivery, minimums first, or None.
    """
    packable = _packable_by_owner(groups, largest)
    needs = _minimum_needs(groups, packable, batch_size, minimums)
    if needs is None:
        return None
    taken: dict[int, None] = {}  # an ordered set
    room = batch_size
    for owner, need in needs.items():
        held = 0
        for position in packable[owner]:
            size = groups[position][0]
            if held >= need:
                break
            if size <= room:
                taken[position] = None
                held += size
                room -= size
    rest = sorted(
        (position for positions in packable.values() for position in positions),
        key=lambda position: (ownerless_last and groups[position][1] is None, position),
    )
    for position in rest:
        size = groups[position][0]
        if position not in taken and size <= room:
            taken[position] = None
            room -= size
    return list(taken) if room == 0 else None


def _packable_by_owner(
    groups: Sequence[tuple[int, int | None]], largest: int
) -> dict[int | None, list[int]]:
    open_packs: dict[tuple[int | None, int], list[int]] = defaultdict(list)
    packable: dict[int | None, list[int]] = defaultdict(list)
    for position, (size, owner) in enumerate(groups):
        pack = open_packs[owner, size]
        pack.append(position)
        if len(pack) * size == largest:
            packable[owner].extend(open_packs.pop((owner, size)))
    return packable


def _minimum_needs(
    groups: Sequence[tuple[int, int | None]],
    packable: Mapping[int | None, Sequence[int]],
    batch_size: int,
    minimums: Mapping[int, float],
) -> dict[int, int] | None:
    """Return the minimum sequences of each owner, None if one of them has no groups."""
    owing = [owner for owner, share in minimums.items() if int(batch_size * share) > 0]
    if any(not packable.get(owner) for owner in owing):
        return None
    smallest = {owner: min(groups[i][0] for i in packable[owner]) for owner in owing}
    return scaled_needs(minimums, smallest, batch_size)


def scaled_needs(
    minimums: Mapping[int, float], smallest: Mapping[int, int], batch_size: int
) -> dict[int, int]:
    """Return the minimum sequences of each owner of a share, scaled down to fit a batch.

    Args:
        minimums: owner → share of the batch; shares below one sequence are left out.
        smallest: owner → its smallest group size, the lower bound of its minimum.
        batch_size: sequences in the batch.
    """
    needs = {owner: int(batch_size * share) for owner, share in minimums.items()}
    needs = {owner: need for owner, need in needs.items() if need > 0}
    total = sum(needs.values())
    if total <= batch_size:
        return needs
    scale = batch_size / total
    return {owner: max(smallest[owner], int(need * scale)) for owner, need in needs.items()}


def oldest_combination(sizes: Sequence[int], target: int) -> list[int]:
    """Find groups that together hold exactly `target` sequences, preferring older ones.

    Subset sum over bit sets: bit `n` of a set says that `n` sequences can be reached. Exact as long
    as the candidates fit into the search: always up to targets of 4,096 sequences; beyond, the
    oldest candidates are searched, so that time and memory are bounded for every target.

    Args:
        sizes: sequences per group, at least 1 each, oldest first.
        target: sequences wanted.

    Returns:
        Ascending positions; empty when no combination exists.
    """
    if not 0 < target <= sum(sizes):
        return []
    candidates = _oldest_of_each_size(sizes, target)[: SEARCH_BITS // target]
    within_target = (1 << (target + 1)) - 1
    reachable_from = [1]  # by the candidates after each one, built from the end
    for position in reversed(candidates):
        later = reachable_from[-1]
        reachable_from.append((later | later << sizes[position]) & within_target)
    reachable_from.reverse()
    if not reachable_from[0] >> target & 1:
        return []
    taken: list[int] = []
    remainder = target
    for index, position in enumerate(candidates):
        size = sizes[position]
        if size <= remainder and reachable_from[index + 1] >> (remainder - size) & 1:
            taken.append(position)
            remainder -= size
            if remainder == 0:
                break
    return taken


def _oldest_of_each_size(sizes: Sequence[int], target: int) -> list[int]:
    """Return the positions that can be part of the oldest combination.

    Among groups of one size `s` the older ones are preferred, so only the first `target // s` can
    be chosen.
    """
    counts: dict[int, int] = {}
    positions = []
    for position, size in enumerate(sizes):
        count = counts.get(size, 0)
        if (count + 1) * size <= target:
            counts[size] = count + 1
            positions.append(position)
    return positions
