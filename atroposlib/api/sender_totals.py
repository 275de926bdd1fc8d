"""Queued sequences per sender, and their total for all other senders; pure.

Invariant: `sequences` holds exactly the senders that have queued sequences; while `_terms_of` is
set, `_total` is the sum of the contributions of all senders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["SenderTotals"]


class _Terms(NamedTuple):
    """Arguments for which the total was computed."""

    pack_size: int
    batch_size: int
    minimums: Mapping[int, float]


class SenderTotals:
    """Computes in O(1) the sum over all senders of `allocation.queue_view`.

    The total is updated as sequences are added and removed. It is recomputed, in O(senders +
    minimums), by the first call after the pack size, the batch size or the minimums changed.
    """

    def __init__(self) -> None:
        self.sequences: dict[int | None, int] = {}
        """Queued sequences per sender, without zeros; read-only."""
        self._terms: _Terms | None = None
        self._reserved: dict[int, int] = {}
        self._total = 0

    def add(self, sender: int | None, num_sequences: int) -> None:
        """Add sequences of one sender; negative numbers remove them."""
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
            sender: the sender that is left out.
            pack_size: sequences per pack, at least 1.
            batch_size: sequences per batch.
            minimums: sender → reserved share of the batch; the mapping must not be mutated between
                calls.
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
