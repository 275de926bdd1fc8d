"""Which groups make a batch: the packing rules, on sizes alone; pure.

Every function answers with positions in the order they were given, so that callers decide what a
group is. Groups are never split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["oldest_combination", "pack_exact", "pack_with_minimums"]


def pack_exact(sizes: Iterable[int], *, largest: int, batch_size: int) -> list[int] | None:
    """Choose whole packs until they hold exactly `batch_size` sequences.

    A pack is a run of equally sized groups that together hold `largest` sequences. Packs are taken
    in the order in which they complete; the last one may be taken in part.

    Args:
        sizes: sequences per group, oldest first; read only as far as needed.
        largest: the largest size there is.
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
    filled oldest first. All or nothing: an owner that cannot fill its share refuses the batch.

    Args:
        groups: (size, owner) oldest first; owner None is nobody, and never guaranteed a share.
        largest: the largest size there is.
        batch_size: sequences wanted.
        minimums: owner → share of the batch; shares that exceed the batch are scaled down.
        ownerless_last: let groups without an owner only fill what owned groups leave.

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
    """Return the sequences owed to each owner, None when one of them has nothing to give."""
    needs = {owner: int(batch_size * share) for owner, share in minimums.items()}
    needs = {owner: need for owner, need in needs.items() if need > 0}
    if any(not packable.get(owner) for owner in needs):
        return None
    total = sum(needs.values())
    if total <= batch_size:
        return needs
    scale = batch_size / total
    return {
        owner: max(min(groups[position][0] for position in packable[owner]), int(need * scale))
        for owner, need in needs.items()
    }


def oldest_combination(sizes: Sequence[int], target: int) -> list[int]:
    """Find groups that hold exactly `target` sequences, preferring older ones.

    Exact subset sum over bit sets: bit `n` of a set says that `n` sequences can be reached.

    Args:
        sizes: sequences per group, oldest first.
        target: sequences wanted.

    Returns:
        Ascending positions; empty when no combination exists.
    """
    if target <= 0:
        return []
    within_target = (1 << (target + 1)) - 1
    reachable_from = [1]  # by the groups behind each position, built from the back
    for size in reversed(sizes):
        later = reachable_from[-1]
        reachable_from.append((later | later << size) & within_target if size <= target else later)
    reachable_from.reverse()
    if not reachable_from[0] >> target & 1:
        return []
    taken: list[int] = []
    remainder = target
    for position, size in enumerate(sizes):
        if size <= remainder and reachable_from[position + 1] >> (remainder - size) & 1:
            taken.append(position)
            remainder -= size
            if remainder == 0:
                break
    return taken
