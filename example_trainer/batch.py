"""Batches: the groups of one optimiser step in, its micro-batches and counts out.

groups [N] --rows--> rows [L] --microbatch--> micro-batches, padded or packed
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import IGNORE_INDEX
from example_trainer.losses.distillation import PADDED_TEACHER_ID
from example_trainer.losses.reductions import BatchTotals
from example_trainer.microbatch import (
    PAD_MULTIPLE,
    Microbatch,
    make_microbatch,
    make_packed_microbatch,
    padded_length,
    shift_row,
)
from example_trainer.packing import plan_microbatches
from example_trainer.row_fields import unknown_fields
from example_trainer.rows import Row, RowRules, rows_from_group

__all__ = [
    "Batch",
    "BatchSummary",
    "Microbatch",
    "build_batch",
    "make_microbatch",
    "make_packed_microbatch",
    "padded_length",
    "shift_row",
]


@dataclass(frozen=True)
class BatchSummary:
    """What the log says about a batch before any forward pass."""

    score_mean: float
    score_std: float
    advantage_mean: float
    """Over the tokens the policy loss trains, as is the deviation."""
    advantage_std: float
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
    unknown_fields: frozenset[str] = frozenset()
    """Fields of groups that nothing here reads."""
    bad_groups: Mapping[int, str] = field(default_factory=dict)
    """Why groups were left out, by their index in what was delivered."""
    num_refused_before: int = 0
    """Groups of batches that were refused whole since the step before."""


@dataclass(frozen=True)
class Batch:
    """Everything one optimiser step consumes."""

    microbatches: list[Microbatch]
    totals: BatchTotals
    """Counts over the whole batch, the denominators of the loss."""
    summary: BatchSummary
    needs_reference: bool = False
    """Whether the trainer has to score the reference, for some of the rows."""


def build_batch(
    groups: Sequence[Mapping[str, Any]],
    rules: RowRules,
    *,
    microbatch_size: int,
    pad_multiple: int = PAD_MULTIPLE,
    packs: bool = False,
    max_tokens: int | None = None,
    num_ranks: int = 1,
    skips_bad_groups: bool = False,
) -> Batch:
    """Build the tensors of one optimiser step.

    Padded micro-batches take sequences in order, the last may have fewer. Packed ones have about
    the same number of tokens each. Without `max_tokens` their number follows from
    `microbatch_size`; with it, it is the smallest that keeps that limit.

    Args:
        groups: [N] groups as the service delivers them.
        rules: How groups become rows.
        microbatch_size: Sequences per forward pass where `max_tokens` is None; packed: on average.
        pad_multiple: The columns of padded rows are a multiple of this.
        packs: Whether the sequences of a forward pass share a row.
        max_tokens: Maximum tokens of a forward pass, padding included, where no sequence is longer;
            None: no limit.
        num_ranks: Ranks that share the passes; with `max_tokens` each gets at least one.
        skips_bad_groups: Leave out groups that cannot be trained; the summary says why.

    Raises:
        GroupError: a group is malformed or cannot be honoured, or each one is where those are left
            out; the message names the path.
        ConfigError: as above, of groups with tokens that no model sampled.
    """
    delivered, groups, rows_by_group = groups, [], []
    bad_groups: dict[int, str] = {}
    for i, group in enumerate(delivered):
        try:
            rows_by_group.append(rows_from_group(group, rules, name=f"group {i}"))
            groups.append(group)
        except (GroupError, ConfigError) as error:
            bad_groups[i] = str(error)
            if not skips_bad_groups or len(bad_groups) == len(delivered):
                raise
    rows = [row for members in rows_by_group for row in members]
    if packs:
        bins = plan_microbatches(
            [max(0, len(row.tokens) - 1) for row in rows],
            num_microbatches=1 if max_tokens else -(-len(rows) // microbatch_size),
            max_tokens=max_tokens,
            multiple_of=num_ranks if max_tokens else 1,
        )
        microbatches = [make_packed_microbatch([rows[i] for i in indices]) for indices in bins]
    else:
        ends = _padded_ends(
            rows, microbatch_size, pad_multiple, max_tokens=max_tokens, num_ranks=num_ranks
        )
        microbatches = [
            make_microbatch(rows[start:end], pad_multiple=pad_multiple)
            for start, end in itertools.pairwise([0, *ends])
        ]
    return Batch(
        microbatches=microbatches,
        needs_reference=rules.scores_reference
        and any(row.ref_logprobs is None and not row.is_sft for row in rows),
        totals=_count(rows),
        summary=replace(_summarise(groups, rows_by_group, microbatches), bad_groups=bad_groups),
    )


def _padded_ends(
    rows: Sequence[Row],
    microbatch_size: int,
    pad_multiple: int,
    *,
    max_tokens: int | None,
    num_ranks: int,
) -> list[int]:
    """Return behind which row each padded micro-batch ends."""
    if max_tokens is None:
        return [*range(microbatch_size, len(rows), microbatch_size), len(rows)]
    most_rows = max(1, len(rows) // num_ranks)
    ends: list[int] = []
    start = longest = 0
    for i, row in enumerate(rows):
        longest = max(longest, len(row.tokens))
        cells = (i + 1 - start) * padded_length(longest, multiple=pad_multiple)
        if i > start and (cells > max_tokens or i - start >= most_rows):
            ends.append(i)
            start, longest = i, len(row.tokens)
    return [*ends, len(rows)]


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
    advantages = [a for row in rows if not row.is_sft for a in _trained_advantages(row)]
    return BatchSummary(
        score_mean=statistics.fmean(scores) if scores else 0.0,
        score_std=statistics.pstdev(scores) if scores else 0.0,
        advantage_mean=statistics.fmean(advantages) if advantages else 0.0,
        advantage_std=_deviation(advantages),
        num_groups=len(groups),
        num_silent_groups=sum(
            not any(_teaches(row) for row in members) for members in rows_by_group
        ),
        num_truncated_rows=sum(row.is_truncated for row in rows),
        num_rows_without_logprobs=sum(row.inference_logprobs is None for row in rows),
        num_rows_of_cut_sampling=sum(row.is_cut_sampling for row in rows),
        num_input_tokens=num_inputs,
        padding_fraction=1.0 - num_inputs / num_cells if num_cells else 0.0,
        unknown_fields=frozenset(name for group in groups for name in unknown_fields(group)),
    )


def _trained_advantages(row: Row) -> list[float]:
    """Return the advantage of each trained token; the shift takes the first position away."""
    pairs = zip(row.labels[1:], row.advantages[1:], strict=True)
    return [advantage for label, advantage in pairs if label != IGNORE_INDEX]


def _deviation(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _teaches(row: Row) -> bool:
    return row.is_sft or row.distill_token_ids is not None or any(row.advantages)
