"""Sampling of one token per row from the logits of a model, and the logprobs of the tokens.

Shapes: `M` rows (one per sequence), `V` vocabulary, `K` most likely tokens, `D` distinct tokens.

The random number of a token comes from the generator of its sequence, so that a sequence with a
seed has the same tokens whatever runs at the same time, apart from rounding of the logits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy, as in vLLM."""


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of one sequence; filters apply after the temperature."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    """Minimum probability, relative to that of the most likely token."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits before the temperature."""
    allowed_ids: tuple[int, ...] | None = None
    """[A] the only tokens that can be sampled; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the completion cannot have, each at least one token."""
    min_tokens: int = 0
    """Number of tokens before which `held_ids` are excluded, unless nothing else is allowed."""
    held_ids: frozenset[int] = frozenset()
    """Tokens that would end the completion."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of prompt and completion, and multiplies negative ones."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the completion has it."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the completion has."""

    @cached_property
    def allowed_A(self) -> torch.Tensor:
        return torch.tensor(self.allowed_ids)

    @property
    def adjusts(self) -> bool:
        """Whether logits change for other reasons than temperature and filters."""
        return (
            bool(self.logit_bias)
            or self.allowed_ids is not None
            or bool(self.bad_words)
            or self.min_tokens > 0
            or self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        """Whether a filter can exclude tokens."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


class PastTokens(NamedTuple):
    """Tokens of a sequence so far."""

    prompt_D: torch.Tensor
    """Distinct tokens of the prompt, on the CPU."""
    counts: Mapping[int, int]
    """Number of times that the completion has a token."""
    tokens: Sequence[int]
    """[C] of the completion."""


class SampledRows(NamedTuple):
    """One sampled token per row, on the host."""

    tokens: list[int]
    """[M]"""
    logprobs: list[float]
    """[M]"""
    top_tokens: list[list[int]]
    """[M][K] most likely tokens in descending order; empty lists if none were requested."""
    top_logprobs: list[list[float]]
    """[M][K]"""


def sample_rows(
    logits_MV: torch.Tensor,
    settings: Sequence[SamplingSettings],
    pasts: Sequence[PastTokens],
    generators: Sequence[random.Random],
    *,
    num_top: int,
    is_processed: bool,
) -> SampledRows:
    """Sample one token per row.

    Args:
        logits_MV: Logits of the model; not modified.
        settings: [M]
        pasts: [M]
        generators: [M] one number is drawn from each, also for greedy rows.
        num_top: K, the most likely tokens to return as well.
        is_processed: Whether logprobs are those of the sampling distribution (bias, penalties,
            temperature and filters), instead of the model's own.
    """
    raw_MV = logits_MV.float()
    scores_MV = filter_logits(raw_MV, settings, pasts)
    logprobs_MV = torch.log_softmax(scores_MV, dim=-1)
    uniforms = [generator.random() for generator in generators]
    tokens_M = _draw(logprobs_MV, settings, uniforms)
    is_same = is_processed or scores_MV is raw_MV
    returned_MV = logprobs_MV if is_same else torch.log_softmax(raw_MV, dim=-1)
    chosen_M = returned_MV.gather(1, tokens_M.unsqueeze(1)).squeeze(1)
    top_logprobs: list[list[float]] = [[] for _ in settings]
    top_tokens: list[list[int]] = [[] for _ in settings]
    if num_top:
        top = returned_MV.topk(min(num_top, returned_MV.shape[1]), dim=-1)
        top_tokens, top_logprobs = top.indices.tolist(), top.values.tolist()
    return SampledRows(tokens_M.tolist(), chosen_M.tolist(), top_tokens, top_logprobs)


def filter_logits(
    logits_MV: torch.Tensor, settings: Sequence[SamplingSettings], pasts: Sequence[PastTokens]
) -> torch.Tensor:
    """Return the logits that are sampled from; those of excluded tokens are minus infinity.

    Temperature and filters do not apply to greedy rows.
    """
    device = logits_MV.device
    scores_MV = logits_MV
    if any(each.adjusts for each in settings):
        scores_MV = logits_MV.clone()
        for scores_V, each, past in zip(scores_MV, settings, pasts, strict=True):
            _adjust(scores_V, each, past)
    temperatures = [1.0 if each.is_greedy else each.temperature for each in settings]
    if any(value != 1.0 for value in temperatures):
        scores_MV = scores_MV / torch.tensor(temperatures, device=device).unsqueeze(1)
    rows = [row for row, each in enumerate(settings) if each.truncates]
    if not rows:
        return scores_MV
    scores_MV = scores_MV.clone() if scores_MV is logits_MV else scores_MV
    index_R = torch.tensor(rows, device=device)
    scores_MV[index_R] = _truncate(scores_MV[index_R], [settings[row] for row in rows])
    return scores_MV


def _adjust(scores_V: torch.Tensor, settings: SamplingSettings, past: PastTokens) -> None:
    """Apply everything before the temperature to the logits of a row, in the order of vLLM."""

    def on_device(values: Sequence[float], dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.tensor(values, device=scores_V.device, dtype=dtype)

    if settings.allowed_ids is not None:
        excluded_V = torch.ones_like(scores_V, dtype=torch.bool)
        excluded_V[settings.allowed_A.to(scores_V.device)] = False
        scores_V.masked_fill_(excluded_V, -torch.inf)
    if settings.bad_words:
        scores_V[on_device(_last_of_bad_words(settings.bad_words, past.tokens))] = -torch.inf
    if len(past.tokens) < settings.min_tokens and settings.held_ids:
        held_V = scores_V.index_fill(0, on_device(list(settings.held_ids)), -torch.inf)
        if held_V.max() > -torch.inf:  # else a grammar allows nothing but the end
            scores_V.copy_(held_V)
    if settings.logit_bias:
        biases = on_device(list(settings.logit_bias.values()), scores_V.dtype)
        scores_V[on_device(list(settings.logit_bias))] += biases
    if settings.repetition_penalty != 1:
        # A token of both is twice in the index, and gets the same value twice.
        index = torch.cat([past.prompt_D.to(scores_V.device), on_device(list(past.counts))])
        before, penalty = scores_V[index], settings.repetition_penalty
        scores_V[index] = torch.where(before > 0, before / penalty, before * penalty)
    if past.counts and (settings.frequency_penalty or settings.presence_penalty):
        counts = on_device(list(past.counts.values()), scores_V.dtype)
        penalties = settings.frequency_penalty * counts + settings.presence_penalty
        scores_V[on_device(list(past.counts))] -= penalties


def _last_of_bad_words(words: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> list[int]:
    """Return the last token of each word whose other tokens end the completion."""
    return [
        last
        for *first, last in words
        if len(first) <= len(tokens) and list(tokens[len(tokens) - len(first) :]) == first
    ]


def _truncate(scores_RV: torch.Tensor, settings: Sequence[SamplingSettings]) -> torch.Tensor:
    """Apply top-k, then top-p among the tokens left, then min-p."""
    num_tokens = scores_RV.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=scores_RV.device).unsqueeze(1)

    sorted_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    limits_R1 = column([each.top_k or num_tokens for each in settings])
    ranks_1V = torch.arange(num_tokens, device=scores_RV.device).unsqueeze(0)
    excluded_RV = ranks_1V >= limits_R1
    probs_RV = sorted_RV.masked_fill(excluded_RV, -torch.inf).softmax(dim=-1)
    # The token that crosses the limit is the last one kept.
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    excluded_RV = excluded_RV | (before_RV >= column([each.top_p for each in settings]))
    floors_R1 = column([each.min_p for each in settings]) * probs_RV[:, :1]
    excluded_RV = excluded_RV | (probs_RV < floors_R1)
    excluded_RV[:, 0] = False
    return scores_RV.masked_fill(excluded_RV.scatter(1, order_RV, excluded_RV), -torch.inf)


def _draw(
    logprobs_MV: torch.Tensor, settings: Sequence[SamplingSettings], uniforms: Sequence[float]
) -> torch.Tensor:
    """Return [M] tokens: the inverse of the cumulative distribution at `uniforms`, or the best."""
    greedy = [each.is_greedy for each in settings]
    if all(greedy):
        return logprobs_MV.argmax(dim=-1)
    # float64, since in float32 the sum over a large vocabulary loses tokens of low probability.
    cumulative_MV = logprobs_MV.double().exp().cumsum(dim=-1)
    numbers_M = torch.tensor(uniforms, device=logprobs_MV.device, dtype=torch.float64)
    targets_M1 = (numbers_M * cumulative_MV[:, -1]).unsqueeze(1)
    # `right`: the first token whose sum exceeds the number, which never has probability 0.
    drawn_M = torch.searchsorted(cumulative_MV, targets_M1, right=True).squeeze(1)
    drawn_M = drawn_M.clamp(max=logprobs_MV.shape[1] - 1)
    if not any(greedy):
        return drawn_M
    best_M = logprobs_MV.argmax(dim=-1)
    return torch.where(torch.tensor(greedy, device=drawn_M.device), best_M, drawn_M)
