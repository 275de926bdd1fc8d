"""Splitting a batch over ranks: each gets as many forward passes, of whole micro-batches."""

from __future__ import annotations

from dataclasses import replace

import torch

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.batch import Batch, Microbatch

__all__ = ["split_batch"]


def split_batch(batch: Batch, world_size: int) -> list[Batch]:
    """Deal the micro-batches out, the largest first, each to the rank with the fewest tokens.

    Ranks whose weights are sharded wait for one another in every forward pass, so a rank with
    fewer micro-batches gets ones without a trained token. Counts and summary stay those of the
    whole batch: the shares' losses and gradients add up to its own.

    Args:
        batch: Of one optimiser step.
        world_size: Number of ranks.

    Returns:
        One share per rank.
    """
    if world_size == 1:
        return [batch]
    most = -(-len(batch.microbatches) // world_size)
    shares: list[list[Microbatch]] = [[] for _ in range(world_size)]
    for microbatch in sorted(batch.microbatches, key=_num_cells, reverse=True):
        with_room = [share for share in shares if len(share) < most]
        min(with_room, key=lambda share: sum(map(_num_cells, share))).append(microbatch)
    for share in shares:
        share.extend(_empty_microbatch() for _ in range(most - len(share)))
    return [replace(batch, microbatches=share) for share in shares]


def _num_cells(microbatch: Microbatch) -> int:
    return int(microbatch.tokens_BT.numel())


def _empty_microbatch() -> Microbatch:
    """Return two tokens, none of them trained."""
    zeros = torch.zeros((1, 2))
    return Microbatch(
        tokens_BT=zeros.long(),
        labels_BT=torch.full((1, 2), IGNORE_INDEX),
        advantages_BT=zeros,
        inference_logprobs_BT=torch.full((1, 2), MASKED_LOGPROB),
        temperatures_S=torch.ones(1),
    )
