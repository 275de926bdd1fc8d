"""Diagnostics of one optimiser step: sums over trained tokens, turned into metrics at the end.

Every figure is a mean over the tokens the policy loss trains, of the whole batch, so it depends
neither on padding nor on how the batch was split into micro-batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from atroposlib.scored_data import MASKED_LOGPROB
from example_trainer.batch import Microbatch
from example_trainer.losses.logprobs import log_ratio_BT
from example_trainer.losses.training_loss import LossTerms
from example_trainer.scoring import TokenScores

__all__ = ["StepStats", "sum_stats"]


class StepStats:
    """Collects diagnostics micro-batch by micro-batch.

    Attributes:
        loss: Sum of the micro-batches' loss shares.
    """

    def __init__(self, *, clip_low: float, clip_high: float) -> None:
        self.loss = 0.0
        self._bounds = (1.0 - clip_low, 1.0 + clip_high)
        self._parts_sums: dict[str, float] = defaultdict(float)
        self._sums: dict[str, float] = defaultdict(float)
        self._largest_difference = 0.0

    def add(
        self,
        microbatch: Microbatch,
        scores: TokenScores,
        terms: LossTerms,
        *,
        has_raw_logprobs: bool = False,
    ) -> None:
        """Add one micro-batch; reduces all to plain numbers.

        Args:
            microbatch: With logprobs at the sampling temperatures.
            scores: Of the trainer.
            terms: Of the loss.
            has_raw_logprobs: Whether the engine's were before temperature scaling.
        """
        trainer_logprobs_BT = scores.logprobs_BT.detach()
        self.loss += float(terms.loss.detach())
        mask_BT = terms.mask_BT
        trainer = trainer_logprobs_BT[mask_BT].double()
        positive = microbatch.advantages_BT[mask_BT] > 0
        self._count("tokens", trainer, one=True)
        self._count("logprob", trainer)
        self._count("logprob_squared", trainer**2)
        self._count("positive_tokens", positive)
        self._count("positive_logprob", trainer[positive])
        self._count("negative_logprob", trainer[~positive])
        self._count("bound", terms.bound_BT[mask_BT])
        if scores.entropy_BT is not None:
            self._count("entropy", scores.entropy_BT[mask_BT])
        if terms.weights is not None:
            self._count("weight", terms.weights.weight_BT[mask_BT])
            self._count("cut", terms.weights.cut_BT[mask_BT])
        if terms.kl_BT is not None:
            self._count("kl", terms.kl_BT[mask_BT])
        for name, part in terms.parts.items():
            self._parts_sums[name] += part
        inference_BT = microbatch.inference_logprobs_BT
        known_BT = mask_BT & (inference_BT != MASKED_LOGPROB)
        self._compare(trainer_logprobs_BT, inference_BT, known_BT)
        if scores.untempered_BT is not None:
            shift = (trainer_logprobs_BT - scores.untempered_BT)[known_BT].double()
            difference = (trainer_logprobs_BT - inference_BT)[known_BT].double()
            other = difference + shift if has_raw_logprobs else difference - shift
            self._count("other_mode_abs", other.abs())

    def add_up(self, other: StepStats) -> None:
        """Add what was found in another part of the batch."""
        self.loss += other.loss
        self._largest_difference = max(self._largest_difference, other._largest_difference)
        for name, value in other._sums.items():
            self._sums[name] += value
        for name, value in other._parts_sums.items():
            self._parts_sums[name] += value

    def _compare(
        self, trainer_BT: torch.Tensor, inference_BT: torch.Tensor, known_BT: torch.Tensor
    ) -> None:
        trainer, inference = trainer_BT[known_BT].double(), inference_BT[known_BT].double()
        difference = trainer - inference
        ratio = log_ratio_BT(trainer, inference).exp()
        low, high = self._bounds
        self._count("known", trainer, one=True)
        self._count("inference", inference)
        self._count("inference_squared", inference**2)
        self._count("difference", difference)
        self._count("difference_abs", difference.abs())
        self._count("ratio", ratio)
        self._count("k3", ratio - 1.0 - ratio.log())
        self._count("outside", (ratio < low) | (ratio > high))
        if difference.numel():
            largest = float(difference.abs().max())
            self._largest_difference = max(self._largest_difference, largest)

    def _count(self, name: str, values: torch.Tensor, *, one: bool = False) -> None:
        self._sums[name] += float(values.numel() if one else values.sum())

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics under their public names.

        `grpo/mean_ratio`, `grpo/clipped_fraction` and `alignment/*` compare the trainer's
        logprobs with the inference engine's; they are left out when no group carried any.
        `grpo/bound_fraction` counts the tokens whose gradient the algorithm's own clip or mask
        changed, `grpo/truncated_fraction` those whose importance weight was cut.
        `grpo/policy_loss`, `sft/loss` and `distill/loss` are before their coefficients;
        `distill/kl`, the student's divergence from the teacher, is no part of the loss. The entropy
        is that of the trainer's own distribution, left out where whole logits are computed; its
        estimate is minus the mean logprob of the sampled tokens.
        """
        sums = self._sums
        tokens = max(1.0, sums["tokens"])
        negatives = sums["tokens"] - sums["positive_tokens"]
        mean = sums["logprob"] / tokens
        result = {
            "train/loss": self.loss,
            "train/trained_tokens": sums["tokens"],
            "train/pos_logp": sums["positive_logprob"] / max(1.0, sums["positive_tokens"]),
            "train/neg_logp": sums["negative_logprob"] / max(1.0, negatives),
            "train/logp": mean,
            "train/entropy_estimate": -mean,
            "logprobs/training_mean": mean,
            "logprobs/training_std": _deviation(sums["logprob_squared"] / tokens, mean),
            "grpo/bound_fraction": sums["bound"] / tokens,
            "alignment/missing_fraction": 1.0 - sums["known"] / tokens,
            **self._parts(tokens),
        }
        return {**result, **self._alignment()} if sums["known"] else result

    def _parts(self, tokens: float) -> dict[str, float]:
        """Return what the parts of the loss that are in use have to say."""
        result = {}
        if "entropy" in self._sums:
            result["train/entropy"] = self._sums["entropy"] / tokens
        if "weight" in self._sums:
            result["grpo/mean_importance_weight"] = self._sums["weight"] / tokens
            result["grpo/truncated_fraction"] = self._sums["cut"] / tokens
        if "kl" in self._sums:
            result["grpo/mean_kl"] = self._sums["kl"] / tokens
        names = {"policy": "grpo/policy_loss", "kl_penalty": "grpo/kl_penalty"}
        names |= {"sft": "sft/loss", "distill": "distill/loss", "divergence": "distill/kl"}
        return result | {names[name]: part for name, part in self._parts_sums.items()}

    def _alignment(self) -> dict[str, float]:
        known = self._sums["known"]
        inference_mean = self._sums["inference"] / known
        squares = self._sums["inference_squared"] / known
        other_mode = {}
        if "other_mode_abs" in self._sums:
            other_mode["alignment/other_mode_diff_abs_mean"] = self._sums["other_mode_abs"] / known
        return {
            **other_mode,
            "grpo/mean_ratio": self._sums["ratio"] / known,
            "grpo/clipped_fraction": self._sums["outside"] / known,
            "logprobs/inference_mean": inference_mean,
            "logprobs/inference_std": _deviation(squares, inference_mean),
            "alignment/diff_mean": self._sums["difference"] / known,
            "alignment/diff_abs_mean": self._sums["difference_abs"] / known,
            "alignment/diff_max": self._largest_difference,
            "alignment/k3": self._sums["k3"] / known,
        }


def sum_stats(parts: Sequence[StepStats]) -> StepStats:
    """Return the first of the parts of a batch with all others added to it."""
    first, *others = parts
    for other in others:
        first.add_up(other)
    return first


def _deviation(mean_of_squares: float, mean: float) -> float:
    return math.sqrt(max(0.0, mean_of_squares - mean * mean))
