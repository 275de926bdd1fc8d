"""Attention sinks, as those of GPT-OSS, for attention functions that do not have them.

A sink is the score of a key without a value: a head that finds nothing attends to it. Its score
does not depend on the query, but is learned for each head.

Shapes: B rows, H query heads, J key-value heads, T tokens, D size of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["MORE_DIMENSIONS", "with_sinks"]

MORE_DIMENSIONS = 8
"""Dimensions added to those of a head; the fused kernels need a multiple of 8."""


def with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks_H: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values with the sinks as a key before the others.

    The score stands in one of the further dimensions: in the query the sink of its head, in the key
    before the others 1, in the other keys 0. A query before the others keeps causal attention
    aligned; in the result, it and the further dimensions have no meaning.

    Args:
        query: (B, H, T, D).
        key: (B, J, T, D).
        value: Shape of `key`.
        sinks_H: (H,) sinks, with gradient.
        scale: Factor of the scores, which the sinks do not have.

    Returns:
        (B, H, 1 + T, D + `MORE_DIMENSIONS`), and twice the same with J.
    """
    size = query.shape[-1]
    query, key, value = (F.pad(x, (0, MORE_DIMENSIONS, 1, 0)) for x in (query, key, value))
    query[..., size] = (sinks_H.to(query.dtype) / scale)[None, :, None]
    key[:, :, 0, size] = 1.0
    return query, key, value
