"""Queued sequences per sender, and what they amount to for everybody else; pure.

Invariant: `sequences` holds exactly the senders that have queued sequences; while `_terms_of` is
set, `_total` is the sum of what every sender adds for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["SenderTotals"]


class _Terms(NamedTuple):
    """What the total was computed for."""

    pack_size: int
    batch_size: int
    minimums: Mapping[int, float]


class SenderTotals:
    """Answers in O(1) what `allocation.queue_view` sums up over all senders.

    The total is kept while sequences come and go. It is summed up anew, in O(senders + minimums),
    by the first question after the pack size, the batch size or the minimums changed.
    """

    def __init__(self) -> None:
        self.sequences: dict[int | None, int] = {}
        """Queued sequences of every sender that has some; read only."""
        self._terms: _Terms | None = None
        self._reserved: dict[int, int] = {}
        self._total = 0

    def add(self, sender: int | None, num_sequences: int) -> None:
        """Count sequences of one sender that came, or left if negative."""
        before = self.sequences.get(sender, 0)
        after = before + num_sequences
        if after:
            self.sequences[sender] = after
        else:
            self.sequences.pop(sender, None)
        if self._terms is not None:
            self._total += self._part(sender, after) - self._part(sender, before)

    def others_packed(
        self,
        sender: int | None,
        *,
        pack_size: int,
        batch_size: int,
        minimums: Mapping[int, float],
    ) -> int:
        """Return the sequences of all other senders in whole packs, less what each has reserved.

        Args:
            sender: the one that is left out.
            pack_size: sequences per pack, at least 1.
            batch_size: sequences per batch.
            minimums: sender → reserved share of the batch; a mapping that is passed again must be
                unchanged.
        """
        terms = _Terms(pack_size, batch_size, minimums)
        if self._terms != terms:
            self._reserved = {env: int(batch_size * share) for env, share in minimums.items()}
            self._terms = terms
            self._total = sum(self._part(env, held) for env, held in self.sequences.items())
        return self._total - self._part(sender, self.sequences.get(sender, 0))

    def _part(self, sender: int | None, num_sequences: int) -> int:
        if not num_sequences or self._terms is None:
            return 0
        pack_size = self._terms.pack_size
        packed = -(-num_sequences // pack_size) * pack_size
        reserved = self._reserved.get(sender, 0) if sender is not None else 0
        return max(0, packed - reserved)
