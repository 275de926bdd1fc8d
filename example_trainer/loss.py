"""The losses, one below the other: policy losses, corrections, KL, supervised, distillation.

    loss = policy_coef  * reduce(w * policy(r, A))      the policy's tokens
         + kl_coef      * reduce(kl(l, f))              the same
         - entropy_coef * reduce(H)                     the same
         + sft_coef     * mean(-l)                      the demonstrations' tokens
         + distill_coef * mean(cross entropy)           positions with teacher logprobs

    l   trainer logprob, with gradient          r   exp(l - anchor), the anchor being o or mu
    o   the same before the step (proximal)     w   a function of exp(o - mu), without gradient
    mu  the inference engine's logprob          A   advantage
    f   the reference model's logprob           H   entropy of the policy, in nats
    sg  stop-gradient

Losses are minimized. Denominators count the whole batch, so that the sum over microbatches depends
neither on the split nor on padding or packing; tokens that a correction drops count as well.

Shape suffixes: B rows of one microbatch, T padded length, K the teacher's top tokens, padded.
Tensors are shifted (`batch`): position t belongs to token t+1. `sequence_ids_BT` numbers the
sequences of a microbatch, none of which spans two; None: one sequence per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.utils.imports import import_function
from example_trainer.config import TrainingConfig
from example_trainer.loss_choice import (
    AlgorithmName,
    Anchor,
    CorrectionName,
    KlEstimator,
    Reduction,
    refuse_double_count,
)


def log_ratio_BT(new_BT: Tensor, old_BT: Tensor | float = 0.0) -> Tensor:
    """Return `new - old`, clamped: e^20 exceeds any cap and is finite."""
    return (new_BT - old_BT).clamp(-20.0, 20.0)


class BatchTotals(NamedTuple):
    """Counts over the whole batch, the denominators of the reductions."""

    num_tokens: int
    """Tokens the policy loss trains."""
    num_sequences: int
    """Sequences with at least one such token."""
    num_sft_tokens: int = 0
    num_distill_tokens: int = 0
    """Trained positions with teacher logprobs."""


def sequence_sums_BT(values_BT: Tensor, sequence_ids_BT: Tensor | None = None) -> Tensor:
    """Return at every position the sum of the values, 0 at padding, over its sequence."""
    if sequence_ids_BT is None:
        return values_BT.sum(dim=1, keepdim=True).expand_as(values_BT)
    ids = sequence_ids_BT.flatten()
    num_ids = int(ids.max()) + 1 if ids.numel() else 0
    return values_BT.new_zeros(num_ids).index_add(0, ids, values_BT.flatten())[sequence_ids_BT]


def masked_reduce(
    loss_BT: Tensor,
    mask_BT: Tensor,
    totals: BatchTotals,
    *,
    reduction: Reduction,
    horizon: int = 1,
    sequence_ids_BT: Tensor | None = None,
) -> Tensor:
    """Reduce per-token losses to this microbatch's share of the batch loss.

    | reduction | denominator | also known as |
    |---|---|---|
    | `token_mean` | trained tokens of the batch | DAPO, verl `token-mean` |
    | `sequence_mean` | sequences x own tokens: higher weight in short sequences | GRPO |
    | `dr_grpo` | sequences x horizon | Dr.GRPO, verl `seq-mean-token-sum-norm` |
    | `sequence_sum` | sequences | verl `seq-mean-token-sum` |
    | `sum` | 1: grows with the batch | Tinker |

    Without trained tokens it is a zero with a gradient: collective operations do not hang.
    """
    masked_BT = torch.where(mask_BT, loss_BT, 0.0)
    if reduction == "sequence_mean":
        counts_BT = sequence_sums_BT(mask_BT.to(masked_BT), sequence_ids_BT)
        masked_BT = masked_BT / counts_BT.clamp(min=1)
    num_sequences = max(1, totals.num_sequences)
    denominators = {"token_mean": max(1, totals.num_tokens), "dr_grpo": num_sequences * horizon}
    return masked_BT.sum() / (denominators | {"sum": 1}).get(reduction, num_sequences)


class PolicyInputs(NamedTuple):
    """Inputs of a policy loss for one microbatch."""

    logprobs_BT: Tensor
    """l, finite at masked positions too."""
    anchor_BT: Tensor
    """o or mu, the denominator of the ratio; sg(l) at masked positions and where mu is unknown."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """Bool, the positions that this loss trains."""
    sequence_ids_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    """H with gradient, for losses that use it; 0 at masked positions."""

    @property
    def ratio_BT(self) -> Tensor:
        return log_ratio_BT(self.logprobs_BT, self.anchor_BT).exp()


class PolicyTerms(NamedTuple):
    """Loss of each token, the ratio that is bounded, and where a bound changed the gradient."""

    loss_BT: Tensor
    ratio_BT: Tensor
    bound_BT: Tensor


PolicyLoss = Callable[[PolicyInputs], PolicyTerms]


def clipped_surrogate_BT(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return PPO's pessimistic loss: no gradient beyond the bound in the direction of A.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)


@dataclass(frozen=True)
class Grpo:
    """Group relative policy optimization.

    Paper: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300.
    Formula: `max(-A r, -A clip(r, 1 - low, 1 + high))`, with `A = (R - mean) / std` in the group.
    Denominator: `sequence_mean`; tokens of short answers have a higher weight.
    Differs from the paper: the KL penalty is off unless `kl_coef` is set.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def ratio_BT(self, inputs: PolicyInputs) -> Tensor:
        return inputs.ratio_BT

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        ratio_BT, advantages_BT = self.ratio_BT(inputs), inputs.advantages_BT
        loss_BT = clipped_surrogate_BT(
            ratio_BT, advantages_BT, clip_low=self.clip_low, clip_high=self.clip_high
        )
        ratio_BT = ratio_BT.detach()
        above_BT = (ratio_BT > 1.0 + self.clip_high) & (advantages_BT > 0)
        below_BT = (ratio_BT < 1.0 - self.clip_low) & (advantages_BT < 0)
        return PolicyTerms(loss_BT, ratio_BT, above_BT | below_BT)


@dataclass(frozen=True)
class DrGrpo(Grpo):
    """GRPO done right: without its two biases, by deviation and by length.

    Paper: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    Formula: GRPO's with `A = R - mean`; a deviation favors very easy and very hard questions.
    Denominator: `dr_grpo`, sequences x `loss_horizon`, a constant.
    Differs from the paper: the sampler's mismatch is corrected by default.
    """


@dataclass(frozen=True)
class Dapo(Grpo):
    """Decoupled clip and dynamic sampling policy optimization; the default.

    Paper: Yu et al. 2025, "DAPO", arXiv:2503.14476.
    Formula: GRPO's; the higher upper bound, "clip-higher", lets unlikely tokens become likely.
    Denominator: `token_mean`, the trained tokens of the whole batch, not of a microbatch.
    Differs from the paper: environments sample dynamically (`ensure_scores_are_not_same`).
    """

    clip_high: float = 0.28


@dataclass(frozen=True)
class DualClip(Grpo):
    """PPO with a second bound: a token that became much more likely cannot dominate the step.

    Paper: Ye et al. 2019, "Mastering Complex Control in MOBA Games", arXiv:1912.09729.
    Formula: for A < 0 `min(clipped surrogate, -A c)`; for A >= 0 GRPO's.
    Denominator: `token_mean`.
    Differs from the paper: no critic; advantages come from the group.
    """

    dual_clip: float = 3.0

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        loss_BT, ratio_BT, bound_BT = super().__call__(inputs)
        is_negative_BT = inputs.advantages_BT < 0
        lower_BT = torch.minimum(loss_BT, -inputs.advantages_BT * self.dual_clip)
        bound_BT = bound_BT | (is_negative_BT & (ratio_BT > self.dual_clip))
        return PolicyTerms(torch.where(is_negative_BT, lower_BT, loss_BT), ratio_BT, bound_BT)


@dataclass(frozen=True)
class Gspo(Grpo):
    """Group sequence policy optimization: one ratio per sequence.

    Paper: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071.
    Formula: GRPO's with `s = exp(mean_t (l - anchor))` as r, in the form of GSPO-token,
    `log s_t = sg(mean) + l - sg(l)`: the same if all tokens of a sequence share A.
    Denominator: `sequence_mean`.
    Differs from the paper: the bounds are 0.2; the paper's, 3e-4 and 4e-4, fit a mean better.
    """

    def ratio_BT(self, inputs: PolicyInputs) -> Tensor:
        logprobs_BT = inputs.logprobs_BT
        mismatch = PolicyMismatch(
            (logprobs_BT - inputs.anchor_BT).detach(), inputs.mask_BT, inputs.sequence_ids_BT
        )
        return log_ratio_BT(mismatch.means_BT + logprobs_BT, logprobs_BT.detach()).exp()


@dataclass(frozen=True)
class Cispo:
    """Clipped importance-sampling policy optimization.

    Paper: MiniMax 2025, "MiniMax-M1", arXiv:2506.13585.
    Formula: `-sg(clip(r, 1 - low, 1 + high)) A l`: only the weight of a token is bounded, so that
    rare tokens which determine the course of a completion keep a gradient.
    Denominator: `token_mean`.
    Differs from the paper, which has no lower bound: `clip_eps 1` makes it 0.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        ratio_BT = inputs.ratio_BT.detach()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        loss_BT = -ratio_BT.clamp(low, high) * inputs.advantages_BT * inputs.logprobs_BT
        return PolicyTerms(loss_BT, ratio_BT, (ratio_BT < low) | (ratio_BT > high))


@dataclass(frozen=True)
class Dppo:
    """Divergence-bounded policy optimization with a quadratic pull to the sampler.

    Source: prime-rl's default loss.
    Formula: `-[keep] A exp(l - mu) + pull (l - mu)^2`. A token is dropped if its probability moved
    too far in the direction of A: `e^l - e^mu > max_shift` for A > 0, `< -max_shift` for A <= 0.
    A bound on the ratio would drop rare tokens, whose ratio is large for a small change.
    Denominator: `token_mean`.
    Differs from the source: tokens without mu count as on policy (ratio 1, no pull).
    """

    max_shift: float = 0.2
    pull: float = 1e-3

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        log_BT = log_ratio_BT(inputs.logprobs_BT, inputs.anchor_BT)
        shift_BT = (inputs.logprobs_BT.exp() - inputs.anchor_BT.exp()).detach()
        dropped_BT = self.drops_BT(shift_BT, inputs.advantages_BT)
        policy_BT = torch.where(dropped_BT, 0.0, -inputs.advantages_BT * log_BT.exp())
        # Not clamped: the tokens that drifted most must not lose their pull.
        pull_BT = self.pull * (inputs.logprobs_BT - inputs.anchor_BT) ** 2
        return PolicyTerms(policy_BT + pull_BT, log_BT.exp().detach(), dropped_BT)

    def drops_BT(self, shift_BT: Tensor, advantages_BT: Tensor) -> Tensor:
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

    def drops_BT(self, shift_BT: Tensor, advantages_BT: Tensor) -> Tensor:
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
        ratio_BT, unbound_BT = inputs.ratio_BT, torch.zeros_like(inputs.mask_BT)
        return PolicyTerms(-inputs.advantages_BT * ratio_BT, ratio_BT.detach(), unbound_BT)


@dataclass(frozen=True)
class CustomLoss:
    """A function of the user's own, named by `loss_fn`; `custom` checks it before the run.

    Source: the function's.
    Formula: the function's; it returns the loss of every token, or `PolicyTerms`.
    Denominator: `token_mean`.
    Differs from the others: the file or module is the user's.
    """

    function: Callable[[PolicyInputs], Tensor | PolicyTerms]

    def __call__(self, inputs: PolicyInputs) -> PolicyTerms:
        versions = [tensor._version for tensor in inputs if tensor is not None]
        terms = self.function(inputs)
        if versions != [tensor._version for tensor in inputs if tensor is not None]:
            raise ConfigError(
                "loss_fn changes its inputs in place, which other terms of the loss and later "
                "updates read; use operations without a final underscore"
            )
        if not isinstance(terms, PolicyTerms):
            terms = PolicyTerms(terms, inputs.ratio_BT, torch.zeros_like(inputs.mask_BT))
        shape = tuple(inputs.mask_BT.shape)
        for what, found in zip(("loss", "ratio", "bound"), terms, strict=True):
            if not isinstance(found, Tensor) or found.shape != shape:
                got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
                raise ConfigError(
                    f"loss_fn: expected the {what} of every token, shape {shape}; "
                    f"got {' '.join(got.split()):.80}"
                )
        return PolicyTerms(terms.loss_BT, terms.ratio_BT.detach(), terms.bound_BT.bool())


class PolicyMismatch(NamedTuple):
    """Differences of logprobs, such as `o - mu`, on one microbatch."""

    log_weight_BT: Tensor
    """Without gradient, 0 where masked or where mu is unknown."""
    mask_BT: Tensor
    sequence_ids_BT: Tensor | None = None

    @property
    def sums_BT(self) -> Tensor:
        return sequence_sums_BT(self.log_weight_BT, self.sequence_ids_BT)

    @property
    def means_BT(self) -> Tensor:
        counts_BT = sequence_sums_BT(self.mask_BT.to(self.log_weight_BT), self.sequence_ids_BT)
        return self.sums_BT / counts_BT.clamp(min=1)


class Weights(NamedTuple):
    """Factor of the policy loss of each token, and where it was truncated or dropped."""

    weight_BT: Tensor
    cut_BT: Tensor

    @classmethod
    def up_to(cls, cap: float, log_weight_BT: Tensor) -> Weights:
        weight_BT = log_ratio_BT(log_weight_BT).exp()
        return cls(weight_BT.clamp(max=cap), weight_BT > cap)

    @classmethod
    def within(cls, floor: float, cap: float, log_BT: Tensor, log_weight_BT: Tensor) -> Weights:
        """Return the weights of tokens for which `exp(log)` is inside the bounds."""
        value_BT = log_ratio_BT(log_BT).exp()
        cut_BT = (value_BT < floor) | (value_BT > cap)
        return cls(torch.where(cut_BT, 0.0, log_ratio_BT(log_weight_BT).exp()), cut_BT)


Correction = Callable[[PolicyMismatch], Weights]


@dataclass(frozen=True)
class TokenTruncation:
    """Truncated importance sampling per token; the default.

    Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training".
    Formula: `min(w, cap)` with `w = exp(o - mu)`. Biased per sequence, of low variance.
    Denominator: the policy loss's own.
    Differs from the paper: tokens without mu have weight 1.
    """

    cap: float = 2.0

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        return Weights.up_to(self.cap, mismatch.log_weight_BT)


@dataclass(frozen=True)
class TokenMask:
    """IcePop: drop tokens on which the two engines disagree.

    Paper: Ling team 2025, "Every Step Evolves", arXiv:2510.18855.
    Formula: `w` inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from truncation: tokens outside have no gradient instead of a bounded one, also those
    that are much less likely for the trainer.
    """

    cap: float = 5.0
    floor: float = 0.5

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        log_BT = mismatch.log_weight_BT
        return Weights.within(self.floor, self.cap, log_BT, log_BT)


@dataclass(frozen=True)
class SequenceTruncation:
    """Truncated importance sampling per sequence.

    Source: verl and TRL, each under the name sequence-level truncated importance sampling.
    Formula: `min(exp(sum_t (o - mu)), cap)`. Unbiased before the cap, of high variance.
    Denominator: the policy loss's own.
    Differs from the token form: one outlier changes the weight of all tokens.
    """

    cap: float = 2.0

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        return Weights.up_to(self.cap, mismatch.sums_BT)


@dataclass(frozen=True)
class SequenceMask:
    """Drop whole sequences that are far from their sampler.

    Source: TRL's default, with cap 3 and no floor.
    Formula: `exp(sum_t (o - mu))` for every token if it is inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from `GeometricMask`: long sequences, whose product deviates more, are dropped more.
    """

    cap: float = 3.0
    floor: float = 0.0

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        sums_BT = mismatch.sums_BT
        return Weights.within(self.floor, self.cap, sums_BT, sums_BT)


@dataclass(frozen=True)
class GeometricMask:
    """Drop whole sequences whose tokens are on average far from their sampler.

    Source: NeMo RL's sequence mask (bounds 0.999 and 1.002) and SkyRL's (0.99 and 1.01).
    Formula: `w` of each token if `exp(mean_t (o - mu))` is inside `[floor, cap]`, 0 outside.
    Denominator: the policy loss's own.
    Differs from `SequenceMask`: the mean does not grow with length; the weights have no cap.
    """

    cap: float = 1.01
    floor: float = 0.99

    def __call__(self, mismatch: PolicyMismatch) -> Weights:
        return Weights.within(self.floor, self.cap, mismatch.means_BT, mismatch.log_weight_BT)


POLICY_LOSSES: dict[AlgorithmName, type[Any]] = {
    "dapo": Dapo, "grpo": Grpo, "dr_grpo": DrGrpo, "dual_clip": DualClip, "gspo": Gspo,
    "cispo": Cispo, "dppo": Dppo, "ipo": Ipo, "importance_sampling": ImportanceSampling,
}  # fmt: skip
"""Class of each row of `ALGORITHMS`."""

CORRECTION_CLASSES: dict[CorrectionName, type[Any]] = {
    "token_truncate": TokenTruncation, "token_mask": TokenMask,
    "sequence_truncate": SequenceTruncation, "sequence_mask": SequenceMask,
    "geometric_mask": GeometricMask,
}  # fmt: skip
"""Class of each row of `CORRECTIONS`."""


@dataclass(frozen=True)
class KlPenalty:
    """An estimate of KL(policy || reference) of every token.

    Source: Schulman 2020, "Approximating KL Divergence"; k3 is GRPO's, arXiv:2402.03300; with the
    ratio it is DeepSeek-V3.2's, arXiv:2512.02556.
    Formula: k1 `l - f`, k2 `(l - f)^2 / 2`, k3 `e^(f - l) - (f - l) - 1`, times `coef`. k1 and k3
    are unbiased, but only k2 has the gradient of the true KL, on policy; k1's is 0 in expectation,
    k3's that of KL(reference || policy). With `is_unbiased`, they are multiplied by r: k1 and k3
    then have the gradient of the true KL, k2 that of its biased value.
    Denominator: the policy loss's own.
    Differs from the sources: k3's exponent is clamped; r is the ratio to the anchor, as in TRL.
    """

    coef: float
    estimator: KlEstimator = "k3"
    is_unbiased: bool = False


def kl_BT(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Return an estimate of `KlPenalty`, before its coefficient and ratio."""
    if estimator == "k1":
        return logprobs_BT - ref_logprobs_BT
    if estimator == "k2":
        return 0.5 * (logprobs_BT - ref_logprobs_BT) ** 2
    log_BT = log_ratio_BT(ref_logprobs_BT, logprobs_BT)
    return log_BT.exp() - log_BT - 1.0


@dataclass(frozen=True)
class SupervisedLoss:
    """The loss of trajectories marked `sft`, which no policy sampled.

    Source: maximum likelihood of given tokens, the loss of supervised fine-tuning.
    Formula: `-coef l`, without advantage, ratio, correction or KL.
    Denominator: the demonstrations' tokens of the whole batch, as in prime-rl.
    Differs from the policy losses: the scores of the group have no influence.
    """

    coef: float = 1.0


PADDED_TEACHER_ID = -1
PADDED_TEACHER_LOGPROB = -1e9


class TeacherTokens(NamedTuple):
    """The teacher's top tokens, padded, and the student's logprobs of them."""

    ids_BTK: Tensor
    teacher_logprobs_BTK: Tensor
    student_logprobs_BTK: Tensor
    """At the distillation temperature, with gradient."""

    def normalized_BTK(self, logprobs_BTK: Tensor) -> Tensor:
        """Return logprobs that are normalized over the tokens of the teacher's."""
        # A finite fill value avoids NaN in rows without any token, and in their gradients.
        is_token_BTK = self.ids_BTK != PADDED_TEACHER_ID
        return torch.where(is_token_BTK, logprobs_BTK, PADDED_TEACHER_LOGPROB).log_softmax(dim=-1)

    def mean(self, terms_BTK: Tensor, mask_BT: Tensor, num_tokens: int) -> Tensor:
        """Return this microbatch's share of the mean of sums over K."""
        terms_BT = torch.where(self.ids_BTK != PADDED_TEACHER_ID, terms_BTK, 0.0).sum(dim=-1)
        return torch.where(mask_BT, terms_BT, 0.0).sum() / max(1, num_tokens)


@dataclass(frozen=True)
class Distillation:
    """On-policy distillation: moves the student towards the teacher on the student's own samples.

    Paper: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (GKD), arXiv:2306.13649.
    Formula, with p the teacher's K logprobs over `temperature`, normalized: `cross_entropy`
    is `-sum_k p log q`, q the student over its whole vocabulary, with the gradient of KL(p || q);
    `reverse_kl`, which seeks modes, is `sum_k q' (log q' - log p)`, q' normalized over the K.
    Denominator: trained positions of the whole batch with at least one token of the teacher's.
    Differs from the paper: the teacher beyond K is unknown; `cross_entropy` makes the other tokens
    less likely, `reverse_kl` does not.
    """

    coef: float
    kind: Literal["cross_entropy", "reverse_kl"] = "cross_entropy"
    temperature: float = 1.0

    def __call__(self, teacher: TeacherTokens, mask_BT: Tensor, num_tokens: int) -> Tensor:
        """Return this microbatch's share, before the coefficient."""
        log_p_BTK, student_BTK = self._teacher_BTK(teacher), teacher.student_logprobs_BTK
        if self.kind == "cross_entropy":
            return teacher.mean(-log_p_BTK.exp() * student_BTK, mask_BT, num_tokens)
        log_q_BTK = teacher.normalized_BTK(student_BTK)
        return teacher.mean(log_q_BTK.exp() * (log_q_BTK - log_p_BTK), mask_BT, num_tokens)

    def divergence(self, teacher: TeacherTokens, mask_BT: Tensor, num_tokens: int) -> Tensor:
        """Return the share of the mean KL(p || q) in nats, for both kinds, without gradient."""
        log_p_BTK, student_BTK = self._teacher_BTK(teacher), teacher.student_logprobs_BTK.detach()
        return teacher.mean(log_p_BTK.exp() * (log_p_BTK - student_BTK), mask_BT, num_tokens)

    def _teacher_BTK(self, teacher: TeacherTokens) -> Tensor:
        logprobs_BTK = teacher.teacher_logprobs_BTK.to(teacher.student_logprobs_BTK.dtype)
        return teacher.normalized_BTK(logprobs_BTK / self.temperature)


@dataclass(frozen=True)
class LossInputs:
    """One microbatch; `MASKED_LOGPROB` stands for unknown logprobs, None for absent fields."""

    trainer_logprobs_BT: Tensor
    labels_BT: Tensor
    """Ids, or `IGNORE_INDEX`."""
    advantages_BT: Tensor
    inference_logprobs_BT: Tensor
    proximal_logprobs_BT: Tensor | None = None
    """None: sg(l), which is equal in the first update on a batch."""
    ref_logprobs_BT: Tensor | None = None
    is_sft_BT: Tensor | None = None
    """Bool, tokens of demonstrations."""
    teacher: TeacherTokens | None = None
    sequence_ids_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    """H; needed with an `entropy_coef`."""


class LossTerms(NamedTuple):
    """One microbatch's share of the loss, and detached tensors for the diagnostics."""

    loss: Tensor
    """The shares of all microbatches add up to the loss of the batch."""
    mask_BT: Tensor
    """Bool, tokens the policy loss trains."""
    ratio_BT: Tensor
    bound_BT: Tensor
    weights: Weights | None
    kl_BT: Tensor | None
    parts: dict[str, float]
    """Shares of the terms in use: kl_penalty and entropy_bonus (after their coefficients), policy,
    sft and distill (before theirs), and the divergence from the teacher, not in the loss."""


@dataclass(frozen=True)
class TrainingLoss:
    """Composes an algorithm, a correction, a KL penalty, demonstrations and distillation.

    With `anchor="trainer"` and one update per batch, the ratio is a 1 with the gradient of l, which
    no clip changes; the correction accounts for stale or differently rounded rollouts. The ratio of
    `anchor="inference"` contains that mismatch, so that a correction raises `ConfigError`. Tokens
    without mu have ratio and weight 1.
    """

    algorithm: PolicyLoss = field(default_factory=Dapo)
    anchor: Anchor = "trainer"
    correction: Correction | None = None
    reduction: Reduction = "token_mean"
    horizon: int = 1
    """Constant sequence length in the denominator of the reduction `dr_grpo`."""
    policy_coef: float = 1.0
    kl: KlPenalty | None = None
    entropy_coef: float = 0.0
    sft: SupervisedLoss = field(default_factory=SupervisedLoss)
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        refuse_double_count(self.anchor, is_corrected=self.correction is not None)
        if self.horizon < 1:
            raise ConfigError(f"horizon={self.horizon}: needs at least one token per sequence")

    def __call__(self, inputs: LossInputs, totals: BatchTotals) -> LossTerms:
        """Compute this microbatch's share of the loss; `totals` count the whole batch."""
        is_sft_BT, ids_BT = inputs.is_sft_BT, inputs.sequence_ids_BT
        trained_BT = inputs.labels_BT != IGNORE_INDEX
        mask_BT = trained_BT if is_sft_BT is None else trained_BT & ~is_sft_BT
        reduction: dict[str, Any] = {"reduction": self.reduction, "horizon": self.horizon}
        reduction["sequence_ids_BT"] = ids_BT
        logprobs_BT = torch.where(mask_BT, inputs.trainer_logprobs_BT, 0.0)
        proximal_BT = logprobs_BT.detach()
        if inputs.proximal_logprobs_BT is not None:
            proximal_BT = torch.where(mask_BT, inputs.proximal_logprobs_BT.detach(), 0.0)
        anchor_BT = proximal_BT
        if self.anchor == "inference":
            anchor_BT = _known_BT(inputs.inference_logprobs_BT, mask_BT, logprobs_BT.detach())
        advantages_BT = inputs.advantages_BT.to(logprobs_BT.dtype)
        entropy_BT = inputs.entropy_BT
        if entropy_BT is not None:
            entropy_BT = torch.where(mask_BT, entropy_BT, 0.0)
        policy = PolicyInputs(logprobs_BT, anchor_BT, advantages_BT, mask_BT, ids_BT, entropy_BT)
        terms, weights, kl_terms_BT = self.algorithm(policy), None, None
        loss_BT = terms.loss_BT
        if self.correction is not None:
            log_BT = proximal_BT - _known_BT(inputs.inference_logprobs_BT, mask_BT, proximal_BT)
            weights = self.correction(PolicyMismatch(log_BT, mask_BT, ids_BT))
            loss_BT = weights.weight_BT * loss_BT
        parts = {"policy": masked_reduce(loss_BT, mask_BT, totals, **reduction)}
        loss = self.policy_coef * parts["policy"]
        if self.kl is not None and inputs.ref_logprobs_BT is not None:
            # Where the reference is unknown, it is l itself: no value and no gradient.
            reference_BT = _known_BT(inputs.ref_logprobs_BT, mask_BT, logprobs_BT)
            kl_terms_BT = kl_BT(logprobs_BT, reference_BT, estimator=self.kl.estimator)
            penalty_BT = kl_terms_BT * policy.ratio_BT if self.kl.is_unbiased else kl_terms_BT
            penalty = masked_reduce(penalty_BT, mask_BT, totals, **reduction)
            parts["kl_penalty"] = self.kl.coef * penalty
            loss = loss + parts["kl_penalty"]
        if self.entropy_coef:
            assert entropy_BT is not None
            bonus = masked_reduce(entropy_BT, mask_BT, totals, **reduction)
            parts["entropy_bonus"] = self.entropy_coef * bonus
            loss = loss - parts["entropy_bonus"]
        if is_sft_BT is not None:
            sft_BT = torch.where(trained_BT & is_sft_BT, -inputs.trainer_logprobs_BT, 0.0)
            parts["sft"] = sft_BT.sum() / max(1, totals.num_sft_tokens)
            loss = loss + self.sft.coef * parts["sft"]
        if self.distillation is not None and inputs.teacher is not None:
            taught = (inputs.teacher, trained_BT, totals.num_distill_tokens)
            parts["distill"] = self.distillation(*taught)
            parts["divergence"] = self.distillation.divergence(*taught)
            loss = loss + self.distillation.coef * parts["distill"]
        kl_terms_BT = None if kl_terms_BT is None else kl_terms_BT.detach()
        shares = {name: float(part.detach()) for name, part in parts.items()}
        bound_BT = terms.bound_BT & mask_BT
        return LossTerms(loss, mask_BT, terms.ratio_BT, bound_BT, weights, kl_terms_BT, shares)


def _known_BT(logprobs_BT: Tensor, mask_BT: Tensor, others_BT: Tensor) -> Tensor:
    """Return logprobs where they are known, and `others` elsewhere."""
    is_known_BT = mask_BT & (logprobs_BT != MASKED_LOGPROB)
    return torch.where(is_known_BT, logprobs_BT.to(others_BT.dtype), others_BT)


def make_loss(config: TrainingConfig) -> TrainingLoss:
    """Return the loss that the settings describe."""
    choice, correction = config.loss_choice, None
    if config.loss_fn is None:
        algorithm = POLICY_LOSSES[config.algorithm](**choice.bounds)
    else:
        algorithm = CustomLoss(import_function(config.loss_fn, config.loss_fn_args))
    if choice.correction is not None:
        correction = CORRECTION_CLASSES[choice.correction.name](**choice.correction.bounds)
    kl = KlPenalty(config.kl_coef, config.kl_estimator, is_unbiased=config.kl_unbiased)
    distillation = Distillation(
        config.distill_coef, config.distill_loss, config.distill_temperature
    )
    return TrainingLoss(
        algorithm=algorithm,
        anchor=choice.anchor,
        correction=correction,
        reduction=choice.reduction,
        horizon=config.loss_horizon or config.seq_len,
        policy_coef=config.policy_coef,
        kl=kl if config.kl_coef else None,
        entropy_coef=config.entropy_coef,
        sft=SupervisedLoss(config.sft_coef),
        distillation=distillation if config.distill_coef else None,
    )
