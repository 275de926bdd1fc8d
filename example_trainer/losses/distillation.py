"""On-policy distillation: a teacher's likeliest tokens at every position of the student's rollouts.

Shape suffixes: B rows of one micro-batch, T padded length, K the teacher's choices, padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

__all__ = ["PADDED_TEACHER_ID", "PADDED_TEACHER_LOGPROB", "Distillation", "TeacherTokens"]

PADDED_TEACHER_ID = -1
PADDED_TEACHER_LOGPROB = -1e9


class TeacherTokens(NamedTuple):
    """The teacher's choices and what the student thinks of them."""

    ids_BTK: torch.Tensor
    """(B, T, K) ids, `PADDED_TEACHER_ID` where there are fewer than K."""
    teacher_logprobs_BTK: torch.Tensor
    """(B, T, K) logprobs, `PADDED_TEACHER_LOGPROB` at padding."""
    student_logprobs_BTK: torch.Tensor
    """(B, T, K) logprobs of the ids at the distillation temperature, with gradient."""

    @property
    def valid_BTK(self) -> torch.Tensor:
        """(B, T, K) bool, what is not padding."""
        return self.ids_BTK != PADDED_TEACHER_ID


@dataclass(frozen=True)
class Distillation:
    """Pulls the student to the teacher's distribution where the student goes.

    Paper: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (GKD), arXiv:2306.13649.
    Formula, with p the teacher's K logprobs divided by `temperature` and normalised over them:
    `cross_entropy` is `-sum_k p log q`, q the student over its whole vocabulary, whose gradient is
    that of KL(p || q); `reverse_kl` is `sum_k q' (log q' - log p)`, q' the student normalised over
    the same K, which seeks one mode of the teacher and needs K of 2 or more.
    Denominator: trained positions of the whole batch with at least one choice of the teacher's.
    Differs from the paper: the teacher's tail beyond K is unknown; `cross_entropy` therefore
    takes mass from the tail, `reverse_kl` leaves the tail alone.
    """

    coef: float
    kind: Literal["cross_entropy", "reverse_kl"] = "cross_entropy"
    temperature: float = 1.0
    """Divides the logits of both; the student's are divided before they come here."""

    def __call__(
        self, teacher: TeacherTokens, mask_BT: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return this micro-batch's share, not yet multiplied by the coefficient."""
        return _share(self.token_loss_BT(teacher), teacher, mask_BT, num_tokens)

    def divergence(
        self, teacher: TeacherTokens, mask_BT: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Return this micro-batch's share of the mean KL(p || q) in nats, without gradient.

        Unlike the cross entropy it is 0 for a student that is like its teacher, and it means the
        same for both kinds of loss. Of a teacher's tail beyond K it knows nothing.
        """
        student_BTK = teacher.student_logprobs_BTK.detach()
        log_p_BTK = self._teacher_BTK(teacher)
        terms_BTK = log_p_BTK.exp() * (log_p_BTK - student_BTK)
        divergence_BT = torch.where(teacher.valid_BTK, terms_BTK, 0.0).sum(dim=-1)
        return _share(divergence_BT, teacher, mask_BT, num_tokens)

    def token_loss_BT(self, teacher: TeacherTokens) -> torch.Tensor:
        """Return (B, T) the loss of each position, 0 where the teacher said nothing."""
        valid_BTK = teacher.valid_BTK
        student_BTK = teacher.student_logprobs_BTK
        log_p_BTK = self._teacher_BTK(teacher)
        if self.kind == "cross_entropy":
            terms_BTK = -log_p_BTK.exp() * student_BTK
        else:
            log_q_BTK = _normalised(student_BTK, valid_BTK)
            terms_BTK = log_q_BTK.exp() * (log_q_BTK - log_p_BTK)
        return torch.where(valid_BTK, terms_BTK, 0.0).sum(dim=-1)

    def _teacher_BTK(self, teacher: TeacherTokens) -> torch.Tensor:
        """Return (B, T, K) log p."""
        dtype = teacher.student_logprobs_BTK.dtype
        scaled_BTK = teacher.teacher_logprobs_BTK.to(dtype) / self.temperature
        return _normalised(scaled_BTK, teacher.valid_BTK)


def _share(
    values_BT: torch.Tensor, teacher: TeacherTokens, mask_BT: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    used_BT = mask_BT & teacher.valid_BTK.any(dim=-1)
    return torch.where(used_BT, values_BT, 0.0).sum() / max(1, num_tokens)


def _normalised(logprobs_BTK: torch.Tensor, valid_BTK: torch.Tensor) -> torch.Tensor:
    # A finite filler keeps rows without any choice, and their gradients, free of NaN.
    return torch.where(valid_BTK, logprobs_BTK, PADDED_TEACHER_LOGPROB).log_softmax(dim=-1)
