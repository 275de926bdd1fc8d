"""The losses: policy losses, corrections of the sampler's mismatch, KL, supervised, distillation.

    policy loss x correction + kl      over the policy's tokens, one denominator
    + sft                              over the demonstrations' tokens
    + distillation                     over the positions with teacher logprobs

Notation: l trainer logprob (with gradient), o the trainer's logprob when the batch was built,
without gradient (proximal), mu the inference engine's logprob, f the reference model's, A
advantage, m mask, sg stop-gradient. Losses are minimized.

Denominators count the whole batch, so that the sum over microbatches depends neither on the split
nor on padding or packing.

The sampling engine and the trainer round differently and may have different weights. A correction
multiplies the policy loss of a token by a function of w = exp(o - mu), detached; the other terms
are unchanged. Denominators include dropped and truncated tokens, so that a correction does not
increase the weight of the others.

Shape suffixes: B rows of one microbatch, T padded length, K the teacher's top tokens, padded. Every
tensor is already shifted (`batch`): position t belongs to token t+1. A row has one sequence, or
several if `sequence_ids_BT` is given; a sequence never spans two microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.config import TrainingConfig
from example_trainer.loss_choice import (
    AlgorithmName,
    Anchor,
    CorrectionName,
    KlEstimator,
    Reduction,
    refuse_double_count,
)

LOG_RATIO_LIMIT = 20.0
"""Bound of the absolute log ratio before exp: e^20 exceeds any cap and is finite."""


def log_ratio_BT(new_BT: torch.Tensor, old_BT: torch.Tensor) -> torch.Tensor:
    """Return `new - old`, clamped so that its exponential is finite."""
    return (new_BT - old_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class BatchTotals(NamedTuple):
    """Counts over the whole batch, the denominators of the reductions."""

    num_tokens: int
    """Tokens the policy loss trains."""
    num_sequences: int
    """Sequences with at least one such token."""
    num_sft_tokens: int = 0
    """Tokens of demonstrations."""
    num_distill_tokens: int = 0
    """Trained positions with teacher logprobs."""


def sequence_sums_BT(
    values_BT: torch.Tensor, sequence_ids_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """Return at every position the sum of the values, 0 at padding, over its sequence.

    `sequence_ids_BT`: (B, T) index of the sequence in the microbatch; None: one per row.
    """
    if sequence_ids_BT is None:
        return values_BT.sum(dim=1, keepdim=True).expand_as(values_BT)
    ids = sequence_ids_BT.flatten()
    num_ids = int(ids.max()) + 1 if ids.numel() else 0
    sums = values_BT.new_zeros(num_ids).index_add(0, ids, values_BT.flatten())
    return sums[sequence_ids_BT]


def sequence_means_BT(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, sequence_ids_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """Return at every position the mean over the positions of its sequence in the mask."""
    sums_BT = sequence_sums_BT(torch.where(mask_BT, values_BT, 0.0), sequence_ids_BT)
    counts_BT = sequence_sums_BT(mask_BT.to(values_BT.dtype), sequence_ids_BT)
    return sums_BT / counts_BT.clamp(min=1)


def masked_reduce(
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    totals: BatchTotals,
    *,
    reduction: Reduction,
    horizon: int = 1,
    sequence_ids_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce per-token losses to this microbatch's share of the batch loss.

    | reduction | denominator | also known as |
    |---|---|---|
    | `token_mean` | trained tokens of the batch | DAPO, verl `token-mean` |
    | `sequence_mean` | sequences x own tokens: higher weight in short sequences | GRPO |
    | `dr_grpo` | sequences x horizon | Dr.GRPO, verl `seq-mean-token-sum-norm` |
    | `sequence_sum` | sequences | verl `seq-mean-token-sum` |
    | `sum` | 1: grows with the batch | Tinker |

    Without trained tokens the result is a zero with a gradient, so that the ranks' collective
    operations do not hang.
    """
    masked_BT = torch.where(mask_BT, loss_BT, 0.0)
    if reduction == "sum":
        return masked_BT.sum()
    if reduction == "token_mean":
        return masked_BT.sum() / max(1, totals.num_tokens)
    if reduction == "dr_grpo":
        return masked_BT.sum() / (max(1, totals.num_sequences) * horizon)
    if reduction == "sequence_mean":
        counts_BT = sequence_sums_BT(mask_BT.to(masked_BT.dtype), sequence_ids_BT)
        masked_BT = masked_BT / counts_BT.clamp(min=1)
    return masked_BT.sum() / max(1, totals.num_sequences)


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy loss for one microbatch."""

    logprobs_BT: torch.Tensor
    """(B, T) l, with gradient; finite at masked positions too."""
    anchor_BT: torch.Tensor
    """(B, T) o or mu, the denominator of the ratio; sg(l) at masked positions and where mu is
    unknown, so that the ratio is 1 there."""
    advantages_BT: torch.Tensor
    """(B, T) A."""
    mask_BT: torch.Tensor
    """(B, T) bool, positions this loss trains."""
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) index of the sequence in the microbatch; None: one sequence per row."""

    @property
    def ratio_BT(self) -> torch.Tensor:
        """(B, T) exp(l - anchor), with gradient."""
        return log_ratio_BT(self.logprobs_BT, self.anchor_BT).exp()


class PolicyTerms(NamedTuple):
    """Result of a policy loss."""

    loss_BT: torch.Tensor
    """(B, T) loss of each token, with gradient; values at masked positions are ignored."""
    ratio_BT: torch.Tensor
    """(B, T) the ratio that is clipped or masked, without gradient."""
    bound_BT: torch.Tensor
    """(B, T) bool, where the clip or mask changed the gradient."""


class PolicyLoss(Protocol):
    """One algorithm: the loss of every token of a microbatch."""

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms: ...


class Weights(NamedTuple):
    """Result of a correction, without gradient."""

    weight_BT: torch.Tensor
    """(B, T) factor of the policy loss of each token; 1 for a sequence without any mu."""
    cut_BT: torch.Tensor
    """(B, T) bool, where the correction truncated or dropped the token."""


@dataclass(frozen=True)
class PolicyMismatch:
    """Difference between sampler and trainer on one microbatch."""

    log_weight_BT: torch.Tensor
    """(B, T) o - mu without gradient, 0 where masked or where mu is unknown."""
    mask_BT: torch.Tensor
    """(B, T) bool, positions the policy loss trains."""
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) index of the sequence in the microbatch; None: one sequence per row."""

    @property
    def sequence_sums_BT(self) -> torch.Tensor:
        return sequence_sums_BT(self.log_weight_BT, self.sequence_ids_BT)

    @property
    def sequence_means_BT(self) -> torch.Tensor:
        return sequence_means_BT(self.log_weight_BT, self.mask_BT, self.sequence_ids_BT)


class Correction(Protocol):
    """A weight that corrects the mismatch between sampler and trainer."""

    def __call__(self, mismatch: PolicyMismatch) -> Weights: ...


def clipped_surrogate_BT(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Return PPO's pessimistic per-token loss, `max(-A r, -A clip(r, 1-low, 1+high))`.

    For both signs of A, the gradient of a token is zero once its ratio exceeds the bound in the
    direction of A, and only then.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; the asymmetric bound is
    "clip-higher" of Yu et al. 2025, "DAPO", arXiv:2503.14476.
    """
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)


def bound_by_clip_BT(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Return where the clip makes the gradient of the surrogate zero."""
    above_BT = (ratio_BT > 1.0 + clip_high) & (advantages_BT > 0)
    below_BT = (ratio_BT < 1.0 - clip_low) & (advantages_BT < 0)
    return above_BT | below_BT


def _clipped_terms(
    ratio_BT: torch.Tensor, inputs: PolicyInputs, clip_low: float, clip_high: float
) -> PolicyTerms:
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    loss_BT = clipped_surrogate_BT(ratio_BT, inputs.advantages_BT, **bounds)
    bound_BT = bound_by_clip_BT(ratio_BT.detach(), inputs.advantages_BT, **bounds)
    return PolicyTerms(loss_BT, ratio_BT.detach(), bound_BT)


@dataclass(frozen=True)
class Grpo:
    """Group relative policy optimization.

    Paper: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300.
    Formula: `max(-A r, -A clip(r, 1 - low, 1 + high))`, `r = exp(l - anchor)`, with
    `A = (R - mean) / std` within the group.
    Denominator: `sequence_mean`, the length of each sequence, then the number of sequences; tokens
    of short answers have a higher weight.
    Differs from the paper: the KL penalty is off unless `kl_coef` is set.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        return _clipped_terms(inputs.ratio_BT, inputs, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class DrGrpo(Grpo):
    """GRPO done right: without its two biases.

    Paper: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    Formula: GRPO's, with `A = R - mean`: dividing by the deviation favors questions that are
    nearly always or nearly never solved.
    Denominator: `dr_grpo`, sequences x `loss_horizon`, a constant; the weight of a token does not
    depend on length.
    Differs from the paper: the sampler's mismatch is corrected by default.
    """


@dataclass(frozen=True)
class Dapo(Grpo):
    """Decoupled clip and dynamic sampling policy optimization; the default.

    Paper: Yu et al. 2025, "DAPO", arXiv:2503.14476.
    Formula: GRPO's with a higher upper bound ("clip-higher", 0.28), so that the probability of
    unlikely tokens can grow. Overlong shaping is a penalty on scores: `rows.overlong_penalty`.
    Denominator: `token_mean`, the trained tokens of the whole batch, not of a microbatch.
    Differs from the paper: dynamic sampling is left to the environments
    (`ensure_scores_are_not_same` drops groups without a signal).
    """

    clip_high: float = 0.28


@dataclass(frozen=True)
class DualClip(Grpo):
    """PPO with a second bound for negative advantages.

    Paper: Ye et al. 2019, "Mastering Complex Control in MOBA Games", arXiv:1912.09729.
    Formula: for A < 0 `min(clipped surrogate, -A c)`: a token that became much more likely since
    it was sampled cannot dominate the step. For A >= 0 GRPO's.
    Denominator: `token_mean`.
    Differs from the paper: no critic; advantages come from the group.
    """

    dual_clip: float = 3.0

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        terms = super().__call__(inputs)
        is_negative_BT = inputs.advantages_BT < 0
        ceiling_BT = -inputs.advantages_BT * self.dual_clip
        loss_BT = torch.where(
            is_negative_BT, torch.minimum(terms.loss_BT, ceiling_BT), terms.loss_BT
        )
        bound_BT = terms.bound_BT | (is_negative_BT & (terms.ratio_BT > self.dual_clip))
        return PolicyTerms(loss_BT, terms.ratio_BT, bound_BT)


@dataclass(frozen=True)
class Cispo:
    """Clipped importance-sampling policy optimization.

    Paper: MiniMax 2025, "MiniMax-M1", arXiv:2506.13585.
    Formula: `-sg(clip(r, 1 - low, 1 + high)) A l`: only the weight of a token is bounded, so that
    rare tokens which determine the course of a completion keep a gradient.
    Denominator: `token_mean`.
    Differs from the paper: it has an upper bound only; `clip_eps 1` gives a lower bound of 0, and
    `clip_eps_high 4` a cap of 5.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        ratio_BT = inputs.ratio_BT.detach()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        loss_BT = -ratio_BT.clamp(low, high) * inputs.advantages_BT * inputs.logprobs_BT
        return PolicyTerms(loss_BT, ratio_BT, (ratio_BT < low) | (ratio_BT > high))


@dataclass(frozen=True)
class Gspo:
    """Group sequence policy optimization.

    Paper: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071.
    Formula: `max(-A s, -A clip(s, 1 - low, 1 + high))` with one ratio per sequence,
    `s = exp(mean_t (l - anchor))`. Computed as GSPO-token, `log s_t = sg(mean) + l - sg(l)`: the
    same value and gradient if all tokens share A, and valid if they do not.
    Denominator: `sequence_mean`.
    Differs from the paper: the default bounds are 0.2; the paper's, 3e-4 and 4e-4, fit the much
    narrower distribution of a mean and are set with `clip_eps` and `clip_eps_high`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        difference_BT = (inputs.logprobs_BT - inputs.anchor_BT).detach()
        mean_BT = sequence_means_BT(difference_BT, inputs.mask_BT, inputs.sequence_ids_BT)
        log_ratio_BT = mean_BT + inputs.logprobs_BT - inputs.logprobs_BT.detach()
        ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return _clipped_terms(ratio_BT, inputs, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Dppo:
    """Divergence-bounded policy optimization with a quadratic pull to the sampler.

    Source: prime-rl's default loss.
    Formula: `-[keep] A exp(l - mu) + pull (l - mu)^2`. A token is dropped if its probability has
    already moved by more than `max_shift` in the direction of A: `e^l - e^mu > max_shift` for
    A > 0, `< -max_shift` for A <= 0. A bound on the ratio would drop rare tokens, whose ratio is
    large for a small change of probability. The pull applies to dropped tokens as well.
    Denominator: `token_mean`.
    Differs from the source: tokens without mu count as on policy (ratio 1, no pull).
    """

    max_shift: float = 0.2
    pull: float = 1e-3

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        log_BT = log_ratio_BT(inputs.logprobs_BT, inputs.anchor_BT)
        dropped_BT = self.drops_BT(
            (inputs.logprobs_BT.exp() - inputs.anchor_BT.exp()).detach(), inputs.advantages_BT
        )
        policy_BT = torch.where(dropped_BT, 0.0, -inputs.advantages_BT * log_BT.exp())
        return PolicyTerms(policy_BT + self.pull * log_BT**2, log_BT.exp().detach(), dropped_BT)

    def drops_BT(self, shift_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        up_BT = (shift_BT > self.max_shift) & (advantages_BT > 0)
        return up_BT | ((shift_BT < -self.max_shift) & (advantages_BT <= 0))


@dataclass(frozen=True)
class Ipo(Dppo):
    """DPPO with a bound on both sides, whatever the advantage.

    Source: prime-rl's ipo loss.
    Formula: DPPO's with `keep = |e^l - e^mu| <= max_shift`.
    Denominator: `token_mean`.
    Differs from DPPO: a token that drifted against its advantage is dropped too.
    """

    max_shift: float = 0.1

    def drops_BT(self, shift_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        return shift_BT.abs() > self.max_shift


@dataclass(frozen=True)
class ImportanceSampling:
    """The policy gradient with an importance ratio and nothing else.

    Source: Tinker's `importance_sampling` loss; REINFORCE where the ratio is 1.
    Formula: `-A exp(l - mu)`; unbiased per token, with a variance that grows with staleness.
    Denominator: `token_mean`. Tinker sums: `loss_reduction sum`.
    Differs from the clipped family: every token always has a gradient.
    """

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        ratio_BT = inputs.ratio_BT
        return PolicyTerms(
            -inputs.advantages_BT * ratio_BT, ratio_BT.detach(), torch.zeros_like(inputs.mask_BT)
        )


@dataclass(frozen=True)
class TokenTruncation:
    """Truncated importance sampling per token; the default.

    Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training".
    Formula: `min(w, cap)`. Biased per sequence, of low variance.
    Denominator: the policy loss's own.
    Differs from the paper: tokens without mu have weight 1.
    """

    cap: float = 2.0

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        weight_BT = _bounded_exp(mismatch.log_weight_BT)
        return Weights(weight_BT.clamp(max=self.cap), weight_BT > self.cap)


@dataclass(frozen=True)
class TokenMask:
    """IcePop: drop tokens on which the two engines disagree.

    Paper: Ling team 2025, "Every Step Evolves", arXiv:2510.18855.
    Formula: `w` inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from truncation: such a token has no gradient instead of a bounded one, and neither has
    a token that is much less likely for the trainer than for the sampler.
    """

    cap: float = 5.0
    floor: float = 0.5

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        weight_BT = _bounded_exp(mismatch.log_weight_BT)
        cut_BT = (weight_BT < self.floor) | (weight_BT > self.cap)
        return Weights(torch.where(cut_BT, 0.0, weight_BT), cut_BT)


@dataclass(frozen=True)
class SequenceTruncation:
    """Truncated importance sampling per sequence.

    Source: verl and TRL, each under the name sequence-level truncated importance sampling.
    Formula: `min(exp(sum_t (o - mu)), cap)`, the same for every token of the sequence. Unbiased
    before the cap, of high variance on long sequences.
    Denominator: the policy loss's own.
    Differs from the token form: it is the product of all ratios, so that one outlier changes the
    weight of all tokens.
    """

    cap: float = 2.0

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        weight_BT = _bounded_exp(mismatch.sequence_sums_BT)
        return Weights(weight_BT.clamp(max=self.cap), weight_BT > self.cap)


@dataclass(frozen=True)
class SequenceMask:
    """Drop whole sequences that are far from their sampler.

    Source: TRL's default, with cap 3 and no floor.
    Formula: `exp(sum_t (o - mu))` for every token if it is inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from `GeometricMask`: the product deviates more from 1 in long sequences, which are
    dropped more often.
    """

    cap: float = 3.0
    floor: float = 0.0

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        weight_BT = _bounded_exp(mismatch.sequence_sums_BT)
        cut_BT = (weight_BT < self.floor) | (weight_BT > self.cap)
        return Weights(torch.where(cut_BT, 0.0, weight_BT), cut_BT)


@dataclass(frozen=True)
class GeometricMask:
    """Drop whole sequences whose tokens are on average far from their sampler.

    Source: NeMo RL's sequence mask (bounds 0.999 and 1.002) and SkyRL's (0.99 and 1.01).
    Formula: `w` of each token if `exp(mean_t (o - mu))` is inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from `SequenceMask`: the mean does not grow with length, hence the narrow bounds; and
    the token weights of the remaining sequences have no cap.
    """

    cap: float = 1.01
    floor: float = 0.99

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        mean_BT = _bounded_exp(mismatch.sequence_means_BT)
        cut_BT = (mean_BT < self.floor) | (mean_BT > self.cap)
        return Weights(torch.where(cut_BT, 0.0, _bounded_exp(mismatch.log_weight_BT)), cut_BT)


POLICY_LOSSES: dict[AlgorithmName, type[Any]] = {
    "dapo": Dapo,
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dual_clip": DualClip,
    "gspo": Gspo,
    "cispo": Cispo,
    "dppo": Dppo,
    "ipo": Ipo,
    "importance_sampling": ImportanceSampling,
}
"""Class of each row of `ALGORITHMS`."""

CORRECTION_CLASSES: dict[CorrectionName, type[Any]] = {
    "token_truncate": TokenTruncation,
    "token_mask": TokenMask,
    "sequence_truncate": SequenceTruncation,
    "sequence_mask": SequenceMask,
    "geometric_mask": GeometricMask,
}
"""Class of each row of `CORRECTIONS`."""


def _bounded_exp(log_BT: torch.Tensor) -> torch.Tensor:
    return log_BT.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kl_BT(
    logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, *, estimator: KlEstimator
) -> torch.Tensor:
    r"""Estimate KL(policy || reference) per token.

    | estimator | formula | value | gradient as a loss |
    |---|---|---|---|
    | k1 | `l - f` | unbiased, may be negative | zero in expectation |
    | k2 | `(l - f)^2 / 2` | biased | that of the true KL, on policy |
    | k3 | `e^(f - l) - (f - l) - 1` | unbiased, never negative | of KL(reference \|\| policy) |

    Multiplied by the ratio `e^(l - sg l)`, as with `KlPenalty.is_unbiased`, the loss has the
    gradient of its expectation: that of KL(policy || reference) for k1 and k3, that of the biased
    value for k2.

    Source: Schulman 2020, "Approximating KL Divergence". Differs in k3: the exponent is clamped.
    """
    if estimator == "k1":
        return logprobs_BT - ref_logprobs_BT
    if estimator == "k2":
        return 0.5 * (logprobs_BT - ref_logprobs_BT) ** 2
    log_BT = log_ratio_BT(ref_logprobs_BT, logprobs_BT)
    return log_BT.exp() - log_BT - 1.0


@dataclass(frozen=True)
class KlPenalty:
    """Adds `coef` times an estimate of KL(policy || reference) to every token's loss.

    Paper: the k3 form is GRPO's, Shao et al. 2024, arXiv:2402.03300, equation 4; with the ratio it
    is DeepSeek-V3.2's, arXiv:2512.02556.
    Formula: `coef * kl(l, f)`, with `is_unbiased` `coef * r * kl(l, f)`; see `kl_BT`.
    Denominator: the policy loss's own.
    Differs from the paper: r is the ratio of each token to the anchor, as in TRL; it is not
    multiplied by a correction of the sampler's mismatch.
    """

    coef: float
    estimator: KlEstimator = "k3"
    is_unbiased: bool = False
    """Whether the estimate is multiplied by the ratio, so that its gradient is unbiased."""


@dataclass(frozen=True)
class SupervisedLoss:
    """The loss of trajectories marked `sft` by `overrides[i]` or `group_overrides`.

    Source: maximum likelihood of given tokens, the loss of supervised fine-tuning.
    Formula: `-coef l`, without advantage, ratio, clip, correction or KL, since the tokens were not
    sampled from a policy.
    Denominator: the demonstration tokens of the whole batch, counted separately from those of the
    policy, so that the weight of either does not depend on the other (as in prime-rl).
    Differs from the policy losses: the gradient does not depend on the scores of the group.
    """

    coef: float = 1.0

    def __call__(
        self, logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return this microbatch's share, before the coefficient."""
        return torch.where(mask_BT, -logprobs_BT, 0.0).sum() / max(1, num_tokens)


PADDED_TEACHER_ID = -1
PADDED_TEACHER_LOGPROB = -1e9


class TeacherTokens(NamedTuple):
    """The teacher's top tokens and the student's logprobs of them."""

    ids_BTK: torch.Tensor
    """(B, T, K) ids, `PADDED_TEACHER_ID` if there are fewer than K."""
    teacher_logprobs_BTK: torch.Tensor
    """(B, T, K) logprobs, `PADDED_TEACHER_LOGPROB` at padding."""
    student_logprobs_BTK: torch.Tensor
    """(B, T, K) logprobs of the ids at the distillation temperature, with gradient."""

    @property
    def valid_BTK(self) -> torch.Tensor:
        return self.ids_BTK != PADDED_TEACHER_ID


@dataclass(frozen=True)
class Distillation:
    """On-policy distillation: moves the student towards the teacher on the student's own samples.

    Paper: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (GKD), arXiv:2306.13649.
    Formula, with p the teacher's K logprobs divided by `temperature` and normalized over them:
    `cross_entropy` is `-sum_k p log q`, q the student over its whole vocabulary, whose gradient is
    that of KL(p || q); `reverse_kl` is `sum_k q' (log q' - log p)`, q' the student normalized over
    the same K, which is mode-seeking and needs K of 2 or more.
    Denominator: trained positions of the whole batch with at least one token of the teacher's.
    Differs from the paper: the teacher's distribution beyond K is unknown; `cross_entropy` reduces
    the student's probability there, `reverse_kl` does not change it.
    """

    coef: float
    kind: Literal["cross_entropy", "reverse_kl"] = "cross_entropy"
    temperature: float = 1.0
    """Divisor of both logits; `TeacherTokens` contains the student's after the division."""

    def __call__(
        self, teacher: TeacherTokens, mask_BT: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return this microbatch's share, before the coefficient."""
        return _share(self.token_loss_BT(teacher), teacher, mask_BT, num_tokens)

    def divergence(
        self, teacher: TeacherTokens, mask_BT: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return this microbatch's share of the mean KL(p || q) in nats, without gradient.

        Unlike the cross entropy it is 0 if the student equals the teacher. It is the same for both
        kinds of loss, and ignores the teacher's distribution beyond K.
        """
        student_BTK = teacher.student_logprobs_BTK.detach()
        log_p_BTK = self._teacher_BTK(teacher)
        terms_BTK = log_p_BTK.exp() * (log_p_BTK - student_BTK)
        divergence_BT = torch.where(teacher.valid_BTK, terms_BTK, 0.0).sum(dim=-1)
        return _share(divergence_BT, teacher, mask_BT, num_tokens)

    def token_loss_BT(self, teacher: TeacherTokens) -> torch.Tensor:
        """Return the (B, T) loss of each position, 0 without teacher logprobs."""
        valid_BTK = teacher.valid_BTK
        student_BTK = teacher.student_logprobs_BTK
        log_p_BTK = self._teacher_BTK(teacher)
        if self.kind == "cross_entropy":
            terms_BTK = -log_p_BTK.exp() * student_BTK
        else:
            log_q_BTK = _normalized(student_BTK, valid_BTK)
            terms_BTK = log_q_BTK.exp() * (log_q_BTK - log_p_BTK)
        return torch.where(valid_BTK, terms_BTK, 0.0).sum(dim=-1)

    def _teacher_BTK(self, teacher: TeacherTokens) -> torch.Tensor:
        dtype = teacher.student_logprobs_BTK.dtype
        scaled_BTK = teacher.teacher_logprobs_BTK.to(dtype) / self.temperature
        return _normalized(scaled_BTK, teacher.valid_BTK)


def _share(
    values_BT: torch.Tensor, teacher: TeacherTokens, mask_BT: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    used_BT = mask_BT & teacher.valid_BTK.any(dim=-1)
    return torch.where(used_BT, values_BT, 0.0).sum() / max(1, num_tokens)


def _normalized(logprobs_BTK: torch.Tensor, valid_BTK: torch.Tensor) -> torch.Tensor:
    # A finite fill value avoids NaN in rows without any token, and in their gradients.
    return torch.where(valid_BTK, logprobs_BTK, PADDED_TEACHER_LOGPROB).log_softmax(dim=-1)


@dataclass(frozen=True)
class LossInputs:
    """One shifted microbatch; fields that its groups do not have are None."""

    trainer_logprobs_BT: torch.Tensor
    """(B, T) l, with gradient."""
    labels_BT: torch.Tensor
    """(B, T) ids or `IGNORE_INDEX`."""
    advantages_BT: torch.Tensor
    """(B, T) A."""
    inference_logprobs_BT: torch.Tensor
    """(B, T) mu, `MASKED_LOGPROB` where unknown; that sentinel is never exponentiated."""
    proximal_logprobs_BT: torch.Tensor | None = None
    """(B, T) o; None: sg(l), which is equal with one step per batch."""
    ref_logprobs_BT: torch.Tensor | None = None
    """(B, T) f, `MASKED_LOGPROB` where unknown."""
    is_sft_BT: torch.Tensor | None = None
    """(B, T) bool, tokens of demonstrations."""
    teacher: TeacherTokens | None = None
    sequence_ids_BT: torch.Tensor | None = None
    """(B, T) index of the sequence in the microbatch; None: one sequence per row."""


class LossTerms(NamedTuple):
    """One microbatch's share of the loss, and detached tensors for the diagnostics."""

    loss: torch.Tensor
    """Scalar with gradient; the shares of all microbatches add up to the loss of the batch."""
    mask_BT: torch.Tensor
    """(B, T) bool, tokens the policy loss trains."""
    ratio_BT: torch.Tensor
    """(B, T) ratio of `PolicyTerms`."""
    bound_BT: torch.Tensor
    """(B, T) bool, where the algorithm's clip or mask changed the gradient."""
    weights: Weights | None
    kl_BT: torch.Tensor | None
    """(B, T) KL estimate, 0 where masked or unknown."""
    parts: dict[str, float]
    """Microbatch shares of the terms in use: kl_penalty (after its coefficient), policy, sft and
    distill (before theirs), and the divergence from the teacher, which is not in the loss."""


@dataclass(frozen=True)
class TrainingLoss:
    """Composes an algorithm, a correction, a KL penalty, demonstrations and distillation.

    With `anchor="trainer"` the ratio is `exp(l - o)`, and `o = sg(l)` with one optimizer step per
    batch. The ratio is then 1 with the gradient of l, and the clip has no effect. The detached
    weight of the correction accounts for stale or differently rounded rollouts. With
    `anchor="inference"` the ratio is `exp(l - mu)` and contains that mismatch; an additional
    correction would count it twice and is rejected. Tokens without mu have ratio and weight 1.

    Raises:
        ConfigError: anchor and correction contradict each other.
    """

    algorithm: PolicyLoss = field(default_factory=Dapo)
    anchor: Anchor = "trainer"
    correction: Correction | None = None
    reduction: Reduction = "token_mean"
    horizon: int = 1
    """Constant sequence length in the denominator of the reduction `dr_grpo`."""
    policy_coef: float = 1.0
    kl: KlPenalty | None = None
    sft: SupervisedLoss = field(default_factory=SupervisedLoss)
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        refuse_double_count(self.anchor, is_corrected=self.correction is not None)
        if self.horizon < 1:
            raise ConfigError(f"horizon={self.horizon}: needs at least one token per sequence")

    def __call__(self, inputs: LossInputs, totals: BatchTotals) -> LossTerms:
        """Compute this microbatch's share of the loss; `totals` count the whole batch."""
        trained_BT = inputs.labels_BT != IGNORE_INDEX
        is_sft_BT = inputs.is_sft_BT
        mask_BT = trained_BT if is_sft_BT is None else trained_BT & ~is_sft_BT
        policy = self._policy_inputs(inputs, mask_BT)
        terms = self.algorithm(policy)
        weights = self._weights(inputs, mask_BT)
        loss_BT = terms.loss_BT if weights is None else weights.weight_BT * terms.loss_BT
        policy_share = self._reduce(loss_BT, policy, totals)
        loss, parts = self.policy_coef * policy_share, {"policy": policy_share}
        kl_BT = self._kl_BT(inputs, mask_BT)
        if self.kl is not None and kl_BT is not None:
            weighted_BT = kl_BT * policy.ratio_BT if self.kl.is_unbiased else kl_BT
            parts["kl_penalty"] = self.kl.coef * self._reduce(weighted_BT, policy, totals)
            loss = loss + parts["kl_penalty"]
        if is_sft_BT is not None:
            parts["sft"] = self.sft(
                inputs.trainer_logprobs_BT, trained_BT & is_sft_BT, totals.num_sft_tokens
            )
            loss = loss + self.sft.coef * parts["sft"]
        if self.distillation is not None and inputs.teacher is not None:
            parts["distill"] = self.distillation(
                inputs.teacher, trained_BT, totals.num_distill_tokens
            )
            parts["divergence"] = self.distillation.divergence(
                inputs.teacher, trained_BT, totals.num_distill_tokens
            )
            loss = loss + self.distillation.coef * parts["distill"]
        return LossTerms(
            loss=loss,
            mask_BT=mask_BT,
            ratio_BT=terms.ratio_BT,
            bound_BT=terms.bound_BT & mask_BT,
            weights=weights,
            kl_BT=None if kl_BT is None else kl_BT.detach(),
            parts={name: float(part.detach()) for name, part in parts.items()},
        )

    def _policy_inputs(self, inputs: LossInputs, mask_BT: torch.Tensor) -> PolicyInputs:
        logprobs_BT = torch.where(mask_BT, inputs.trainer_logprobs_BT, 0.0)
        if self.anchor == "inference":
            known_BT = mask_BT & (inputs.inference_logprobs_BT != MASKED_LOGPROB)
            anchor_BT = torch.where(
                known_BT, inputs.inference_logprobs_BT.to(logprobs_BT.dtype), logprobs_BT.detach()
            )
        else:
            anchor_BT = torch.where(mask_BT, _proximal_BT(inputs), 0.0)
        return PolicyInputs(
            logprobs_BT=logprobs_BT,
            anchor_BT=anchor_BT,
            advantages_BT=inputs.advantages_BT.to(logprobs_BT.dtype),
            mask_BT=mask_BT,
            sequence_ids_BT=inputs.sequence_ids_BT,
        )

    def _weights(self, inputs: LossInputs, mask_BT: torch.Tensor) -> Weights | None:
        if self.correction is None:
            return None
        proximal_BT = _proximal_BT(inputs)
        inference_BT = inputs.inference_logprobs_BT.to(proximal_BT.dtype)
        known_BT = mask_BT & (inference_BT != MASKED_LOGPROB)
        log_weight_BT = torch.where(known_BT, proximal_BT - inference_BT, 0.0)
        return self.correction(PolicyMismatch(log_weight_BT, mask_BT, inputs.sequence_ids_BT))

    def _kl_BT(self, inputs: LossInputs, mask_BT: torch.Tensor) -> torch.Tensor | None:
        if self.kl is None or inputs.ref_logprobs_BT is None:
            return None
        known_BT = mask_BT & (inputs.ref_logprobs_BT != MASKED_LOGPROB)
        logprobs_BT = torch.where(known_BT, inputs.trainer_logprobs_BT, 0.0)
        reference_BT = torch.where(known_BT, inputs.ref_logprobs_BT.to(logprobs_BT.dtype), 0.0)
        return kl_BT(logprobs_BT, reference_BT, estimator=self.kl.estimator)

    def _reduce(
        self, loss_BT: torch.Tensor, policy: PolicyInputs, totals: BatchTotals
    ) -> torch.Tensor:
        return masked_reduce(
            loss_BT,
            policy.mask_BT,
            totals,
            reduction=self.reduction,
            horizon=self.horizon,
            sequence_ids_BT=policy.sequence_ids_BT,
        )


def _proximal_BT(inputs: LossInputs) -> torch.Tensor:
    if inputs.proximal_logprobs_BT is None:
        return inputs.trainer_logprobs_BT.detach()
    return inputs.proximal_logprobs_BT.detach()


def make_loss(config: TrainingConfig) -> TrainingLoss:
    """Return the loss that the settings describe."""
    choice = config.loss_choice
    bounds = (
        {"clip_low": choice.clip_low, "clip_high": choice.clip_high}
        if choice.algorithm.takes_clip
        else {}
    )
    if choice.name == "dual_clip":
        bounds["dual_clip"] = config.dual_clip
    correction: Correction | None = None
    if (chosen := choice.correction) is not None:
        limits = {"cap": chosen.cap} | ({} if chosen.floor is None else {"floor": chosen.floor})
        correction = CORRECTION_CLASSES[chosen.name](**limits)
    return TrainingLoss(
        algorithm=POLICY_LOSSES[choice.name](**bounds),
        anchor=choice.anchor,
        correction=correction,
        reduction=choice.reduction,
        horizon=config.loss_horizon or config.seq_len,
        policy_coef=config.policy_coef,
        kl=KlPenalty(config.kl_coef, config.kl_estimator, is_unbiased=config.kl_unbiased)
        if config.kl_coef
        else None,
        sft=SupervisedLoss(config.sft_coef),
        distillation=Distillation(
            config.distill_coef, config.distill_loss, config.distill_temperature
        )
        if config.distill_coef
        else None,
    )
