"""Attention in the row of a prefix tree: each token attends to itself and its ancestors.

On a CPU it is computed block by block (`PrefixTree.blocks`) with the kernels of torch's
`scaled_dot_product_attention`. No pair of tokens is computed twice, and none in vain except in the
blocks of small subtrees, which have a mask. The results of the blocks of one query are combined by
the logarithms of their normalizers, as in ring attention; the backward pass gives each block the
combined normalizer.

On CUDA it is one call of FlexAttention, whose mask compares two numbers per pair of tokens; blocks
without such a pair are skipped.

Shape suffixes: M tokens of the row, H heads, D size of a head.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, for the
combination of blocks; Dong et al. 2024, "Flex Attention", arXiv:2412.05496.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from example_trainer.prefix_tree import AttentionBlock, PrefixTree

_FLEX_BLOCK = 128


def tree_arguments(tree: PrefixTree) -> dict[str, Any]:
    """Return the arguments of a model's forward for the row of a tree."""
    on_gpu = tree.tokens_1M.is_cuda
    return {
        "input_ids": tree.tokens_1M,
        "position_ids": tree.position_ids_1M,
        "prefix_tree": tree,
        "prefix_mask": ancestor_mask(tree.subtree_ends_M) if on_gpu else None,
    }


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: PrefixTree,
    mask: Any = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Return the (1, M, H, D) attention over the ancestors of each token.

    Args:
        query: (1, H, M, D).
        key: (1, H or fewer, M, D).
        value: Shape of `key`.
        tree: The tree of the M tokens.
        mask: `ancestor_mask` of the tree, for CUDA; None on a CPU.
        dropout: Share of the weights that is dropped.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        sliding_window: Number of tokens that a query attends to, with itself; None: all.

    Raises:
        NotImplementedError: dropout, a window shorter than a sequence, or another kind of device.
    """
    if dropout:
        raise NotImplementedError(f"its attention drops a share of {dropout:g} of the weights")
    if sliding_window is not None and sliding_window < tree.longest:
        raise NotImplementedError(
            f"its attention has a window of {sliding_window} tokens, sequences up to {tree.longest}"
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if query.is_cuda:
        flex = _compiled_flex_attention()
        return flex_tree_attention(flex, query, key, value, mask, scaling=scaling)
    if query.device.type != "cpu":
        raise NotImplementedError(f"there is no attention over trees for {query.device.type}")
    out: torch.Tensor = _BlockwiseAttention.apply(query, key, value, tree.blocks, scaling)
    return out.transpose(1, 2)


class _BlockwiseAttention(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """Attention by blocks, (1, H, M, D), for a CPU.

    A query's softmax over several blocks is the average of its results in each block, weighted by
    the blocks' normalizers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: tuple[AttentionBlock, ...],
        scale: float | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        _, heads, length, size = query.shape
        out = query.new_empty((1, length, heads, size), dtype=wide).transpose(1, 2)
        normalizer = query.new_empty((1, length, heads), dtype=wide).transpose(1, 2)
        masks = [_additive_mask(block, query.dtype) for block in blocks]
        for (queries, keys, is_causal, _), mask in zip(blocks, masks, strict=True):
            found, found_normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, is_causal,
                attn_mask=mask, scale=scale,
            )  # fmt: skip
            if queries == keys:
                out[:, :, queries], normalizer[:, :, queries] = found, found_normalizer
                continue
            before = normalizer[:, :, queries]
            weight = torch.sigmoid(found_normalizer - before)
            out[:, :, queries].lerp_(found.to(wide), weight[..., None])
            normalizer[:, :, queries] = torch.logaddexp(before, found_normalizer)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, normalizer)
        ctx.blocks, ctx.masks, ctx.scale = blocks, masks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, normalizer = ctx.saved_tensors
        wide = normalizer.dtype
        grads = [torch.zeros_like(tensor, dtype=wide) for tensor in (query, key, value)]
        for (queries, keys, is_causal, _), mask in zip(ctx.blocks, ctx.masks, strict=True):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys],
                out[:, :, queries], normalizer[:, :, queries], 0.0, is_causal,
                attn_mask=mask, scale=ctx.scale,
            )  # fmt: skip
            for grad, part, of_block in zip(grads, (queries, keys, keys), found, strict=True):
                grad[:, :, part] += of_block
        return (*(grad.to(query.dtype) for grad in grads), None, None)


def _additive_mask(block: AttentionBlock, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the mask of a block as the numbers that the kernels add to the scores."""
    if block.mask_LL is None:
        return None
    zeros = torch.zeros(block.mask_LL.shape, dtype=dtype)
    return zeros.masked_fill_(~block.mask_LL, -torch.inf)[None, None]


def ancestor_mask(subtree_ends_M: torch.Tensor, *, block_size: int = _FLEX_BLOCK) -> Any:
    """Return FlexAttention's block mask for a tree, made without an (M, M) tensor.

    Args:
        subtree_ends_M: (M,) of the tree, on the device of the attention.
        block_size: Tokens of a block of queries and of keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def is_ancestor(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (query < subtree_ends_M[key])

    length = len(subtree_ends_M)
    num_blocks = -(-length // block_size)
    padded = torch.nn.functional.pad(subtree_ends_M, (0, num_blocks * block_size - length))
    ends = padded.view(num_blocks, block_size)
    first = torch.arange(num_blocks, device=subtree_ends_M.device) * block_size
    last = (first + block_size - 1).clamp(max=length - 1)
    # Row: block of queries, column: block of keys.
    some = (first[None] <= last[:, None]) & (first[:, None] < ends.amax(1)[None])
    whole = (last[None] <= first[:, None]) & (last[:, None] < ends.amin(1)[None])
    partial, full = (_block_lists(matrix) for matrix in (some & ~whole, whole))
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=block_size, mask_mod=is_ancestor, seq_lengths=(length, length)
    )


def _block_lists(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (1, 1, Q) numbers and (1, 1, Q, K) indices of the marked columns of each row."""
    counts = matrix.sum(dim=1, dtype=torch.int32)
    indices = matrix.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return counts[None, None], indices.to(torch.int32)[None, None].contiguous()


def flex_tree_attention(
    flex_attention: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *,
    scaling: float | None,
) -> torch.Tensor:
    """Return `tree_attention` by FlexAttention, compiled or not."""
    out: torch.Tensor = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
