"""From per-token losses to one number: denominators that count the whole batch.

Because they count the whole batch, the sum over micro-batches depends neither on how the batch was
split nor on padding or packing.

Shape suffixes: B rows of one micro-batch, T padded length. A row holds one sequence, or several
when `sequence_ids_BT` says so; a sequence never spans two micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from example_trainer.losses.registry import Reduction

__all__ = ["BatchTotals", "masked_reduce", "sequence_means_BT", "sequence_sums_BT"]


class BatchTotals(NamedTuple):
    """Counts over the whole batch, the denominators of the reductions."""

    num_tokens: int
    """Tokens the policy loss trains."""
    num_sequences: int
    """Sequences with at least one such token; fully masked ones do not count."""
    num_sft_tokens: int = 0
    """Tokens of demonstrations."""
    num_distill_tokens: int = 0
    """Trained positions a teacher answered for."""


def sequence_sums_BT(
    values_BT: torch.Tensor, sequence_ids_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """Return at every position the sum over the sequence the position belongs to.

    Args:
        values_BT: (B, T), 0 at padding.
        sequence_ids_BT: (B, T) number of the sequence within the micro-batch; None: one per row.
    """
    if sequence_ids_BT is None:
        return values_BT.sum(dim=1, keepdim=True).expand_as(values_BT)
    ids = sequence_ids_BT.flatten()
    num_ids = int(ids.max()) + 1 if ids.numel() else 0
    sums = values_BT.new_zeros(num_ids).index_add(0, ids, values_BT.flatten())
    return sums[sequence_ids_BT]


def sequence_means_BT(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, sequence_ids_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """Return at every position the mean over its sequence's masked-in positions."""
    sums_BT = sequence_sums_BT(torch.where(mask_BT, values_BT, 0.0), sequence_ids_BT)
    counts_BT = sequence_sums_BT(mask_BT.to(values_BT.dtype), sequence_ids_BT)
    return sums_BT / counts_BT.clamp(min=1)


def masked_reduce(
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    totals: BatchTotals,
    *,
    reduction: Reduction,
    horizon: int = 1,
    sequence_ids_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce per-token losses to this micro-batch's share of the batch loss.

    | reduction | denominator | also known as |
    |---|---|---|
    | `token_mean` | trained tokens of the batch | DAPO, verl `token-mean` |
    | `sequence_mean` | sequences x each one's own tokens: short ones weigh more | GRPO |
    | `dr_grpo` | sequences x horizon | Dr.GRPO, verl `seq-mean-token-sum-norm` |
    | `sequence_sum` | sequences | verl `seq-mean-token-sum` |
    | `sum` | 1: grows with the batch | Tinker |

    A batch without trained tokens gives a zero that can still be sent backward, so that ranks
    which wait for one another do not hang.
    """
    masked_BT = torch.where(mask_BT, loss_BT, 0.0)
    if reduction == "sum":
        return masked_BT.sum()
    if reduction == "token_mean":
        return masked_BT.sum() / max(1, totals.num_tokens)
    if reduction == "dr_grpo":
        return masked_BT.sum() / (max(1, totals.num_sequences) * horizon)
    if reduction == "sequence_mean":
        counts_BT = sequence_sums_BT(mask_BT.to(masked_BT.dtype), sequence_ids_BT)
        masked_BT = masked_BT / counts_BT.clamp(min=1)
    return masked_BT.sum() / max(1, totals.num_sequences)
