"""The oracle's batch: four sequences of one group, every logprob the losses look at, in float64."""

from __future__ import annotations

from typing import Any

import torch

from example_trainer.loss import BatchTotals, LossInputs, TrainingLoss

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
LABELS = torch.where(MASK, 7, -100)
TOTALS = BatchTotals(num_tokens=9, num_sequences=4)
TRAINER = [[-0.5, -1, -0.2], [-0.7, -1.5, 0], [-0.4, -0.9, -2], [-0.3, 0, 0]]
PROXIMAL = [[-0.8, -1, -0.25], [-0.4, -1.6, 0], [-0.9, -0.8, -1.5], [-0.9, 0, 0]]
INFERENCE = [[-0.9, -1.1, -0.2], [-0.4, -1.2, 0], [-0.8, -1.9, -1.5], [-1.1, 0, 0]]
REFERENCE = [[-0.6, -0.9, -0.3], [-0.6, -1.4, 0], [-0.5, -1, -1.8], [-0.5, 0, 0]]
ADVANTAGES = [[0.625] * 3, [-0.375] * 3, [-0.375] * 3, [0.125] * 3]


def double(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def oracle_inputs(
    trainer: torch.Tensor | None = None, rows: slice | list[int] = slice(None), **changes: Any
) -> LossInputs:
    """The oracle's batch, or some of its rows, with fields replaced."""
    trainer = double(TRAINER) if trainer is None else trainer
    fields: dict[str, Any] = {
        "trainer_logprobs_BT": trainer[rows],
        "labels_BT": LABELS[rows],
        "advantages_BT": double(ADVANTAGES)[rows],
        "inference_logprobs_BT": double(INFERENCE)[rows],
        "proximal_logprobs_BT": double(PROXIMAL)[rows],
        "ref_logprobs_BT": double(REFERENCE)[rows],
    }
    return LossInputs(**{**fields, **changes})


def oracle_loss(
    loss: TrainingLoss, rows: slice | list[int] = slice(None), **changes: Any
) -> tuple[float, Any]:
    """The loss and its gradient with respect to the trainer's logprobs, for some of the rows."""
    trainer = double(TRAINER).requires_grad_()
    terms = loss(oracle_inputs(trainer, rows, **changes), TOTALS)
    terms.loss.backward()
    return terms.loss.item(), trainer.grad
