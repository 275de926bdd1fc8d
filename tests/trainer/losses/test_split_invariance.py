"""Each loss of one batch, cut, padded and packed at random: the same value and gradient."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.loss import (
    CORRECTION_CLASSES,
    POLICY_LOSSES,
    BatchTotals,
    Distillation,
    KlPenalty,
    LossInputs,
    TeacherTokens,
    TrainingLoss,
)
from example_trainer.loss_choice import ALGORITHMS, CORRECTIONS

pytestmark = pytest.mark.slow

NUM_CHOICES = 3
FILLS = {
    "trainer_logprobs": 0.0,
    "proximal_logprobs": -3.0,
    "advantages": 9.0,
    "inference_logprobs": MASKED_LOGPROB,
    "ref_logprobs": MASKED_LOGPROB,
}


def make_sequences(seed):
    """Two to seven sequences, some masked, some demonstrations, some without logprobs."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(rng.randint(2, 7)):
        length = rng.randint(1, 9)
        masks_all = rng.random() < 0.15
        knows_inference = rng.random() < 0.8
        sequence = {
            name: torch.tensor([rng.uniform(-3, 0) for _ in range(length)], dtype=torch.float64)
            for name in FILLS
        }
        sequence["advantages"] += 1.5
        if not knows_inference:
            sequence["inference_logprobs"][:] = MASKED_LOGPROB
        sequence["labels"] = torch.tensor(
            [IGNORE_INDEX if masks_all or rng.random() < 0.25 else 7 for _ in range(length)]
        )
        sequence["is_sft"] = torch.full((length,), rng.random() < 0.25)
        ids = [[c if rng.random() < 0.8 else -1 for c in range(NUM_CHOICES)] for _ in range(length)]
        sequence["ids"] = torch.tensor(ids)
        for name in ("teacher", "student"):
            sequence[name] = torch.rand(length, NUM_CHOICES, dtype=torch.float64) * -3
        sequence["student"].requires_grad_()
        sequence["trainer_logprobs"].requires_grad_()
        sequences.append(sequence)
    return sequences


def count(sequences):
    policy, num_sft, num_distilled = [], 0, 0
    for sequence in sequences:
        trained = sequence["labels"] != IGNORE_INDEX
        num_distilled += int((trained & (sequence["ids"] >= 0).any(-1)).sum())
        if sequence["is_sft"].any():
            num_sft += int(trained.sum())
        else:
            policy.append(int(trained.sum()))
    return BatchTotals(sum(policy), sum(n > 0 for n in policy), num_sft, num_distilled)


def rows_of(packs, width, name, fill):
    """(B, width, ...) with each pack's sequences one after another, then padding."""
    rows = []
    for pack in packs:
        joined = torch.cat([sequence[name] for sequence in pack])
        missing = width - len(joined)
        padding = torch.full((missing, *joined.shape[1:]), fill, dtype=joined.dtype)
        rows.append(torch.cat([joined, padding]))
    return torch.stack(rows)


def microbatch(packs, extra):
    """One micro-batch of packed rows, `extra` columns wider than needed."""
    width = max(sum(len(s["labels"]) for s in pack) for pack in packs) + extra
    number = 0
    for pack in packs:
        for sequence in pack:
            sequence["number"] = torch.full((len(sequence["labels"]),), number)
            number += 1
    tensors = {f"{name}_BT": rows_of(packs, width, name, fill) for name, fill in FILLS.items()}
    return LossInputs(
        **tensors,
        labels_BT=rows_of(packs, width, "labels", IGNORE_INDEX),
        is_sft_BT=rows_of(packs, width, "is_sft", False),
        sequence_ids_BT=rows_of(packs, width, "number", 0),
        teacher=TeacherTokens(
            rows_of(packs, width, "ids", -1),
            rows_of(packs, width, "teacher", -1e9),
            rows_of(packs, width, "student", 0.0),
        ),
    )


def value_and_gradient(loss, sequences, layout):
    """Loss and gradients of a layout: micro-batches of rows of sequences, each with padding."""
    total = 0.0
    for packs, extra in layout:
        share = loss(microbatch(packs, extra), count(sequences)).loss
        share.backward()
        total += share.item()
    gradients = []
    for sequence in sequences:
        for name in ("trainer_logprobs", "student"):
            gradients.append(sequence[name].grad.clone())
            sequence[name].grad = None
    return total, gradients


def random_layout(sequences, seed):
    rng = random.Random(seed)
    rest = list(sequences)
    rng.shuffle(rest)
    layout = []
    while rest:
        packs = []
        for _ in range(rng.randint(1, 3)):
            size = rng.randint(1, 3)
            pack, rest = rest[:size], rest[size:]
            if pack:
                packs.append(pack)
        layout.append((packs, rng.randint(0, 5)))
    return layout


def make_loss(name, correction, reduction):
    row = ALGORITHMS[name]
    return TrainingLoss(
        POLICY_LOSSES[name](),
        anchor=row.anchors[0] if correction is None else "trainer",
        correction=None if correction is None else CORRECTION_CLASSES[correction](),
        reduction=reduction or row.reduction,
        horizon=5,
        kl=KlPenalty(0.1),
        distillation=Distillation(0.3, temperature=2.0),
    )


CASES = [
    *((name, None, None) for name in ALGORITHMS),
    *(("gspo", None, reduction) for reduction in ("token_mean", "sequence_sum", "sum", "dr_grpo")),
    *(("dapo", correction, None) for correction in CORRECTIONS),
]


@pytest.mark.parametrize(("name", "correction", "reduction"), CASES)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_loss_depends_neither_on_split_nor_padding_nor_packing(name, correction, reduction, seed):
    torch.manual_seed(seed)
    sequences = make_sequences(seed)
    loss = make_loss(name, correction, reduction)
    plain = [([[sequence] for sequence in sequences], 0)]

    value, gradients = value_and_gradient(loss, sequences, plain)
    other_value, other_gradients = value_and_gradient(
        loss, sequences, random_layout(sequences, seed)
    )

    assert other_value == pytest.approx(value, abs=1e-10)
    for gradient, other in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(other, gradient, atol=1e-10, rtol=0)


def test_one_sequence_per_row_needs_no_sequence_ids():
    sequences = make_sequences(3)
    loss = make_loss("gspo", "sequence_truncate", None)
    inputs = microbatch([[sequence] for sequence in sequences], 2)

    with_ids = loss(inputs, count(sequences)).loss
    without = loss(LossInputs(**{**vars(inputs), "sequence_ids_BT": None}), count(sequences)).loss

    assert without.item() == pytest.approx(with_ids.item(), abs=1e-12)
