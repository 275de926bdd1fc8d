"""What the log says about a step beside its figures: whatever a person would act on."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from example_trainer.batch import BatchSummary

__all__ = ["StepNotes"]

logger = logging.getLogger(__name__)

_MISALIGNED_LOGPROB = 0.5
_SUSPICIOUS_GAP = 2.0


class StepNotes:
    """Warns about batches and metrics that look wrong."""

    def __init__(self) -> None:
        self._noted_fields: frozenset[str] = frozenset()

    def add(self, summary: BatchSummary, metrics: Mapping[str, float]) -> None:
        """Say what there is to say about one step; an unknown field is named once in a run."""
        for name in sorted(summary.unknown_fields - self._noted_fields):
            logger.warning("groups carry a field %r, which nothing in this trainer reads", name)
        self._noted_fields |= summary.unknown_fields
        if metrics["train/skipped_steps"]:
            logger.warning("the gradient was not finite; this step left the weights as they were")
        if summary.num_silent_groups == summary.num_groups:
            logger.warning(
                "no group had an advantage, a demonstration or a teacher's answer: this batch "
                "carried no gradient"
            )
        if summary.num_truncated_rows:
            logger.warning("%d sequences were cut to seq_len", summary.num_truncated_rows)
        if summary.num_rows_of_cut_sampling:
            logger.warning(
                "%d sequences were sampled with top-p, top-k or min-p: their logprobs and the "
                "trainer's are not of the same distribution",
                summary.num_rows_of_cut_sampling,
            )
        inference_mean = metrics.get("logprobs/inference_mean")
        if inference_mean is None:
            return
        gap = abs(inference_mean - metrics["logprobs/training_mean"])
        if inference_mean > _MISALIGNED_LOGPROB:
            logger.warning(
                "mean inference logprob %.2f: masks and logprobs disagree", inference_mean
            )
        elif gap > _SUSPICIOUS_GAP:
            logger.warning("trainer and engine logprobs differ by %.2f in the mean", gap)
