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
from dataclasses import dataclass, replace
from typing import Any

import torch

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.losses.distillation import PADDED_TEACHER_ID, PADDED_TEACHER_LOGPROB
from example_trainer.losses.reductions import BatchTotals
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
    is_sft_BT: torch.Tensor | None = None
    """(B, T) bool, tokens of demonstrations; None without any."""
    ref_logprobs_BT: torch.Tensor | None = None
    """(B, T) float32, `MASKED_LOGPROB` where unknown; None without any."""
    distill_token_ids_BTK: torch.Tensor | None = None
    """(B, T, K) int64 what a teacher expects as the label, padded; None without a teacher."""
    distill_logprobs_BTK: torch.Tensor | None = None
    """(B, T, K) float32 the teacher's logprobs of these, padded."""

    def to(self, device: str) -> Microbatch:
        """Return the same micro-batch on another device."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})


@dataclass(frozen=True)
class BatchSummary:
    """What the log says about a batch before any forward pass."""

    score_mean: float
    score_std: float
    num_groups: int
    num_silent_groups: int
    """Groups without an advantage, a demonstration or a teacher: they carry no gradient."""
    num_truncated_rows: int
    num_rows_without_logprobs: int
    num_rows_of_cut_sampling: int
    """Rows the engine drew from a part of the vocabulary only, by top-p, top-k or min-p."""
    num_input_tokens: int
    """Tokens fed to the model, padding not counted."""
    padding_fraction: float


@dataclass(frozen=True)
class Batch:
    """Everything one optimiser step consumes."""

    microbatches: list[Microbatch]
    totals: BatchTotals
    """Counts over the whole batch, the denominators of the loss."""
    summary: BatchSummary


def padded_length(longest: int, *, multiple: int = PAD_MULTIPLE) -> int:
    """Return the columns for rows of at most `longest` unshifted tokens: such a multiple."""
    return max(1, -(-(longest - 1) // multiple)) * multiple


def shift_row(row: Row) -> Row:
    """Align inputs with what they predict: inputs lose the last token, all else the first."""
    return replace(
        row,
        tokens=row.tokens[:-1],
        labels=row.labels[1:],
        advantages=row.advantages[1:],
        inference_logprobs=_without_first(row.inference_logprobs),
        ref_logprobs=_without_first(row.ref_logprobs),
        distill_token_ids=_without_first(row.distill_token_ids),
        distill_logprobs=_without_first(row.distill_logprobs),
    )


def _without_first(values: Sequence[Any] | None) -> Sequence[Any] | None:
    return None if values is None else values[1:]


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

    def floats(fields: Sequence[Sequence[float] | None], fill: float) -> torch.Tensor:
        return torch.tensor([_pad(f, fill, width) for f in fields], dtype=torch.float32)

    logprobs = [row.inference_logprobs for row in shifted]
    reference = [row.ref_logprobs for row in shifted]
    is_sft = torch.tensor([row.is_sft for row in shifted])
    ids_BTK, teacher_BTK = _teacher_tensors(shifted, width)
    return Microbatch(
        tokens_BT=torch.tensor([_pad(r.tokens, _PAD_TOKEN, width) for r in shifted]).long(),
        labels_BT=torch.tensor([_pad(r.labels, IGNORE_INDEX, width) for r in shifted]).long(),
        advantages_BT=floats([r.advantages for r in shifted], 0.0),
        inference_logprobs_BT=floats(logprobs, MASKED_LOGPROB),
        temperatures_B=torch.tensor([r.temperature for r in shifted], dtype=torch.float32),
        is_sft_BT=is_sft[:, None].expand(-1, width) if is_sft.any() else None,
        ref_logprobs_BT=None
        if all(values is None for values in reference)
        else floats(reference, MASKED_LOGPROB),
        distill_token_ids_BTK=ids_BTK,
        distill_logprobs_BTK=teacher_BTK,
    )


def _pad(values: Sequence[Any] | None, fill: Any, width: int) -> list[Any]:
    known = list(values or ())
    return known + [fill] * (width - len(known))


def _teacher_tensors(
    shifted: Sequence[Row], width: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (B, T, K) ids and logprobs of the teacher, None when no row has any."""
    positions = [ids for row in shifted for ids in row.distill_token_ids or ()]
    num_choices = max(map(len, positions), default=0)
    if not num_choices:
        return None, None

    def cube(rows: Sequence[Sequence[Sequence[Any]] | None], fill: Any) -> list[list[list[Any]]]:
        return [
            [_pad(choices, fill, num_choices) for choices in _pad(row, (), width)] for row in rows
        ]

    ids = cube([row.distill_token_ids for row in shifted], PADDED_TEACHER_ID)
    logprobs = cube([row.distill_logprobs for row in shifted], PADDED_TEACHER_LOGPROB)
    return torch.tensor(ids).long(), torch.tensor(logprobs, dtype=torch.float32)


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
    return Batch(
        microbatches=microbatches,
        totals=_count(rows),
        summary=_summarise(groups, rows_by_group, microbatches),
    )


def _count(rows: Sequence[Row]) -> BatchTotals:
    """Count what the reductions divide by; the shift takes the first position away."""
    policy = [n for row in rows if not row.is_sft and (n := _num_trained(row))]
    return BatchTotals(
        num_tokens=sum(policy),
        num_sequences=len(policy),
        num_sft_tokens=sum(_num_trained(row) for row in rows if row.is_sft),
        num_distill_tokens=sum(
            label != IGNORE_INDEX and any(choice != PADDED_TEACHER_ID for choice in ids)
            for row in rows
            if row.distill_token_ids is not None
            for label, ids in zip(row.labels[1:], row.distill_token_ids[1:], strict=True)
        ),
    )


def _num_trained(row: Row) -> int:
    return sum(label != IGNORE_INDEX for label in row.labels[1:])


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
            not any(_teaches(row) for row in members) for members in rows_by_group
        ),
        num_truncated_rows=sum(row.is_truncated for row in rows),
        num_rows_without_logprobs=sum(row.inference_logprobs is None for row in rows),
        num_rows_of_cut_sampling=sum(row.is_cut_sampling for row in rows),
        num_input_tokens=num_inputs,
        padding_fraction=1.0 - num_inputs / num_cells if num_cells else 0.0,
    )


def _teaches(row: Row) -> bool:
    return row.is_sft or row.distill_token_ids is not None or any(row.advantages)
