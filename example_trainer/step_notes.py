"""What the log says about a step beside its figures: whatever a person would act on."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from example_trainer.batch import BatchSummary

__all__ = ["StepNotes"]

logger = logging.getLogger(__name__)

_MISALIGNED_LOGPROB = 0.5
_SUSPICIOUS_GAP = 2.0
_WRONG_MODE_GAP = 0.05
"""Nats by which sampler and trainer differ on average, and half of it under the other mode, before
`--logprobs-mode` is doubted; rounding makes less."""


class StepNotes:
    """Warns about batches and metrics that look wrong."""

    def __init__(self, *, has_raw_logprobs: bool = False) -> None:
        self._noted_fields: frozenset[str] = frozenset()
        self._has_raw_logprobs = has_raw_logprobs
        self._is_mode_noted = False

    def add(self, summary: BatchSummary, metrics: Mapping[str, float]) -> None:
        """Say what there is to say about one step; an unknown field is named once in a run."""
        for name in sorted(summary.unknown_fields - self._noted_fields):
            logger.warning("groups carry a field %r, which nothing in this trainer reads", name)
        self._noted_fields |= summary.unknown_fields
        if summary.bad_groups:
            logger.warning(
                "%d of %d groups were left out (--on-bad-group stop ends the run instead): %s",
                len(summary.bad_groups),
                len(summary.bad_groups) + summary.num_groups,
                next(iter(summary.bad_groups.values())),
            )
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
        self._note_wrong_mode(metrics)
        gap = abs(inference_mean - metrics["logprobs/training_mean"])
        if inference_mean > _MISALIGNED_LOGPROB:
            logger.warning(
                "mean inference logprob %.2f: masks and logprobs disagree", inference_mean
            )
        elif gap > _SUSPICIOUS_GAP:
            logger.warning("trainer and engine logprobs differ by %.2f in the mean", gap)

    def _note_wrong_mode(self, metrics: Mapping[str, float]) -> None:
        """Say once that the engine's logprobs look like those of the other `--logprobs-mode`."""
        difference = metrics["alignment/diff_abs_mean"]
        other = metrics.get("alignment/other_mode_diff_abs_mean")
        if other is None or self._is_mode_noted:
            return
        if difference > _WRONG_MODE_GAP and other < 0.5 * difference:
            self._is_mode_noted = True
            present, right = (
                ("raw", "processed") if self._has_raw_logprobs else ("processed", "raw")
            )
            logger.warning(
                "the engine's logprobs are taken for %s ones and differ from the trainer's by %.2f "
                "on average, by %.2f if they are %s: set --logprobs-mode %s",
                present,
                difference,
                other,
                right,
                right,
            )
