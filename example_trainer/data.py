"""The earlier trainer's functions for collating a batch, based on `batch`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from atroposlib.errors import GroupError
from atroposlib.scored_data import MASKED_LOGPROB
from example_trainer.api import get_batch
from example_trainer.batch import make_microbatch, padded_length
from example_trainer.rows import RowRules, rows_from_group

__all__ = ["CollatedBatch", "get_data", "pad_data_to_good_offset"]

_NO_LIMIT = 2**31


class CollatedBatch(NamedTuple):
    """Five parallel lists, one entry per microbatch."""

    tokens: list[torch.Tensor]
    """(B, T) inputs."""
    labels: list[torch.Tensor]
    """(B, T) labels."""
    advantages: list[torch.Tensor]
    """(B, 1), or (B, T) if the groups have token-level advantages."""
    temperatures: list[torch.Tensor]
    """(B, 1, 1)."""
    inference_logprobs: list[torch.Tensor] | None
    """(B, T), `MASKED_LOGPROB` where unknown; None if no group has any."""


def pad_data_to_good_offset(
    data: Mapping[str, Any],
    batch_size: int,
    extract_inference_logprobs: bool = True,
    *,
    seq_len: int | None = None,
) -> CollatedBatch:
    """Collate the body of `GET /batch`; every microbatch has the same number of columns.

    Args:
        data: `{"batch": groups}`.
        batch_size: Rows per microbatch; the last one may have fewer.
        extract_inference_logprobs: Whether to return the fifth list.
        seq_len: Maximum length of a row in tokens; None: no limit.

    Raises:
        GroupError: there is no group, or one is malformed or not supported.
    """
    rules = RowRules(seq_len=seq_len or _NO_LIMIT)
    groups = data["batch"]
    if not groups:
        raise GroupError(
            "batch: no groups; ask the service again, it answers null until one is full"
        )
    rows = [
        row
        for i, group in enumerate(groups)
        for row in rows_from_group(group, rules, name=f"group {i}")
    ]
    columns = padded_length(max(len(row.tokens) for row in rows))
    microbatches = [
        make_microbatch(rows[start : start + batch_size], columns=columns)
        for start in range(0, len(rows), batch_size)
    ]
    per_row = all(group.get("advantages") is None for group in groups)
    known = [(mb.inference_logprobs_BT != MASKED_LOGPROB).any() for mb in microbatches]
    return CollatedBatch(
        tokens=[mb.tokens_BT for mb in microbatches],
        labels=[mb.labels_BT for mb in microbatches],
        advantages=[
            mb.advantages_BT[:, :1] if per_row else mb.advantages_BT for mb in microbatches
        ],
        temperatures=[mb.temperatures_S[:, None, None] for mb in microbatches],
        inference_logprobs=[mb.inference_logprobs_BT for mb in microbatches]
        if extract_inference_logprobs and any(known)
        else None,
    )


def get_data(
    batch_size: int,
    seq_len: int,
    atropos_url: str = "http://localhost:8000",
    extract_inference_logprobs: bool = True,
) -> tuple[list[CollatedBatch], None]:
    """Wait for a batch; return it and every batch that is ready, collated, and None."""
    collated: list[CollatedBatch] = []
    while True:
        data = get_batch(atropos_url)
        if data["batch"]:
            collated.append(
                pad_data_to_good_offset(
                    data, batch_size, extract_inference_logprobs, seq_len=seq_len
                )
            )
        elif collated:
            return collated, None
        else:
            time.sleep(1.0)
