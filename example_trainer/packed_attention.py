"""Attention within each sequence of a packed row, without a mask and without a T x T matrix.

A packed row holds sequences one after another. The queries of one only ever meet the keys of the
same one: each is a causal attention of its own, so nothing can leak and the work is the sum of the
squares of the lengths, not the square of the sum. With flash-attn installed the model uses its
variable-length kernels instead, by way of the same arguments.

Shape suffixes: B rows, H heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["PACKED_ATTENTION", "packed_attention", "packing_arguments", "register"]

PACKED_ATTENTION = "atropos_packed"
"""Name under which transformers finds `packed_attention`."""

_NOT_DONE = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Make the implementation known to transformers, which then builds no mask for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)


def packing_arguments(lengths: Sequence[int], *, device: torch.device) -> dict[str, Any]:
    """Return what a model's forward is told about the one row it gets, beside `position_ids`.

    Args:
        lengths: Tokens of each sequence of the row, in order, each above 0.
        device: Where the model is.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return {
        "sequence_lengths": tuple(lengths),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_lengths: tuple[int, ...] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each sequence; the signature is transformers'.

    Args:
        module: The layer that asks.
        query: (B, H, T, D).
        key: (B, H or fewer, T, D).
        value: As `key`.
        attention_mask: None; masks are not built for this implementation.
        dropout: Share of the weights that is dropped.
        scaling: Factor of the scores; None: one over the root of D.
        sliding_window: Tokens a query looks back on, itself included; None: all.
        sequence_lengths: Tokens of each sequence of the only row; None: each row is one sequence.
        **others: What else transformers passes.

    Returns:
        (B, T, H, D) and None in the place of the weights.

    Raises:
        NotImplementedError: the layer asks for more than this.
    """
    asked = [name for name in _NOT_DONE if others.get(name) is not None]
    if asked:
        raise NotImplementedError(f"packed attention has no {', '.join(asked)}")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    lengths = sequence_lengths or (query.shape[2],)
    outputs = [
        F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, **_reach(q, sliding_window)
        )
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


def _reach(query: torch.Tensor, window: int | None) -> dict[str, Any]:
    """Return how far back the queries of one sequence look."""
    length = query.shape[2]
    if window is None or window >= length:
        return {"is_causal": True}
    distance = torch.arange(length, device=query.device)
    distance = distance[:, None] - distance[None, :]
    return {"attn_mask": (distance >= 0) & (distance < window)}
