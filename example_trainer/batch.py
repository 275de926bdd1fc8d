r"""Batches: turn the groups of one optimizer step into microbatches and counts.

    groups [N] --rows--> rows [L] --shift_row--> [L-1] --pad---> (B, T)    one sequence per row
                                                     \--pack--> (1, T)    all in one row
                                                      \-tree--> (1, M)    equal prefixes once

The causal shift happens in `shift_row` and nowhere else: position t of every tensor belongs to
the prediction of token t+1 from tokens 0..t. Right padding needs no attention mask, because causal
attention never reads later positions; `packed_attention` separates packed sequences. Microbatches
have about the same number of tokens, and each rank gets the same number of forward passes. A
packed microbatch may have a `PrefixTree`: the model then computes the tree's row, and every other
tensor remains packed.

Shape suffixes: S sequences of one microbatch, B its rows, T their length: B = S padded, B = 1
packed; M tokens of a tree.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.loss import PADDED_TEACHER_ID, PADDED_TEACHER_LOGPROB, BatchTotals
from example_trainer.prefix_tree import (
    PrefixTree,
    build_prefix_tree,
    in_tree_order,
    num_tree_tokens,
)
from example_trainer.rows import Row, RowRules, rows_from_group, unknown_fields

PAD_MULTIPLE = 64
_PAD_TOKEN = 0  # never attended to and never trained on, so any valid id will do


@dataclass(frozen=True)
class Microbatch:
    """Shifted sequences of one forward pass, one per right-padded row or all in one row."""

    tokens_BT: torch.Tensor
    """(B, T) int64 inputs."""
    labels_BT: torch.Tensor
    """(B, T) int64: the next token where trained, `IGNORE_INDEX` elsewhere."""
    advantages_BT: torch.Tensor
    """(B, T) float32."""
    inference_logprobs_BT: torch.Tensor
    """(B, T) float32 logprob of the label under the sampler, `MASKED_LOGPROB` where unknown."""
    temperatures_S: torch.Tensor
    """(S,) float32."""
    is_sft_BT: torch.Tensor | None = None
    """(B, T) bool, tokens of demonstrations; None without demonstrations."""
    ref_logprobs_BT: torch.Tensor | None = None
    """(B, T) float32, `MASKED_LOGPROB` where unknown; None if all are unknown."""
    distill_token_ids_BTK: torch.Tensor | None = None
    """(B, T, K) int64, the teacher's top tokens for the label, padded; None without a teacher."""
    distill_logprobs_BTK: torch.Tensor | None = None
    """(B, T, K) float32, the teacher's logprobs of these tokens, padded."""
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) int64 index of the sequence, from 0; None: one sequence per row."""
    position_ids_BT: torch.Tensor | None = None
    """(B, T) int64 position within the sequence; None: the column."""
    sequence_lengths: tuple[int, ...] | None = None
    """[S] lengths of the non-empty sequences, in order; None: one sequence per row."""
    pixels_PD: torch.Tensor | None = None
    """(P, D) float32 patches of the distinct images; None without images."""
    image_grids_I3: torch.Tensor | None = None
    """(I, 3) int64 patches of these images in time, height and width."""
    image_places: tuple[int, ...] = ()
    """Index of the image for each place in the tokens, row by row."""
    image_positions_3BT: torch.Tensor | None = None
    """(3, B, T) int64 positions in time, height and width; None without images."""
    tree: PrefixTree | None = None
    """The same sequences with equal prefixes computed once; None: nothing is shared."""

    @property
    def num_cells(self) -> int:
        """Tokens that the model computes, with padding."""
        return self.tokens_BT.numel() if self.tree is None else self.tree.num_tokens

    @property
    def temperatures_BT(self) -> torch.Tensor:
        if self.sequence_ids_BT is not None:
            return self.temperatures_S[self.sequence_ids_BT]
        return self.temperatures_S[:, None].expand(self.tokens_BT.shape)

    def with_reference(self, reference_BT: torch.Tensor) -> Microbatch:
        """Return a copy that has these reference logprobs where the groups have none."""
        given_BT = self.ref_logprobs_BT
        if given_BT is not None:
            reference_BT = torch.where(given_BT == MASKED_LOGPROB, reference_BT, given_BT)
        return replace(self, ref_logprobs_BT=reference_BT)

    def to(self, device: str) -> Microbatch:
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, (torch.Tensor, PrefixTree))
        }
        return replace(self, **moved)


def padded_length(longest: int, *, multiple: int = PAD_MULTIPLE) -> int:
    """Return the padded length, a multiple of `multiple`, of rows of `longest` unshifted tokens."""
    return max(1, -(-(longest - 1) // multiple)) * multiple


def shift_row(row: Row) -> Row:
    """Align inputs with their labels: drop the last token, and the first of every other field."""

    def without_first(values: Sequence[Any] | None) -> Sequence[Any] | None:
        return None if values is None else values[1:]

    return replace(
        row,
        tokens=row.tokens[:-1],
        labels=row.labels[1:],
        advantages=row.advantages[1:],
        inference_logprobs=without_first(row.inference_logprobs),
        ref_logprobs=without_first(row.ref_logprobs),
        distill_token_ids=without_first(row.distill_token_ids),
        distill_logprobs=without_first(row.distill_logprobs),
        images=None if row.images is None else row.images.without_last_token(),
    )


def make_microbatch(
    rows: Sequence[Row], *, columns: int | None = None, pad_multiple: int = PAD_MULTIPLE
) -> Microbatch:
    """Shift and pad at least one row; `columns` is T, by default that of the longest row."""
    longest = max(len(row.tokens) for row in rows)
    width = columns or padded_length(longest, multiple=pad_multiple)
    return _tensors([[shift_row(row)] for row in rows], width)


def make_packed_microbatch(rows: Sequence[Row], *, shares_prefixes: bool = False) -> Microbatch:
    """Shift at least one row and concatenate all into one row, as a tree with `shares_prefixes`."""
    shifted = [shift_row(row) for row in rows]
    lengths = [len(row.tokens) for row in shifted]
    if not any(lengths):
        return make_microbatch(rows, columns=1)
    sequence_ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    positions = [position for length in lengths for position in range(length)]
    return replace(
        _tensors([shifted], sum(lengths)),
        sequence_ids_BT=torch.tensor([sequence_ids]),
        position_ids_BT=torch.tensor([positions]),
        sequence_lengths=tuple(length for length in lengths if length),
        tree=build_prefix_tree([row.tokens for row in shifted]) if shares_prefixes else None,
    )


def _tensors(packs: Sequence[Sequence[Row]], width: int) -> Microbatch:
    """Build a microbatch whose rows are the concatenated packs of shifted rows."""
    rows = [row for pack in packs for row in pack]

    def joined(field: str, fill: Any) -> list[list[Any]]:
        return [_pad(_chain(pack, field, fill), fill, width) for pack in packs]

    def floats(field: str, fill: float) -> torch.Tensor:
        return torch.tensor(joined(field, fill), dtype=torch.float32)

    is_sft = [_pad([r.is_sft for r in pack for _ in r.tokens], False, width) for pack in packs]
    has_reference = any(row.ref_logprobs is not None for row in rows)
    ids_BTK, teacher_BTK = _teacher_tensors(packs, width)
    return Microbatch(
        tokens_BT=torch.tensor(joined("tokens", _PAD_TOKEN)).long(),
        labels_BT=torch.tensor(joined("labels", IGNORE_INDEX)).long(),
        advantages_BT=floats("advantages", 0.0),
        inference_logprobs_BT=floats("inference_logprobs", MASKED_LOGPROB),
        temperatures_S=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        is_sft_BT=torch.tensor(is_sft) if any(row.is_sft for row in rows) else None,
        ref_logprobs_BT=floats("ref_logprobs", MASKED_LOGPROB) if has_reference else None,
        distill_token_ids_BTK=ids_BTK,
        distill_logprobs_BTK=teacher_BTK,
        **_image_tensors(packs, width),
    )


def _image_tensors(packs: Sequence[Sequence[Row]], width: int) -> dict[str, Any]:
    """Return the fields of a microbatch with images; each distinct image is encoded once."""
    rows = [row for pack in packs for row in pack]
    images = [image for row in rows if row.images is not None for image in row.images.images]
    if not images:
        return {}
    distinct = list(dict.fromkeys(images))
    numbers = {image: number for number, image in enumerate(distinct)}
    positions_3BT = torch.zeros((3, len(packs), width), dtype=torch.int64)
    for b, pack in enumerate(packs):
        positions = torch.cat([_positions_3L(row) for row in pack], dim=1)
        positions_3BT[:, b, : positions.shape[1]] = positions
    return {
        "pixels_PD": torch.cat([image.pixels_PD for image in distinct]),
        "image_grids_I3": torch.tensor([image.grid for image in distinct]),
        "image_places": tuple(numbers[image] for image in images),
        "image_positions_3BT": positions_3BT,
    }


def _positions_3L(row: Row) -> torch.Tensor:
    if row.images is not None:
        return row.images.positions_3L
    return torch.arange(len(row.tokens)).expand(3, -1)


def _chain(pack: Sequence[Row], field: str, fill: Any) -> list[Any]:
    """Concatenate a field of the rows; `fill` stands in for a row without it."""
    values: list[Any] = []
    for row in pack:
        own = getattr(row, field)
        values += [fill] * len(row.tokens) if own is None else own
    return values


def _pad(values: Sequence[Any], fill: Any, width: int) -> list[Any]:
    return [*values, *[fill] * (width - len(values))]


def _teacher_tensors(
    packs: Sequence[Sequence[Row]], width: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the teacher's (B, T, K) ids and logprobs, None if no row has any."""
    rows = [row for pack in packs for row in pack]
    num_choices = max((len(ids) for row in rows for ids in row.distill_token_ids or ()), default=0)
    if not num_choices:
        return None, None

    def cube(field: str, fill: Any) -> list[list[list[Any]]]:
        return [
            [_pad(choices, fill, num_choices) for choices in _pad(_chain(p, field, ()), (), width)]
            for p in packs
        ]

    ids = cube("distill_token_ids", PADDED_TEACHER_ID)
    logprobs = cube("distill_logprobs", PADDED_TEACHER_LOGPROB)
    return torch.tensor(ids).long(), torch.tensor(logprobs, dtype=torch.float32)


def balanced_bins(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Distribute sequences over bins so that the number of tokens per bin is balanced.

    Longest first, each into the least full bin: the fullest bin has at most 4/3 of the tokens
    that it has in the optimal distribution.

    Args:
        lengths: Tokens of each sequence.
        num_bins: Maximum number of bins, at least 1; empty ones are left out.

    Returns:
        Indices into `lengths` per bin, ascending in each, bins ordered by their first index.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (LPT).
    """
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins}: needs at least one bin")
    bins: list[list[int]] = [[] for _ in range(min(num_bins, len(lengths)))]
    loads = [(0, number) for number in range(len(bins))]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = heapq.heappop(loads)
        bins[number].append(index)
        heapq.heappush(loads, (load + lengths[index], number))
    # A sequence without tokens leaves its bin the least full, so that another one may stay empty.
    return sorted(sorted(indices) for indices in bins if indices)


def plan_microbatches(
    lengths: Sequence[int],
    *,
    num_microbatches: int,
    max_tokens: int | None = None,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Assign sequences to packed microbatches.

    Args:
        lengths: Tokens of each sequence.
        num_microbatches: Number of microbatches, increased if `max_tokens` requires it.
        max_tokens: Maximum tokens of a microbatch; a longer sequence has its own. None: no limit.
        multiple_of: The number of microbatches is a multiple of this, for instance of the number of
            ranks, unless there are too few sequences.

    Returns:
        Indices into `lengths` per microbatch, as `balanced_bins` orders them.
    """
    count = max(1, num_microbatches)
    if max_tokens is not None:
        count = max(count, -(-sum(lengths) // max_tokens))
    while True:
        count = -(-count // multiple_of) * multiple_of
        bins = balanced_bins(lengths, count)
        if max_tokens is None or count >= len(lengths):
            return bins
        if all(len(b) == 1 or sum(lengths[i] for i in b) <= max_tokens for b in bins):
            return bins
        count += 1


@dataclass(frozen=True)
class BatchSummary:
    """Statistics of a batch that are known before the forward pass."""

    score_mean: float
    score_std: float
    advantage_mean: float
    """Over the tokens that the policy loss trains, as is the deviation."""
    advantage_std: float
    num_groups: int
    num_zero_gradient_groups: int
    """Groups without an advantage, a demonstration or a teacher."""
    num_truncated_rows: int
    num_rows_without_logprobs: int
    num_rows_of_partial_sampling: int
    """Rows sampled from a part of the vocabulary, by top-p, top-k or min-p."""
    num_input_tokens: int
    """Tokens of the sequences without the last one of each, and without padding."""
    num_computed_tokens: int
    """Those that the model computes: shared prefixes once."""
    padding_fraction: float
    """Padding among the computed tokens."""
    unknown_fields: frozenset[str] = frozenset()
    """Fields of groups that the trainer does not read."""
    bad_groups: Mapping[int, str] = field(default_factory=dict)
    """Reason for each group that was left out, by its index in the delivered batch."""
    num_refused_before: int = 0
    """Groups of the batches rejected as a whole since the previous step."""

    @property
    def shared_prefix_fraction(self) -> float:
        """Share of the input tokens that is not computed, since another sequence begins alike."""
        if not self.num_input_tokens:
            return 0.0
        return 1.0 - self.num_computed_tokens / self.num_input_tokens


@dataclass(frozen=True)
class Batch:
    """Input of one optimizer step."""

    microbatches: list[Microbatch]
    totals: BatchTotals
    """Counts over the whole batch, the denominators of the loss."""
    summary: BatchSummary
    needs_reference: bool = False
    """Whether the trainer has to compute reference logprobs for some of the rows."""


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
    min_shared_fraction: float | None = None,
) -> Batch:
    """Build the tensors of one optimizer step.

    Padded microbatches take sequences in order. Packed ones have about the same number of tokens
    each; with `max_tokens`, their number is the smallest that keeps to this limit.

    Args:
        groups: [N] groups as the service delivers them.
        rules: Settings of the conversion to rows.
        microbatch_size: Sequences per forward pass if `max_tokens` is None; packed: on average.
        pad_multiple: T of padded rows is a multiple of this.
        packs: Whether the sequences of a forward pass share a row.
        max_tokens: Maximum tokens of a forward pass, with padding, unless one sequence is longer;
            None: no limit.
        num_ranks: Ranks that share the passes; with `max_tokens`, and with shared prefixes, each
            gets at least one.
        skips_bad_groups: Whether to leave out untrainable groups and name the reasons in the
            summary.
        min_shared_fraction: Compute equal prefixes once if this share of the batch's tokens can be
            left out for it; limits then count each of these tokens once. Only with `packs` and
            without images; None: compute every sequence.

    Raises:
        GroupError: a group, or with `skips_bad_groups` every group, is malformed or unsupported;
            the message names the path.
        ConfigError: as above, for tokens that were not sampled by a model.
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
    if packs and _is_worth_sharing(rows_by_group, min_shared_fraction):
        microbatches = _tree_microbatches(
            rows_by_group, microbatch_size, max_tokens=max_tokens, num_ranks=num_ranks
        )
    elif packs:
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
        summary=replace(_summarize(groups, rows_by_group, microbatches), bad_groups=bad_groups),
    )


def _is_worth_sharing(
    rows_by_group: Sequence[Sequence[Row]], min_shared_fraction: float | None
) -> bool:
    if min_shared_fraction is None:
        return False
    if any(row.images is not None for members in rows_by_group for row in members):
        return False  # equal tokens may stand for different images
    inputs = [[row.tokens[:-1] for row in members] for members in rows_by_group]
    num_inputs = sum(len(tokens) for members in inputs for tokens in members)
    saved = num_inputs - sum(num_tree_tokens(members) for members in inputs)
    return saved > 0 and saved >= min_shared_fraction * num_inputs


def _tree_microbatches(
    rows_by_group: Sequence[Sequence[Row]],
    microbatch_size: int,
    *,
    max_tokens: int | None,
    num_ranks: int,
) -> list[Microbatch]:
    """Build packed microbatches with trees; members of a group stay together within the limit.

    Without `max_tokens`, the limit is that of `microbatch_size` sequences of the longest length.
    Where each rank has a packed microbatch, it has one with trees as well.
    """
    longest = max(len(row.tokens) for members in rows_by_group for row in members)
    limit = max_tokens or microbatch_size * max(1, longest - 1)
    totals = [num_tree_tokens([row.tokens[:-1] for row in members]) for members in rows_by_group]
    num_packed = -(-sum(map(len, rows_by_group)) // microbatch_size)
    multiple_of = num_ranks if max_tokens or num_packed >= num_ranks else 1
    part_limit = min(limit, max(1, -(-sum(totals) // multiple_of)))
    parts = [part for members in rows_by_group for part in _split_rows(members, part_limit)]
    costs = [num_tree_tokens([row.tokens[:-1] for row in part]) for part in parts]
    count = 1
    while True:
        bins = plan_microbatches(
            costs, num_microbatches=count, max_tokens=limit, multiple_of=multiple_of
        )
        microbatches = [
            make_packed_microbatch([row for i in indices for row in parts[i]], shares_prefixes=True)
            for indices in bins
        ]
        # Where groups branch close to each other, a common tree may be larger than several.
        if len(bins) == len(parts) or all(mb.num_cells <= limit for mb in microbatches):
            return microbatches
        count = len(bins) + 1


def _split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut the rows of a group into as few parts as keep to a limit of tree tokens."""
    inputs = [row.tokens[:-1] for row in rows]
    order = in_tree_order(inputs)
    for count in range(1, len(rows) + 1):
        ends = [len(rows) * number // count for number in range(count + 1)]
        parts = [order[start:end] for start, end in itertools.pairwise(ends)]
        if all(num_tree_tokens([inputs[i] for i in part]) <= max_tokens for part in parts):
            break
    return [[rows[i] for i in sorted(part)] for part in parts]


def _padded_ends(
    rows: Sequence[Row],
    microbatch_size: int,
    pad_multiple: int,
    *,
    max_tokens: int | None,
    num_ranks: int,
) -> list[int]:
    """Return the end index of each padded microbatch."""
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
    """Count the denominators of the reductions; the shift removes the first position."""
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


def _summarize(
    groups: Sequence[Mapping[str, Any]],
    rows_by_group: Sequence[Sequence[Row]],
    microbatches: Sequence[Microbatch],
) -> BatchSummary:
    scores = [float(score) for group in groups for score in group["scores"]]
    rows = [row for members in rows_by_group for row in members]
    num_inputs = sum(max(0, len(row.tokens) - 1) for row in rows)
    num_computed = sum(mb.num_cells for mb in microbatches)
    num_padded = sum(mb.tokens_BT.numel() for mb in microbatches) - num_inputs
    advantages = [a for row in rows if not row.is_sft for a in _trained_advantages(row)]
    return BatchSummary(
        score_mean=statistics.fmean(scores) if scores else 0.0,
        score_std=statistics.pstdev(scores) if scores else 0.0,
        advantage_mean=statistics.fmean(advantages) if advantages else 0.0,
        advantage_std=_deviation(advantages),
        num_groups=len(groups),
        num_zero_gradient_groups=sum(
            not any(_has_gradient(row) for row in members) for members in rows_by_group
        ),
        num_truncated_rows=sum(row.is_truncated for row in rows),
        num_rows_without_logprobs=sum(row.inference_logprobs is None for row in rows),
        num_rows_of_partial_sampling=sum(row.is_partially_sampled for row in rows),
        num_input_tokens=num_inputs,
        num_computed_tokens=num_computed - num_padded,
        padding_fraction=num_padded / num_computed if num_computed else 0.0,
        unknown_fields=frozenset(name for group in groups for name in unknown_fields(group)),
    )


def _trained_advantages(row: Row) -> list[float]:
    pairs = zip(row.labels[1:], row.advantages[1:], strict=True)
    return [advantage for label, advantage in pairs if label != IGNORE_INDEX]


def _deviation(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _has_gradient(row: Row) -> bool:
    return row.is_sft or row.distill_token_ids is not None or any(row.advantages)


def split_batch(batch: Batch, world_size: int) -> list[Batch]:
    """Distribute the microbatches, largest first, each to the rank with the fewest tokens.

    Ranks with sharded weights synchronize in every forward pass, so that ranks with fewer
    microbatches get additional ones without trained tokens. Counts and summary remain those of the
    whole batch: the losses and gradients of the shares add up to those of the batch.
    """
    if world_size == 1:
        return [batch]
    most = -(-len(batch.microbatches) // world_size)
    shares: list[list[Microbatch]] = [[] for _ in range(world_size)]
    for microbatch in sorted(batch.microbatches, key=lambda mb: mb.num_cells, reverse=True):
        with_room = [share for share in shares if len(share) < most]
        min(with_room, key=lambda share: sum(mb.num_cells for mb in share)).append(microbatch)
    for share in shares:
        share.extend(_empty_microbatch() for _ in range(most - len(share)))
    return [replace(batch, microbatches=share) for share in shares]


def _empty_microbatch() -> Microbatch:
    zeros = torch.zeros((1, 2))
    return Microbatch(
        tokens_BT=zeros.long(),
        labels_BT=torch.full((1, 2), IGNORE_INDEX),
        advantages_BT=zeros,
        inference_logprobs_BT=torch.full((1, 2), MASKED_LOGPROB),
        temperatures_S=torch.ones(1),
    )
