r"""Micro-batches: rows in, shifted tensors of one forward pass out, padded or packed.

    rows [L] --shift_row--> [L-1] --pad---> (B, T)    one sequence per row
                                  \--pack--> (1, T)    all in one row

The causal shift happens in `shift_row` and nowhere else: position t of every tensor is about
predicting token t+1 from tokens 0..t. Right padding needs no attention mask, because a causal
model never looks right; packed sequences are told apart by the attention (`packed_attention`).

Shape suffixes: S sequences of one micro-batch, B its rows, T their length: B = S padded, B = 1
packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.losses.distillation import PADDED_TEACHER_ID, PADDED_TEACHER_LOGPROB
from example_trainer.rows import Row

__all__ = [
    "PAD_MULTIPLE",
    "Microbatch",
    "make_microbatch",
    "make_packed_microbatch",
    "padded_length",
    "shift_row",
]

PAD_MULTIPLE = 64
_PAD_TOKEN = 0  # never attended to and never trained on, so any valid id will do


@dataclass(frozen=True)
class Microbatch:
    """Sequences of one forward pass, shifted; a row each, right-padded, or all in one row."""

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
    """(B, T) bool, tokens of demonstrations; None without any."""
    ref_logprobs_BT: torch.Tensor | None = None
    """(B, T) float32, `MASKED_LOGPROB` where unknown; None without any."""
    distill_token_ids_BTK: torch.Tensor | None = None
    """(B, T, K) int64 what a teacher expects as the label, padded; None without a teacher."""
    distill_logprobs_BTK: torch.Tensor | None = None
    """(B, T, K) float32 the teacher's logprobs of these, padded."""
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) int64 number of the sequence, from 0; None: one sequence per row."""
    position_ids_BT: torch.Tensor | None = None
    """(B, T) int64 position within the sequence; None: the column."""
    sequence_lengths: tuple[int, ...] | None = None
    """[S] tokens of each sequence that has any, in order; None: one sequence per row."""

    @property
    def temperatures_BT(self) -> torch.Tensor:
        """(B, T) sampling temperature of the sequence each token belongs to."""
        if self.sequence_ids_BT is not None:
            return self.temperatures_S[self.sequence_ids_BT]
        return self.temperatures_S[:, None].expand(self.tokens_BT.shape)

    def with_reference(self, reference_BT: torch.Tensor) -> Microbatch:
        """Return the same micro-batch with these reference logprobs where the groups gave none."""
        given_BT = self.ref_logprobs_BT
        if given_BT is not None:
            reference_BT = torch.where(given_BT == MASKED_LOGPROB, reference_BT, given_BT)
        return replace(self, ref_logprobs_BT=reference_BT)

    def to(self, device: str) -> Microbatch:
        """Return the same micro-batch on another device."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


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
    return _tensors([[row] for row in shifted], width)


def make_packed_microbatch(rows: Sequence[Row]) -> Microbatch:
    """Shift rows and put them one after another into the one row of a micro-batch.

    Args:
        rows: Unshifted rows, at least one.
    """
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
    )


def _tensors(packs: Sequence[Sequence[Row]], width: int) -> Microbatch:
    """Turn packs of shifted rows, each a row of the tensors, into a micro-batch without packing."""
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
    )


def _chain(pack: Sequence[Row], field: str, fill: Any) -> list[Any]:
    """Return a field of the rows one after another; a row without it counts as filled."""
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
    """Return (B, T, K) ids and logprobs of the teacher, None when no row has any."""
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
