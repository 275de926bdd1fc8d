"""The policy's logprobs and entropy of a microbatch, and attention in packed rows.

    tokens --backbone--> hidden states --trained positions only, by chunks--> logprobs, entropy

From hidden states the logits of all tokens never exist: each chunk is projected, reduced and thrown
away, and projected again in the backward pass. Exact up to rounding.

A packed row holds sequences one after another. Each is a causal attention of its own, without a
mask and without a T x T matrix: the work is the sum of the squares of the lengths. With flash-attn
installed the model uses its variable-length kernels instead, through the same arguments.

Shape suffixes: B rows of one microbatch, T their length, N trained positions, D hidden or
head size, H heads, V vocabulary, K targets per token or the teacher's choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.batch import Microbatch
from example_trainer.loss import TeacherTokens

PACKED_ATTENTION = "atropos_packed"
"""Name under which transformers finds `packed_attention`."""

_NOT_DONE = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Make the implementation known to transformers, which then builds no mask for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)


def packing_arguments(lengths: Sequence[int], *, device: torch.device) -> dict[str, Any]:
    """Return what a model's forward gets for its one row in addition to `position_ids`.

    `lengths` are the tokens of each sequence of the row, in order, each above 0.
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


_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}


class LinearLogprobs(NamedTuple):
    """What is known of each token's distribution."""

    logprobs_NK: torch.Tensor
    """(N, K) of the targets, with gradient; float32 at least."""
    entropy_N: torch.Tensor
    """(N,) in nats, without gradient."""
    untempered_N: torch.Tensor | None = None
    """(N,) of the first target at temperature 1, without gradient; None without temperatures."""


def auto_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return so many tokens that their float32 logits take a bounded part of memory."""
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"])
    return max(16, budget // (4 * vocabulary))


def linear_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_NK: torch.Tensor,
    *,
    temperatures_N: torch.Tensor | None = None,
    chunk_tokens: int | None = None,
) -> LinearLogprobs:
    """Return the logprobs of targets under `softmax((hidden @ weight.T + bias) / temperature)`.

    Args:
        hidden_ND: (N, D) what the output layer gets.
        weight_VD: (V, D) of the output layer.
        bias_V: (V,) of the output layer, None without.
        targets_NK: (N, K) ids, each from 0 to V - 1.
        temperatures_N: (N,) above 0; None: 1.
        chunk_tokens: Tokens projected at a time; None: what fits a fixed budget.
    """
    chunk = chunk_tokens or auto_chunk_tokens(weight_VD.shape[0], hidden_ND.device)
    device_type = hidden_ND.device.type
    # Autocast is over when the backward pass projects again, so its type is settled here.
    dtype = hidden_ND.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    logprobs_NK, entropy_N, untempered_N = _Function.apply(
        hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, chunk, dtype
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        num_tokens, num_targets = targets_NK.shape
        logprobs_NK = hidden_ND.new_empty((num_tokens, num_targets), dtype=wide)
        entropy_N = hidden_ND.new_empty(num_tokens, dtype=wide)
        normaliser_N = hidden_ND.new_empty(num_tokens, dtype=wide)
        has_temperatures = temperatures_N is not None
        untempered_N = hidden_ND.new_empty(num_tokens if has_temperatures else 0, dtype=wide)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight = weight_VD.to(dtype)
            for part in _parts(num_tokens, chunk):
                logits = _logits(hidden_ND[part], weight, bias_V, None, part, wide)
                if temperatures_N is not None:
                    chosen = logits.gather(-1, targets_NK[part, :1])[:, 0]
                    untempered_N[part] = chosen - logits.logsumexp(-1)
                    logits /= temperatures_N[part, None]
                normaliser_N[part] = logits.logsumexp(-1)
                logits -= normaliser_N[part, None]
                logprobs_NK[part] = logits.gather(-1, targets_NK[part])
                entropy_N[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, normaliser_N
        )
        ctx.chunk, ctx.dtype = chunk, dtype
        ctx.mark_non_differentiable(entropy_N, untempered_N)
        return logprobs_NK, entropy_N, untempered_N

    @staticmethod
    def backward(ctx: Any, grad_NK: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, targets_NK, temperatures_N, normaliser_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = normaliser_N.dtype
        weight = weight_VD.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for part in _parts(len(hidden_ND), ctx.chunk):
            hidden, grad = hidden_ND[part], grad_NK[part]
            logits = _logits(hidden, weight, bias_V, temperatures_N, part, wide)
            slope = logits.sub_(normaliser_N[part, None]).exp_()
            slope *= -grad.sum(-1, keepdim=True)
            slope.scatter_add_(-1, targets_NK[part], grad.to(wide))
            if temperatures_N is not None:
                slope /= temperatures_N[part, None]
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
            *(None,) * 4,
        )


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_tokens, chunk)]


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperatures: torch.Tensor | None,
    part: slice,
    wide: torch.dtype,
) -> torch.Tensor:
    """Return the logits of one chunk, divided by the temperatures; the caller may change them."""
    logits = (hidden.to(weight.dtype) @ weight.T).to(wide)
    if bias is not None:
        logits += bias
    if temperatures is not None:
        logits /= temperatures[part, None]
    return logits


def token_logprobs_BT(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logprob of each label, 0 where ignored; float32 at least.

    Args:
        logits_BTV: (B, T, V) of any float type.
        labels_BT: (B, T) ids or `IGNORE_INDEX`.
        temperatures: (B,) or (B, T) divides the logits; None or values at most 0 leave them as
            they are.
    """
    logits_BTV = _at_least_float32(logits_BTV)
    if temperatures is not None:
        divisor = torch.where(temperatures > 0, temperatures, 1.0).to(logits_BTV.dtype)
        logits_BTV = logits_BTV / divisor.view(len(labels_BT), -1, 1)
    nll = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -nll.view_as(labels_BT)


def topk_logprobs_BTK(
    logits_BTV: torch.Tensor, ids_BTK: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the logprob of each given id under `logits / temperature`; float32 at least.

    Args:
        logits_BTV: (B, T, V) of any float type.
        ids_BTK: (B, T, K) ids; negative ones are padding and get the logprob of id 0.
        temperature: Divides the logits.

    Raises:
        GroupError: an id is outside the vocabulary.
    """
    require_known_ids(ids_BTK, vocabulary=logits_BTV.shape[-1])
    logits_BTV = _at_least_float32(logits_BTV) / temperature
    chosen_BTK = logits_BTV.gather(-1, ids_BTK.clamp(min=0))
    return chosen_BTK - logits_BTV.logsumexp(-1, keepdim=True)


def require_known_ids(ids_BTK: torch.Tensor, *, vocabulary: int) -> None:
    """Raise `GroupError` where a teacher's id is one that the student has no logit for."""
    largest = int(ids_BTK.max()) if ids_BTK.numel() else -1
    if largest >= vocabulary:
        raise GroupError(
            f"distill_token_ids: id {largest}, the model's vocabulary has {vocabulary} "
            "entries; teacher and student must share a tokenizer"
        )


def _at_least_float32(logits_BTV: torch.Tensor) -> torch.Tensor:
    is_half = logits_BTV.dtype in (torch.bfloat16, torch.float16)
    return logits_BTV.float() if is_half else logits_BTV


class TokenScores(NamedTuple):
    """What the loss and the diagnostics want to know of the policy."""

    logprobs_BT: torch.Tensor
    """(B, T) of the labels, with gradient; 0 where ignored."""
    entropy_BT: torch.Tensor | None
    """(B, T) in nats, without gradient, 0 where ignored; None where logits were whole."""
    teacher: TeacherTokens | None
    """The teacher's choices; None in a micro-batch without any."""
    untempered_BT: torch.Tensor | None = None
    """(B, T) of the labels at temperature 1, without gradient, 0 where ignored; None where every
    temperature is 1, and `logprobs_BT` are those."""


def packed_inputs(microbatch: Microbatch) -> dict[str, Any]:
    """Return the arguments of the model's forward for a micro-batch of either kind."""
    inputs: dict[str, Any] = {"input_ids": microbatch.tokens_BT}
    if microbatch.sequence_lengths is not None:
        device = microbatch.tokens_BT.device
        inputs["position_ids"] = microbatch.position_ids_BT
        inputs |= packing_arguments(microbatch.sequence_lengths, device=device)
    return inputs


class PolicyScorer(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A causal language model asked about given tokens, never about its whole logits.

    The output layer sees trained positions only, a chunk at a time. It is a module around the
    model, so that whatever shards or wraps modules may take it as a whole.

    Logits are divided by the sampling temperatures: the policy that sampled is the one whose
    logprobs an advantage multiplies.

    Args:
        model: A transformers causal language model.
        distill_temperature: Divides the logits that are compared with a teacher's.
        whole_logits: Compute all logits at once, for models whose head is more than a linear layer.
        chunk_tokens: Tokens projected at a time; None: what fits a fixed budget.
    """

    def __init__(
        self,
        model: Any,
        *,
        distill_temperature: float = 1.0,
        whole_logits: bool = False,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._distill_temperature = distill_temperature
        self._whole_logits = whole_logits
        self._chunk_tokens = chunk_tokens

    def forward(self, microbatch: Microbatch) -> TokenScores:
        """Score a micro-batch.

        Raises:
            GroupError: a teacher's id is outside the vocabulary.
        """
        if self._whole_logits:
            return self._from_logits(microbatch)
        hidden_BTD = self.model.base_model(**packed_inputs(microbatch)).last_hidden_state
        mask_BT = microbatch.labels_BT != IGNORE_INDEX
        hidden_ND = hidden_BTD[mask_BT]
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
        )
        return TokenScores(
            _spread(found.logprobs_NK[:, 0], mask_BT),
            _spread(found.entropy_N, mask_BT),
            self._teacher(microbatch, hidden_ND, head, mask_BT),
            None if found.untempered_N is None else _spread(found.untempered_N, mask_BT),
        )

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
        )
        return TeacherTokens(ids_BTK, teacher_BTK, _spread(found.logprobs_NK, mask_BT))

    def _from_logits(self, microbatch: Microbatch) -> TokenScores:
        logits_BTV = self.model(**packed_inputs(microbatch)).logits
        temperatures_BT, untempered_BT = None, None
        if _is_tempered(microbatch):
            temperatures_BT = microbatch.temperatures_BT
            untempered_BT = token_logprobs_BT(logits_BTV.detach(), microbatch.labels_BT)
        logprobs_BT = token_logprobs_BT(logits_BTV, microbatch.labels_BT, temperatures_BT)
        ids_BTK, teacher_BTK = microbatch.distill_token_ids_BTK, microbatch.distill_logprobs_BTK
        if ids_BTK is None or teacher_BTK is None:
            return TokenScores(logprobs_BT, None, None, untempered_BT)
        student_BTK = topk_logprobs_BTK(logits_BTV, ids_BTK, temperature=self._distill_temperature)
        teacher = TeacherTokens(ids_BTK, teacher_BTK, student_BTK)
        return TokenScores(logprobs_BT, None, teacher, untempered_BT)


def at_sampling_temperature(
    microbatch: Microbatch, scores: TokenScores, *, has_raw_logprobs: bool
) -> Microbatch:
    r"""Return the micro-batch with the others' logprobs at the temperatures of sampling.

    Those of a reference model are at temperature 1, and those of an engine may be. The trainer's
    own logprobs are at the sampling temperature T, so each is moved by what T changes for the
    trainer: `mu_T = mu_1 + sg(l_T - l_1)`. That is exact where both have the same weights, and
    keeps the difference between them, which corrections weigh and the KL penalty estimates:
    `l_T - mu_T = l_1 - mu_1`.

    Args:
        microbatch: As the groups gave it.
        scores: Of the trainer.
        has_raw_logprobs: Whether the engine's logprobs are before temperature scaling.
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
    """Put values of the trained positions, (N, ...), in their places; (B, T, ...), 0 elsewhere."""
    empty = values.new_zeros((*mask_BT.shape, *values.shape[1:]))
    return empty.index_put(torch.nonzero(mask_BT, as_tuple=True), values)
