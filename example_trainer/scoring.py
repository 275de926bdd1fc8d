"""The policy's logprobs and entropy of a microbatch, and attention in packed rows.

    tokens --backbone--> hidden states --trained positions only, by chunks--> logprobs, entropy
    tree --backbone--> hidden states of its tokens --those of each sequence--> as above

The logits of all tokens are never stored: each chunk is projected, reduced and discarded, and
projected again in the backward pass. Exact up to rounding.

A packed row contains several sequences. Causal attention is computed for each, without a mask and
without a T x T matrix: the cost is the sum of the squares of the lengths. If flash-attn is
installed, the model uses its variable-length kernels instead, through the same arguments.

Shape suffixes: B rows of one microbatch, T their length, N trained positions, D hidden or
head size, H heads, V vocabulary, K targets per token or the teacher's top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.attention_sinks import with_sinks
from example_trainer.batch import Microbatch
from example_trainer.compiled import Opaque, fused
from example_trainer.images import encode_images
from example_trainer.loss import TeacherTokens
from example_trainer.prefix_tree import PrefixTree
from example_trainer.tree_attention import tree_arguments, tree_attention

PACKED_ATTENTION = "atropos_packed"
"""Name under which transformers finds `packed_attention`."""

_UNSUPPORTED = ("softcap", "position_bias")


def register() -> None:
    """Register `packed_attention` with transformers, which does not build a mask for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # It may already have been registered by `leave_attention_uncompiled`.
    if PACKED_ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)


def leave_attention_uncompiled() -> None:
    """Let compiled layers call `packed_attention` as it is, in this process."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))


def packing_arguments(lengths: Sequence[int], *, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model's forward for one packed row, except `position_ids`.

    `lengths` are the lengths of the sequences of the row, in order, each above 0.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return {
        "sequence_lengths": Opaque(tuple(lengths)),
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
    s_aux: torch.Tensor | None = None,
    sequence_lengths: Opaque[tuple[int, ...]] | None = None,
    prefix_tree: PrefixTree | None = None,
    prefix_mask: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence, with the signature that transformers expects.

    Args:
        module: Unused.
        query: (B, H, T, D).
        key: (B, H or fewer, T, D).
        value: Shape of `key`.
        attention_mask: Unused; transformers builds no masks for this implementation.
        dropout: Share of the weights that is dropped.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        sliding_window: Number of tokens that a query attends to, with itself; None: all.
        s_aux: (H,) attention sinks, the score of a key without a value; None: none.
        sequence_lengths: Lengths of the sequences of a single row; None: one sequence per row.
        prefix_tree: Tree of a single row, instead of sequences.
        prefix_mask: See `tree_attention`.
        **others: Further arguments of transformers.

    Returns:
        (B, T, H, D), and None instead of the attention weights.

    Raises:
        NotImplementedError: an argument is not supported.
    """
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"packed attention has no {', '.join(unsupported)}")
    if prefix_tree is not None:
        if s_aux is not None:
            raise NotImplementedError("attention over trees has no sinks")
        out = tree_attention(
            query,
            key,
            value,
            prefix_tree,
            prefix_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
        )
        return out.contiguous(), None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    # The fused kernels of CUDA share heads, but not in float32 or with a mask.
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    shares_heads = groups > 1 and query.is_cuda and is_half and sliding_window is None
    if groups > 1 and not shares_heads:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    lengths = (query.shape[2],) if sequence_lengths is None else sequence_lengths.value
    options = {"dropout_p": dropout, "scale": scaling, "enable_gqa": shares_heads}
    outputs = [
        _attend(q, k, v, sliding_window, s_aux, **options)
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    sinks_H: torch.Tensor | None,
    *,
    scale: float | None,
    **options: Any,
) -> torch.Tensor:
    """Causal attention of one sequence, (B, H, T, D), restricted to a window if there is one."""
    size = query.shape[-1]
    if sinks_H is not None:
        scale = size**-0.5 if scale is None else scale
        query, key, value = with_sinks(query, key, value, sinks_H, scale=scale)
    reach: dict[str, Any] = {"is_causal": True}
    length = query.shape[2]
    if window is not None and window < length:
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance[None, :]
        mask = (distance >= 0) & (distance < window)
        if sinks_H is not None:
            mask[:, 0] = True
        reach = {"attn_mask": mask}
    out = F.scaled_dot_product_attention(query, key, value, scale=scale, **options, **reach)
    return out if sinks_H is None else out[:, :, 1:, :size]


_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
_FUSED_CHUNK_BYTES = 2**30
"""On a GPU with fused kernels, which do not store the logits in float32."""


class LinearLogprobs(NamedTuple):
    """Logprobs of the targets and entropy of each token."""

    logprobs_NK: torch.Tensor
    """(N, K) logprobs of the targets, with gradient; at least float32."""
    entropy_N: torch.Tensor
    """(N,) in nats, with gradient."""
    untempered_N: torch.Tensor | None = None
    """(N,) logprob of the first target at temperature 1, without gradient; None without
    temperatures."""


def auto_chunk_tokens(vocabulary: int, device: torch.device, *, fuses: bool = False) -> int:
    """Return the number of tokens whose float32 logits fit into a fixed memory budget."""
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"])
    if fuses and device.type != "cpu":
        budget = _FUSED_CHUNK_BYTES
    return max(16, budget // (4 * vocabulary))


def linear_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_NK: torch.Tensor,
    *,
    temperatures_N: torch.Tensor | None = None,
    chunk_tokens: int | None = None,
    fuses: bool = False,
) -> LinearLogprobs:
    """Return the logprobs of targets under `softmax((hidden @ weight.T + bias) / temperature)`.

    Args:
        hidden_ND: (N, D) input of the output layer.
        weight_VD: (V, D) weight of the output layer.
        bias_V: (V,) bias of the output layer, or None.
        targets_NK: (N, K) ids, each from 0 to V - 1.
        temperatures_N: (N,) above 0; None: 1.
        chunk_tokens: Tokens projected at a time; None: `auto_chunk_tokens`.
        fuses: Whether to reduce each chunk by a compiled function.
    """
    chunk = chunk_tokens or auto_chunk_tokens(weight_VD.shape[0], hidden_ND.device, fuses=fuses)
    device_type = hidden_ND.device.type
    # The backward pass, outside the autocast context, has to use the same type.
    dtype = hidden_ND.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    logprobs_NK, entropy_N, untempered_N = _Function.apply(
        hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, chunk, dtype, fuses
    )
    has_temperatures = temperatures_N is not None
    return LinearLogprobs(logprobs_NK, entropy_N, untempered_N if has_temperatures else None)


class _Function(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_NK: torch.Tensor,
        temperatures_N: torch.Tensor | None,
        chunk: int,
        dtype: torch.dtype,
        fuses: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        num_tokens, num_targets = targets_NK.shape
        logprobs_NK = hidden_ND.new_empty((num_tokens, num_targets), dtype=wide)
        entropy_N = hidden_ND.new_empty(num_tokens, dtype=wide)
        normalizer_N = hidden_ND.new_empty(num_tokens, dtype=wide)
        has_temperatures = temperatures_N is not None
        untempered_N = hidden_ND.new_empty(num_tokens if has_temperatures else 0, dtype=wide)
        reduce = fused(_reduce) if fuses else _reduce
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight = weight_VD.to(dtype)
            for part in _parts(num_tokens, chunk):
                temperatures = None if temperatures_N is None else temperatures_N[part]
                found = reduce(
                    hidden_ND[part].to(dtype) @ weight.T, bias_V, targets_NK[part], temperatures
                )
                logprobs_NK[part], entropy_N[part], normalizer_N[part] = found[:3]
                if has_temperatures:
                    untempered_N[part] = found[3]
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, normalizer_N, entropy_N
        )
        ctx.chunk, ctx.dtype, ctx.fuses = chunk, dtype, fuses
        ctx.mark_non_differentiable(untempered_N)
        ctx.set_materialize_grads(False)  # losses without entropy skip its gradient
        return logprobs_NK, entropy_N, untempered_N

    @staticmethod
    def backward(
        ctx: Any, grad_NK: torch.Tensor | None, entropy_grad_N: torch.Tensor | None, _: Any
    ) -> tuple[Any, ...]:
        *inputs, normalizer_N, entropy_N = ctx.saved_tensors
        hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N = inputs
        if grad_NK is None:
            grad_NK = torch.zeros_like(targets_NK, dtype=normalizer_N.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = normalizer_N.dtype
        weight = weight_VD.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        slope_of = fused(_slope) if ctx.fuses else _slope
        for part in _parts(len(hidden_ND), ctx.chunk):
            hidden = hidden_ND[part]
            slope = slope_of(
                hidden.to(ctx.dtype) @ weight.T,
                bias_V,
                targets_NK[part],
                None if temperatures_N is None else temperatures_N[part],
                normalizer_N[part],
                grad_NK[part],
                None if entropy_grad_N is None else (entropy_N[part], entropy_grad_N[part]),
            )
            narrow = slope.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (narrow @ weight).to(hidden_ND.dtype)
            if grad_weight is not None:
                if ctx.dtype == wide:
                    grad_weight.addmm_(narrow.T, hidden.to(wide))
                else:
                    grad_weight += narrow.T @ hidden.to(ctx.dtype)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            *(None,) * 5,
        )


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_tokens, chunk)]


def _reduce(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return logprobs, entropy, normalizer and untempered logprob of a chunk, in its logits."""
    logits, untempered = _biased(logits, bias), None
    if temperatures is not None:
        untempered = logits.gather(-1, targets[:, :1])[:, 0] - logits.logsumexp(-1)
        logits /= temperatures[:, None]
    normalizer = logits.logsumexp(-1)
    logits -= normalizer[:, None]
    return logits.gather(-1, targets), -(logits.exp() * logits).sum(-1), normalizer, untempered


def _slope(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    normalizer: torch.Tensor,
    grad: torch.Tensor,
    entropy_and_grad: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the gradient with respect to the logits of a chunk, in place of them.

    That of a logprob is `onehot - p`, that of the entropy H is `-p (log p + H)`.
    """
    slope = _biased(logits, bias)
    if temperatures is not None:
        slope /= temperatures[:, None]
    slope.sub_(normalizer[:, None])
    factor = -grad.sum(-1, keepdim=True)
    if entropy_and_grad is not None:
        entropy, entropy_grad = entropy_and_grad
        factor = factor - entropy_grad[:, None] * (slope + entropy[:, None])
    slope.exp_().mul_(factor)
    slope.scatter_add_(-1, targets, grad.to(slope.dtype))
    if temperatures is not None:
        slope /= temperatures[:, None]
    return slope


def _biased(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return logits in float32 or wider, with the bias; the same tensor if they are already."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias
    return logits


def token_logprobs_BT(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the (B, T) logprobs of the labels, 0 where ignored; at least float32.

    `temperatures`, (B,) or (B, T), divide the logits; values of at most 0 count as 1.
    """
    logits_BTV = _tempered(logits_BTV, temperatures)
    nll = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -nll.view_as(labels_BT)


def token_entropy_BT(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the (B, T) entropy in nats where labels are trained, else 0; at least float32."""
    logprobs_BTV = _tempered(logits_BTV, temperatures).log_softmax(-1)
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    return torch.where(labels_BT != IGNORE_INDEX, entropy_BT, 0.0)


def topk_logprobs_BTK(
    logits_BTV: torch.Tensor, ids_BTK: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the (B, T, K) logprobs of ids under `logits / temperature`; at least float32.

    Negative ids are padding and get the logprob of id 0.

    Raises:
        GroupError: an id is outside the vocabulary.
    """
    require_known_ids(ids_BTK, vocabulary=logits_BTV.shape[-1])
    logits_BTV = _at_least_float32(logits_BTV) / temperature
    chosen_BTK = logits_BTV.gather(-1, ids_BTK.clamp(min=0))
    return chosen_BTK - logits_BTV.logsumexp(-1, keepdim=True)


def require_known_ids(ids_BTK: torch.Tensor, *, vocabulary: int) -> None:
    """Raise `GroupError` if a teacher's id is outside the student's vocabulary."""
    largest = int(ids_BTK.max()) if ids_BTK.numel() else -1
    if largest >= vocabulary:
        raise GroupError(
            f"distill_token_ids: id {largest}, the model's vocabulary has {vocabulary} "
            "entries; teacher and student must share a tokenizer"
        )


def _tempered(logits_BTV: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """Return logits over (B,) or (B, T) temperatures, of which values of at most 0 count as 1."""
    logits_BTV = _at_least_float32(logits_BTV)
    if temperatures is None:
        return logits_BTV
    divisor = torch.where(temperatures > 0, temperatures, 1.0).to(logits_BTV.dtype)
    return logits_BTV / divisor.view(len(logits_BTV), -1, 1)


def _at_least_float32(logits_BTV: torch.Tensor) -> torch.Tensor:
    is_half = logits_BTV.dtype in (torch.bfloat16, torch.float16)
    return logits_BTV.float() if is_half else logits_BTV


class TokenScores(NamedTuple):
    """Outputs of the policy for the loss and the diagnostics."""

    logprobs_BT: torch.Tensor
    """(B, T) logprobs of the labels, with gradient; 0 where ignored."""
    entropy_BT: torch.Tensor | None
    """(B, T) in nats, with gradient, 0 where ignored; None with whole logits, unless needed."""
    teacher: TeacherTokens | None
    """None in a microbatch without teacher logprobs."""
    untempered_BT: torch.Tensor | None = None
    """(B, T) logprobs of the labels at temperature 1, without gradient, 0 where ignored; None if
    every temperature is 1."""


def model_inputs(model: Any, microbatch: Microbatch) -> dict[str, Any]:
    """Return the arguments of the model's forward for a packed or padded microbatch."""
    tokens_BT, positions_BT = microbatch.tokens_BT, microbatch.position_ids_BT
    inputs: dict[str, Any] = {"input_ids": tokens_BT}
    if microbatch.sequence_lengths is not None:
        inputs["position_ids"] = positions_BT
        inputs |= packing_arguments(microbatch.sequence_lengths, device=tokens_BT.device)
    if microbatch.pixels_PD is not None:
        assert microbatch.image_grids_I3 is not None
        assert microbatch.image_positions_3BT is not None
        if positions_BT is None:
            columns = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            positions_BT = columns.expand_as(tokens_BT)
        # The first of the four are those of the text, by which masks are made.
        inputs["position_ids"] = torch.cat([positions_BT[None], microbatch.image_positions_3BT])
        inputs["mm_encoder_outputs"] = encode_images(
            model, microbatch.pixels_PD, microbatch.image_grids_I3, microbatch.image_places
        )
    return inputs


class PolicyScorer(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Scores given tokens under a causal language model without storing its logits.

    The output layer is applied to trained positions only, a chunk at a time. Logits are divided by
    the sampling temperatures, since advantages refer to the policy that sampled. The scorer is a
    module around the model, so that it can be sharded or wrapped as a whole.

    Args:
        model: A transformers causal language model.
        distill_temperature: Divisor of the logits that are compared with a teacher's.
        whole_logits: Whether to compute all logits at once, for models whose head is not linear.
        shares_prefixes: Whether to compute the tree of a microbatch, if it has one, instead of its
            packed sequences.
        chunk_tokens: Tokens projected at a time; None: `auto_chunk_tokens`.
        fuses: Whether to reduce the logits by compiled functions.
        needs_entropy: Whether the entropy is needed with whole logits too.
    """

    def __init__(
        self,
        model: Any,
        *,
        distill_temperature: float = 1.0,
        whole_logits: bool = False,
        shares_prefixes: bool = False,
        chunk_tokens: int | None = None,
        fuses: bool = False,
        needs_entropy: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._distill_temperature = distill_temperature
        self._whole_logits = whole_logits
        self.shares_prefixes = shares_prefixes
        self._chunk_tokens = chunk_tokens
        self.fuses = fuses
        self._needs_entropy = needs_entropy

    def forward(self, microbatch: Microbatch) -> TokenScores:
        """Score a microbatch; raises `GroupError` if a teacher's id is outside the vocabulary."""
        if self._whole_logits:
            return self._from_logits(microbatch)
        mask_BT = microbatch.labels_BT != IGNORE_INDEX
        hidden_ND = self._hidden_ND(microbatch, mask_BT)
        head = self.model.get_output_embeddings()
        found = linear_logprobs(
            hidden_ND,
            head.weight,
            head.bias,
            microbatch.labels_BT[mask_BT][:, None],
            temperatures_N=microbatch.temperatures_BT[mask_BT]
            if _is_tempered(microbatch)
            else None,
            chunk_tokens=self._chunk_tokens,
            fuses=self.fuses,
        )
        return TokenScores(
            _spread(found.logprobs_NK[:, 0], mask_BT),
            _spread(found.entropy_N, mask_BT),
            self._teacher(microbatch, hidden_ND, head, mask_BT),
            None if found.untempered_N is None else _spread(found.untempered_N, mask_BT),
        )

    def _hidden_ND(self, microbatch: Microbatch, mask_BT: torch.Tensor) -> torch.Tensor:
        """Return the (N, D) hidden states of the positions in the mask."""
        tree = microbatch.tree
        hidden: torch.Tensor
        if tree is None or not self.shares_prefixes:
            found = self.model.base_model(**model_inputs(self.model, microbatch))
            hidden = found.last_hidden_state
            return hidden[mask_BT]
        hidden = self.model.base_model(**tree_arguments(tree)).last_hidden_state
        return hidden[0].index_select(0, tree.nodes_T[mask_BT[0]])

    def _teacher(
        self, microbatch: Microbatch, hidden_ND: torch.Tensor, head: Any, mask_BT: torch.Tensor
    ) -> TeacherTokens | None:
        ids_BTK, teacher_BTK = microbatch.distill_token_ids_BTK, microbatch.distill_logprobs_BTK
        if ids_BTK is None or teacher_BTK is None:
            return None
        require_known_ids(ids_BTK, vocabulary=head.weight.shape[0])
        found = linear_logprobs(
            hidden_ND,
            head.weight,
            head.bias,
            ids_BTK[mask_BT].clamp(min=0),
            temperatures_N=torch.full_like(
                hidden_ND[:, 0], self._distill_temperature, dtype=torch.float32
            ),
            chunk_tokens=self._chunk_tokens,
            fuses=self.fuses,
        )
        return TeacherTokens(ids_BTK, teacher_BTK, _spread(found.logprobs_NK, mask_BT))

    def _from_logits(self, microbatch: Microbatch) -> TokenScores:
        logits_BTV = self.model(**model_inputs(self.model, microbatch)).logits
        temperatures_BT, untempered_BT = None, None
        if _is_tempered(microbatch):
            temperatures_BT = microbatch.temperatures_BT
            untempered_BT = token_logprobs_BT(logits_BTV.detach(), microbatch.labels_BT)
        logprobs_BT = token_logprobs_BT(logits_BTV, microbatch.labels_BT, temperatures_BT)
        entropy_BT = None
        if self._needs_entropy:
            entropy_BT = token_entropy_BT(logits_BTV, microbatch.labels_BT, temperatures_BT)
        ids_BTK, teacher_BTK = microbatch.distill_token_ids_BTK, microbatch.distill_logprobs_BTK
        if ids_BTK is None or teacher_BTK is None:
            return TokenScores(logprobs_BT, entropy_BT, None, untempered_BT)
        student_BTK = topk_logprobs_BTK(logits_BTV, ids_BTK, temperature=self._distill_temperature)
        teacher = TeacherTokens(ids_BTK, teacher_BTK, student_BTK)
        return TokenScores(logprobs_BT, entropy_BT, teacher, untempered_BT)


def at_sampling_temperature(
    microbatch: Microbatch, scores: TokenScores, *, has_raw_logprobs: bool
) -> Microbatch:
    r"""Return the microbatch with reference and raw engine logprobs at the sampling temperatures.

    The trainer's logprobs are at the sampling temperature T, those of a reference model and of an
    engine with `has_raw_logprobs` at temperature 1. The latter are shifted by the effect of T on
    the trainer's: `mu_T = mu_1 + sg(l_T - l_1)`. That is exact if both have the same weights, and
    preserves the difference that corrections and the KL penalty use: `l_T - mu_T = l_1 - mu_1`.
    """
    if scores.untempered_BT is None:
        return microbatch
    shift_BT = scores.logprobs_BT.detach() - scores.untempered_BT

    def moved(logprobs_BT: torch.Tensor | None) -> torch.Tensor | None:
        if logprobs_BT is None:
            return None
        is_known = logprobs_BT != MASKED_LOGPROB
        return torch.where(is_known, logprobs_BT + shift_BT.to(logprobs_BT.dtype), logprobs_BT)

    inference_BT = microbatch.inference_logprobs_BT
    return replace(
        microbatch,
        inference_logprobs_BT=moved(inference_BT) if has_raw_logprobs else inference_BT,
        ref_logprobs_BT=moved(microbatch.ref_logprobs_BT),
    )


def _is_tempered(microbatch: Microbatch) -> bool:
    return bool((microbatch.temperatures_S != 1.0).any())


def _spread(values: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Scatter (N, ...) values of the trained positions to (B, T, ...), 0 elsewhere."""
    empty = values.new_zeros((*mask_BT.shape, *values.shape[1:]))
    return empty.index_put(torch.nonzero(mask_BT, as_tuple=True), values)
