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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Microbatch:
    """Shifted sequences of one forward pass, one per right-padded row or all in one row.

    Absent fields are None, numbers are float32, indices int64.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    """The next token where trained, `IGNORE_INDEX` elsewhere."""
    advantages_BT: Tensor
    inference_logprobs_BT: Tensor
    """Logprob of the label under the sampler, `MASKED_LOGPROB` where unknown."""
    temperatures_S: Tensor
    is_sft_BT: Tensor | None = None
    """Bool, tokens of demonstrations."""
    ref_logprobs_BT: Tensor | None = None
    """`MASKED_LOGPROB` where unknown."""
    proximal_logprobs_BT: Tensor | None = None
    """The trainer's logprobs before the first update on the batch; None: this is the first."""
    distill_token_ids_BTK: Tensor | None = None
    """The teacher's top tokens for the label, padded."""
    distill_logprobs_BTK: Tensor | None = None
    sequence_ids_BT: Tensor | None = None
    """Index of the sequence, from 0; None: one sequence per row."""
    position_ids_BT: Tensor | None = None
    """Position within the sequence; None: the column."""
    sequence_lengths: tuple[int, ...] | None = None
    """[S] lengths of the non-empty sequences, in order; None: one sequence per row."""
    pixels_PD: Tensor | None = None
    """Patches of the distinct images."""
    image_grids_I3: Tensor | None = None
    """Patches of these images in time, height and width."""
    image_places: tuple[int, ...] = ()
    """Index of the image for each place in the tokens, row by row."""
    image_positions_3BT: Tensor | None = None
    """Positions in time, height and width."""
    tree: PrefixTree | None = None
    """The same sequences with equal prefixes computed once; None: nothing is shared."""

    @property
    def trained_BT(self) -> Tensor:
        return self.labels_BT != IGNORE_INDEX

    @property
    def policy_BT(self) -> Tensor:
        """(B, T) bool, the positions that the policy loss trains."""
        return self.trained_BT if self.is_sft_BT is None else self.trained_BT & ~self.is_sft_BT

    @property
    def num_cells(self) -> int:
        """Tokens that the model computes, with padding."""
        return self.tokens_BT.numel() if self.tree is None else self.tree.num_tokens

    @property
    def temperatures_BT(self) -> Tensor:
        if self.sequence_ids_BT is not None:
            return self.temperatures_S[self.sequence_ids_BT]
        return self.temperatures_S[:, None].expand(self.tokens_BT.shape)

    def with_reference(self, reference_BT: Tensor) -> Microbatch:
        """Return a copy that has these reference logprobs where the groups have none."""
        given_BT = self.ref_logprobs_BT
        if given_BT is not None:
            reference_BT = torch.where(given_BT == MASKED_LOGPROB, reference_BT, given_BT)
        return replace(self, ref_logprobs_BT=reference_BT)

    def to(self, device: str) -> Microbatch:
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, (Tensor, PrefixTree))
        }
        return replace(self, **moved)


def padded_length(longest: int, *, multiple: int = PAD_MULTIPLE) -> int:
    """Return the padded length, a multiple of `multiple`, of rows of `longest` unshifted tokens."""
    return max(1, -(-(longest - 1) // multiple)) * multiple


_FILLS: dict[str, Any] = {
    "tokens": 0,  # never attended to and never trained on, so any valid id will do
    "labels": IGNORE_INDEX,
    "advantages": 0.0,
    "inference_logprobs": MASKED_LOGPROB,
    "ref_logprobs": MASKED_LOGPROB,
    "distill_token_ids": (),
    "distill_logprobs": (),
}
"""The [L] fields of a row, and the entry of padding and of rows without the field."""


def shift_row(row: Row) -> Row:
    """Align inputs with their labels: drop the last token, and the first of every other field."""
    values = {name: getattr(row, name) for name in _FILLS}
    shifted: dict[str, Any] = {
        name: None if value is None else value[1:] for name, value in values.items()
    }
    shifted["tokens"] = row.tokens[:-1]
    shifted["images"] = None if row.images is None else row.images.without_last_token()
    return replace(row, **shifted)


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
    numbers = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    return replace(
        _tensors([shifted], sum(lengths)),
        sequence_ids_BT=numbers[None],
        position_ids_BT=torch.cat([torch.arange(length) for length in lengths])[None],
        sequence_lengths=tuple(length for length in lengths if length),
        tree=build_prefix_tree([row.tokens for row in shifted]) if shares_prefixes else None,
    )


def _tensors(packs: Sequence[Sequence[Row]], width: int) -> Microbatch:
    """Build a microbatch whose rows are the concatenated packs of shifted rows."""
    rows = [row for pack in packs for row in pack]

    def joined(field: str) -> list[list[Any]]:
        fill = _FILLS[field]
        rows_of_packs = []
        for pack in packs:
            found = [(getattr(row, field), len(row.tokens)) for row in pack]
            values = [[fill] * length if own is None else own for own, length in found]
            rows_of_packs.append(_pad(itertools.chain(*values), fill, width))
        return rows_of_packs

    def floats(field: str) -> Tensor:
        return torch.tensor(joined(field), dtype=torch.float32)

    is_sft = [_pad([r.is_sft for r in pack for _ in r.tokens], False, width) for pack in packs]
    return Microbatch(
        tokens_BT=torch.tensor(joined("tokens")).long(),
        labels_BT=torch.tensor(joined("labels")).long(),
        advantages_BT=floats("advantages"),
        inference_logprobs_BT=floats("inference_logprobs"),
        temperatures_S=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        is_sft_BT=torch.tensor(is_sft) if any(row.is_sft for row in rows) else None,
        ref_logprobs_BT=floats("ref_logprobs")
        if any(row.ref_logprobs is not None for row in rows)
        else None,
        **_teacher_tensors(joined) if any(row.distill_token_ids for row in rows) else {},
        **_image_tensors(packs, width) if any(row.images for row in rows) else {},
    )


def _pad(values: Iterable[Any], fill: Any, width: int) -> list[Any]:
    padded = list(values)
    return padded + [fill] * (width - len(padded))


def _teacher_tensors(joined: Callable[[str], list[list[Any]]]) -> dict[str, Tensor]:
    """Return the teacher's tokens, padded to K; none if no position has any."""
    ids, logprobs = joined("distill_token_ids"), joined("distill_logprobs")
    most = max(len(choices) for row in ids for choices in row)
    if not most:
        return {}
    ids = [[_pad(c, PADDED_TEACHER_ID, most) for c in row] for row in ids]
    logprobs = [[_pad(c, PADDED_TEACHER_LOGPROB, most) for c in row] for row in logprobs]
    return {
        "distill_token_ids_BTK": torch.tensor(ids).long(),
        "distill_logprobs_BTK": torch.tensor(logprobs, dtype=torch.float32),
    }


def _image_tensors(packs: Sequence[Sequence[Row]], width: int) -> dict[str, Any]:
    """Return the fields of a microbatch with images; each distinct image is encoded once."""
    images = [image for pack in packs for row in pack if row.images for image in row.images.images]
    numbers = {image: number for number, image in enumerate(dict.fromkeys(images))}
    positions_3BT = torch.zeros((3, len(packs), width), dtype=torch.int64)
    for b, pack in enumerate(packs):
        positions = [
            row.images.positions_3L if row.images else torch.arange(len(row.tokens)).expand(3, -1)
            for row in pack
        ]
        positions_3BT[:, b, : sum(p.shape[1] for p in positions)] = torch.cat(positions, dim=1)
    return {
        "pixels_PD": torch.cat([image.pixels_PD for image in numbers]),
        "image_grids_I3": torch.tensor([image.grid for image in numbers]),
        "image_places": tuple(numbers[image] for image in images),
        "image_positions_3BT": positions_3BT,
    }


def balanced_bins(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Distribute sequences over at most `num_bins` bins, so that their tokens are balanced.

    Longest first, each into the least full bin: the fullest bin has at most 4/3 of the tokens
    that it has in the optimal distribution.

    Returns:
        Indices into `lengths` per bin, ascending in each, bins ordered by their first index.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (LPT).
    """
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins}: needs at least one bin")
    bins: list[list[int]] = [[] for _ in range(min(num_bins, len(lengths)))]
    loads = [(0, number) for number in range(len(bins))]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (load + lengths[index], number))
    # A sequence without tokens leaves its bin the least full, so that another one may stay empty.
    return sorted(sorted(indices) for indices in bins if indices)


def plan_microbatches(
    lengths: Sequence[int],
    *,
    num_microbatches: int,
    max_tokens: int | None = None,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Assign sequences to packed microbatches, as `balanced_bins` does.

    Args:
        lengths: Tokens of each sequence.
        num_microbatches: Number of microbatches, increased if `max_tokens` requires it.
        max_tokens: Maximum tokens of a microbatch; a longer sequence has its own. None: no limit.
        multiple_of: The number of microbatches is a multiple of this, for instance of the number of
            ranks, unless there are too few sequences.
    """
    count, limit = max(1, num_microbatches), max_tokens or max(1, sum(lengths))
    count = max(count, -(-sum(lengths) // limit))
    while True:
        count = -(-count // multiple_of) * multiple_of
        bins = balanced_bins(lengths, count)
        is_kept = all(len(b) == 1 or sum(lengths[i] for i in b) <= limit for b in bins)
        if is_kept or count >= len(lengths):
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
        num_saved = self.num_input_tokens - self.num_computed_tokens
        return num_saved / max(1, self.num_input_tokens)


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
    """Build the tensors of one optimizer step from [N] groups, as the service delivers them.

    Padded microbatches take sequences in order. Packed ones have about the same number of tokens
    each; with `max_tokens`, their number is the smallest that keeps to this limit.

    Args:
        groups: [N] groups.
        rules: Settings of the conversion to rows.
        microbatch_size: Sequences per forward pass without `max_tokens`; packed: on average.
        pad_multiple: T of padded rows is a multiple of this.
        packs: Whether the sequences of a forward pass share a row.
        max_tokens: Maximum tokens of a forward pass, with padding, unless one sequence is longer.
        num_ranks: With `max_tokens` or shared prefixes, each rank gets a pass at least.
        skips_bad_groups: Whether to leave out untrainable groups and name the reasons in the
            summary.
        min_shared_fraction: Compute equal prefixes once, if this share of the tokens is saved by
            it; limits then count them once. Only with `packs` and without images.

    Raises:
        GroupError: a group, or with `skips_bad_groups` every group, is malformed or unsupported.
        ConfigError: as above, for tokens that were not sampled by a model.
    """
    rows_by_group, bad_groups = _convert(groups, rules, skips_bad_groups=skips_bad_groups)
    members = list(rows_by_group.values())
    rows = list(itertools.chain(*members))
    if packs and _is_worth_sharing(members, min_shared_fraction):
        microbatches = _tree_microbatches(
            members, microbatch_size, max_tokens=max_tokens, num_ranks=num_ranks
        )
    elif packs:
        microbatches = _packed_microbatches(
            rows, microbatch_size, max_tokens=max_tokens, num_ranks=num_ranks
        )
    else:
        starts = _padded_starts(rows, microbatch_size, pad_multiple, max_tokens, num_ranks)
        microbatches = [
            make_microbatch(rows[start:end], pad_multiple=pad_multiple)
            for start, end in itertools.pairwise([*starts, len(rows)])
        ]
    summary = _summarize([groups[i] for i in rows_by_group], members, microbatches)
    return Batch(
        microbatches=microbatches,
        totals=_count(rows, microbatches),
        summary=replace(summary, bad_groups=bad_groups),
        needs_reference=rules.scores_reference and any(map(_lacks_reference, rows)),
    )


def _convert(
    groups: Sequence[Mapping[str, Any]], rules: RowRules, *, skips_bad_groups: bool
) -> tuple[dict[int, list[Row]], dict[int, str]]:
    """Return the rows of the trainable groups and the reason for each other one, by index."""
    rows_by_group: dict[int, list[Row]] = {}
    bad_groups: dict[int, str] = {}
    for i, group in enumerate(groups):
        try:
            rows_by_group[i] = rows_from_group(group, rules, name=f"group {i}")
        except (GroupError, ConfigError) as error:
            bad_groups[i] = str(error)
            if not skips_bad_groups or len(bad_groups) == len(groups):
                raise
    return rows_by_group, bad_groups


def _is_worth_sharing(members: Sequence[Sequence[Row]], min_fraction: float | None) -> bool:
    if min_fraction is None or any(row.images for rows in members for row in rows):
        return False  # equal tokens may stand for different images
    num_inputs = sum(max(0, len(row.tokens) - 1) for rows in members for row in rows)
    saved = num_inputs - sum(map(_num_tree_tokens, members))
    return saved > 0 and saved >= min_fraction * num_inputs


def _num_tree_tokens(rows: Sequence[Row]) -> int:
    return num_tree_tokens([row.tokens[:-1] for row in rows])


def _packed_microbatches(
    rows: Sequence[Row], microbatch_size: int, *, max_tokens: int | None, num_ranks: int
) -> list[Microbatch]:
    bins = plan_microbatches(
        [max(0, len(row.tokens) - 1) for row in rows],
        num_microbatches=1 if max_tokens else -(-len(rows) // microbatch_size),
        max_tokens=max_tokens,
        multiple_of=num_ranks if max_tokens else 1,
    )
    return [make_packed_microbatch([rows[i] for i in indices]) for indices in bins]


def _tree_microbatches(
    members: Sequence[Sequence[Row]],
    microbatch_size: int,
    *,
    max_tokens: int | None,
    num_ranks: int,
) -> list[Microbatch]:
    """Build packed microbatches with trees; members of a group stay together within the limit.

    Without `max_tokens`, the limit is that of `microbatch_size` sequences of the longest length.
    Where each rank has a packed microbatch, it has one with trees as well.
    """
    longest = max(len(row.tokens) for rows in members for row in rows)
    limit = max_tokens or microbatch_size * max(1, longest - 1)
    num_packed = -(-sum(map(len, members)) // microbatch_size)
    multiple_of = num_ranks if max_tokens or num_packed >= num_ranks else 1
    share = -(-sum(map(_num_tree_tokens, members)) // multiple_of)
    parts = [part for rows in members for part in _split_rows(rows, min(limit, max(1, share)))]
    costs, count = list(map(_num_tree_tokens, parts)), 1
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
    order = in_tree_order([row.tokens[:-1] for row in rows])
    for count in range(1, len(rows) + 1):
        ends = [len(rows) * number // count for number in range(count + 1)]
        pieces = [sorted(order[start:end]) for start, end in itertools.pairwise(ends)]
        parts = [[rows[i] for i in piece] for piece in pieces]
        if all(_num_tree_tokens(part) <= max_tokens for part in parts):
            break
    return parts


def _padded_starts(
    rows: Sequence[Row],
    microbatch_size: int,
    pad_multiple: int,
    max_tokens: int | None,
    num_ranks: int,
) -> list[int]:
    """Return the index of the first row of each padded microbatch."""
    if max_tokens is None:
        return list(range(0, len(rows), microbatch_size))
    most_rows = max(1, len(rows) // num_ranks)
    starts, longest = [0], 0
    for i, row in enumerate(rows):
        longest = max(longest, len(row.tokens))
        num_rows = i + 1 - starts[-1]
        num_cells = num_rows * padded_length(longest, multiple=pad_multiple)
        if num_rows > 1 and (num_cells > max_tokens or num_rows > most_rows):
            starts.append(i)
            longest = len(row.tokens)
    return starts


def _lacks_reference(row: Row) -> bool:
    """Return whether the KL penalty of a row needs logprobs that its group does not contain."""
    if row.is_sft:
        return False
    if row.ref_logprobs is None:
        return True
    pairs = zip(row.labels[1:], row.ref_logprobs[1:], strict=True)
    return any(label != IGNORE_INDEX and known == MASKED_LOGPROB for label, known in pairs)


def _count(rows: Sequence[Row], microbatches: Sequence[Microbatch]) -> BatchTotals:
    num_tokens = sum(int(mb.policy_BT.sum()) for mb in microbatches)
    return BatchTotals(
        num_tokens=num_tokens,
        num_sequences=sum(
            not row.is_sft and any(label != IGNORE_INDEX for label in row.labels[1:])
            for row in rows
        ),
        num_sft_tokens=sum(int(mb.trained_BT.sum()) for mb in microbatches) - num_tokens,
        num_distill_tokens=sum(
            int((mb.trained_BT & (mb.distill_token_ids_BTK != PADDED_TEACHER_ID).any(-1)).sum())
            for mb in microbatches
            if mb.distill_token_ids_BTK is not None
        ),
    )


def _summarize(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[Row]],
    microbatches: Sequence[Microbatch],
) -> BatchSummary:
    rows = list(itertools.chain(*members))
    num_inputs = sum(max(0, len(row.tokens) - 1) for row in rows)
    num_computed = sum(mb.num_cells for mb in microbatches)
    num_padded = sum(mb.tokens_BT.numel() for mb in microbatches) - num_inputs
    scores = _mean_and_deviation(
        [torch.tensor(group["scores"], dtype=torch.float64) for group in groups]
    )
    advantages = _mean_and_deviation([mb.advantages_BT[mb.policy_BT] for mb in microbatches])
    return BatchSummary(
        *scores,
        *advantages,
        num_groups=len(groups),
        num_zero_gradient_groups=sum(
            not any(
                row.is_sft or row.distill_token_ids is not None or any(row.advantages)
                for row in rows
            )
            for rows in members
        ),
        num_truncated_rows=sum(row.is_truncated for row in rows),
        num_rows_without_logprobs=sum(row.inference_logprobs is None for row in rows),
        num_rows_of_partial_sampling=sum(row.is_partially_sampled for row in rows),
        num_input_tokens=num_inputs,
        num_computed_tokens=num_computed - num_padded,
        padding_fraction=num_padded / max(1, num_computed),
        unknown_fields=frozenset(name for group in groups for name in unknown_fields(group)),
    )


def _mean_and_deviation(parts: Sequence[Tensor]) -> tuple[float, float]:
    values = torch.cat(list(parts)).double()
    if not values.numel():
        return 0.0, 0.0
    return values.mean().item(), values.std(correction=0).item()


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
