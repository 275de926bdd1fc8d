"""Batches: groups in, shifted and padded tensors out.

    groups [N] --rows--> rows [L] --shift_row--> [L-1] --pad--> micro-batches (B, T)

The causal shift happens in `shift_row` and nowhere else: position t of every tensor is about
predicting token t+1 from tokens 0..t. Right padding needs no attention mask, because a causal
model never looks right.

Shape suffixes: B rows of one micro-batch, T their padded length.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.rows import Row, RowRules, rows_from_group

__all__ = [
    "Batch",
    "BatchSummary",
    "Microbatch",
    "build_batch",
    "make_microbatch",
    "padded_length",
    "shift_row",
]

PAD_MULTIPLE = 64
_PAD_TOKEN = 0  # never attended to and never trained on, so any valid id will do


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward pass, shifted and right-padded."""

    tokens_BT: torch.Tensor
    """(B, T) int64 inputs."""
    labels_BT: torch.Tensor
    """(B, T) int64: the next token where trained, `IGNORE_INDEX` elsewhere."""
    advantages_BT: torch.Tensor
    """(B, T) float32."""
    inference_logprobs_BT: torch.Tensor
    """(B, T) float32 logprob of the label under the sampler, `MASKED_LOGPROB` where unknown."""
    temperatures_B: torch.Tensor
    """(B,) float32."""

    def to(self, device: str) -> Microbatch:
        """Return the same micro-batch on another device."""
        return Microbatch(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class BatchSummary:
    """What the log says about a batch before any forward pass."""

    score_mean: float
    score_std: float
    num_groups: int
    num_silent_groups: int
    """Groups whose advantages are all zero: they carry no gradient."""
    num_truncated_rows: int
    num_rows_without_logprobs: int
    num_input_tokens: int
    """Tokens fed to the model, padding not counted."""
    padding_fraction: float


@dataclass(frozen=True)
class Batch:
    """Everything one optimiser step consumes."""

    microbatches: list[Microbatch]
    num_tokens: int
    """Trained tokens of the whole batch, the denominator of the token mean."""
    num_sequences: int
    """Rows with at least one trained token, the denominator of sequence means."""
    summary: BatchSummary


def padded_length(longest: int, *, multiple: int = PAD_MULTIPLE) -> int:
    """Return the columns for rows of at most `longest` unshifted tokens: such a multiple."""
    return max(1, -(-(longest - 1) // multiple)) * multiple


def shift_row(row: Row) -> Row:
    """Align inputs with what they predict: inputs lose the last token, all else the first."""
    logprobs = row.inference_logprobs
    return Row(
        tokens=row.tokens[:-1],
        labels=row.labels[1:],
        advantages=row.advantages[1:],
        inference_logprobs=None if logprobs is None else logprobs[1:],
        temperature=row.temperature,
        is_truncated=row.is_truncated,
    )


def make_microbatch(
    rows: Sequence[Row], *, columns: int | None = None, pad_multiple: int = PAD_MULTIPLE
) -> Microbatch:
    """Shift and pad rows into one micro-batch.

    Args:
        rows: Unshifted rows, at least one.
        columns: T; None takes the smallest multiple that holds the longest row.
        pad_multiple: What T is a multiple of, when `columns` is None.
    """
    longest = max(len(row.tokens) for row in rows)
    width = columns or padded_length(longest, multiple=pad_multiple)
    shifted = [shift_row(row) for row in rows]

    def pad(values: Sequence[float] | None, fill: float) -> list[float]:
        known = list(values or ())
        return known + [fill] * (width - len(known))

    return Microbatch(
        tokens_BT=torch.tensor([pad(r.tokens, _PAD_TOKEN) for r in shifted], dtype=torch.long),
        labels_BT=torch.tensor([pad(r.labels, IGNORE_INDEX) for r in shifted], dtype=torch.long),
        advantages_BT=torch.tensor([pad(r.advantages, 0.0) for r in shifted], dtype=torch.float32),
        inference_logprobs_BT=torch.tensor(
            [pad(r.inference_logprobs, MASKED_LOGPROB) for r in shifted], dtype=torch.float32
        ),
        temperatures_B=torch.tensor([r.temperature for r in shifted], dtype=torch.float32),
    )


def build_batch(
    groups: Sequence[Mapping[str, Any]],
    rules: RowRules,
    *,
    microbatch_size: int,
    pad_multiple: int = PAD_MULTIPLE,
) -> Batch:
    """Build the tensors of one optimiser step; the last micro-batch may be smaller.

    Args:
        groups: [N] groups as the service delivers them.
        rules: How groups become rows.
        microbatch_size: Rows per forward pass.
        pad_multiple: The columns of each are a multiple of this.

    Raises:
        GroupError: a group is malformed or cannot be honoured; the message names the path.
    """
    rows_by_group = [
        rows_from_group(group, rules, name=f"group {i}") for i, group in enumerate(groups)
    ]
    rows = [row for members in rows_by_group for row in members]
    microbatches = [
        make_microbatch(rows[start : start + microbatch_size], pad_multiple=pad_multiple)
        for start in range(0, len(rows), microbatch_size)
    ]
    trained = [(mb.labels_BT != IGNORE_INDEX).sum(dim=1) for mb in microbatches]
    return Batch(
        microbatches=microbatches,
        num_tokens=sum(int(count_B.sum()) for count_B in trained),
        num_sequences=sum(int((count_B > 0).sum()) for count_B in trained),
        summary=_summarise(groups, rows_by_group, microbatches),
    )


def _summarise(
    groups: Sequence[Mapping[str, Any]],
    rows_by_group: Sequence[Sequence[Row]],
    microbatches: Sequence[Microbatch],
) -> BatchSummary:
    scores = [float(score) for group in groups for score in group["scores"]]
    rows = [row for members in rows_by_group for row in members]
    num_inputs = sum(max(0, len(row.tokens) - 1) for row in rows)
    num_cells = sum(mb.tokens_BT.numel() for mb in microbatches)
    return BatchSummary(
        score_mean=statistics.fmean(scores) if scores else 0.0,
        score_std=statistics.pstdev(scores) if scores else 0.0,
        num_groups=len(groups),
        num_silent_groups=sum(
            all(not any(row.advantages) for row in members) for members in rows_by_group
        ),
        num_truncated_rows=sum(row.is_truncated for row in rows),
        num_rows_without_logprobs=sum(row.inference_logprobs is None for row in rows),
        num_input_tokens=num_inputs,
        padding_fraction=1.0 - num_inputs / num_cells if num_cells else 0.0,
    )
