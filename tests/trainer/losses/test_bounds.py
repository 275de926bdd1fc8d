"""Bounds, boundaries and denominators of the losses, with values computed by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from example_trainer.config import TrainingConfig
from example_trainer.loss import (
    CORRECTION_CLASSES,
    POLICY_LOSSES,
    BatchTotals,
    Dppo,
    GeometricMask,
    Grpo,
    Ipo,
    LossInputs,
    PolicyInputs,
    PolicyMismatch,
    SequenceMask,
    SequenceTruncation,
    TeacherTokens,
    TokenMask,
    TokenTruncation,
    TrainingLoss,
    clipped_surrogate_BT,
    kl_BT,
    log_ratio_BT,
    make_loss,
    masked_reduce,
    sequence_sums_BT,
)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def mask(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def test_log_ratio_is_new_minus_old_within_twenty():
    assert log_ratio_BT(row(-1.0, 0.0, -90.0), row(-3.0, -90.0, 0.0)).tolist() == [
        [2.0, 20.0, -20.0]
    ]


PACKED = torch.tensor([[0, 0, 1, 2, 2, 2]])


def test_sums_of_packed_sequences_are_their_own():
    values = row(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

    assert sequence_sums_BT(values, PACKED).tolist() == [[3.0, 3.0, 4.0, 56.0, 56.0, 56.0]]
    assert sequence_sums_BT(values).tolist() == [[63.0] * 6]
    assert sequence_sums_BT(row(), torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0)


def test_means_count_only_what_is_in_the_mask():
    values, used = row(1.0, 0.0, 0.0, 8.0, 16.0, 0.0), mask(1, 0, 0, 1, 1, 0)

    packed = PolicyMismatch(values, used, PACKED)
    assert packed.means_BT.tolist() == [[1.0, 1.0, 0.0, 12.0, 12.0, 12.0]]
    assert PolicyMismatch(values, used).means_BT[0, 0].item() == pytest.approx(25 / 3)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", 1 + 2 + 8 + 16),
        ("token_mean", 27 / 10),  # ten tokens in the whole batch
        ("dr_grpo", 27 / (5 * 3)),  # five sequences, horizon 3
        ("sequence_sum", 27 / 5),
        ("sequence_mean", ((1 + 2) / 2 + (8 + 16) / 2) / 5),
    ],
)
def test_reductions_of_packed_sequences_by_hand(reduction, expected):
    value = masked_reduce(
        row(1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
        mask(1, 1, 0, 1, 1, 0),
        BatchTotals(num_tokens=10, num_sequences=5),
        reduction=reduction,
        horizon=3,
        sequence_ids_BT=PACKED,
    )

    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("reduction", ["token_mean", "dr_grpo", "sequence_sum", "sequence_mean"])
def test_reduction_of_an_empty_batch_divides_by_one(reduction):
    totals = BatchTotals(num_tokens=0, num_sequences=0)

    value = masked_reduce(row(3.0), mask(1), totals, reduction=reduction)

    assert value.item() == 3.0


RATIOS = (0.5, 0.75, 1.0, 1.5, 1.75)


class GrpoOfRatios(Grpo):
    """The loss at exact ratios, which logprobs would round."""

    def ratio_BT(self, inputs):
        return row(*RATIOS)


@pytest.mark.parametrize(
    ("advantage", "loss", "bound"),
    [
        # low 0.25 and high 0.5: the bounds 0.75 and 1.5 themselves still have a gradient
        (2.0, [-1.0, -1.5, -2.0, -3.0, -3.0], [False, False, False, False, True]),
        (-2.0, [1.5, 1.5, 2.0, 3.0, 3.5], [True, False, False, False, False]),
        (0.0, [0.0] * 5, [False] * 5),
    ],
)
def test_clip_by_hand_on_both_sides_of_both_bounds(advantage, loss, bound):
    advantages = torch.full((1, 5), advantage, dtype=torch.float64)
    bounds = {"clip_low": 0.25, "clip_high": 0.5}

    assert clipped_surrogate_BT(row(*RATIOS), advantages, **bounds).abs().tolist() == [
        [abs(value) for value in loss]
    ]
    terms = GrpoOfRatios(**bounds)(
        PolicyInputs(row(*[0.0] * 5), row(*[0.0] * 5), advantages, mask(*[1] * 5))
    )
    assert terms.bound_BT.tolist() == [bound]


@pytest.mark.parametrize(
    ("loss", "advantage", "dropped"),
    [
        # shift of the probability: -0.5, -0.25, 0, 0.25 and 0.5, of which 0.25 is allowed
        (Dppo(max_shift=0.25), 1.0, [False, False, False, False, True]),
        (Dppo(max_shift=0.25), 0.0, [True, False, False, False, False]),
        (Dppo(max_shift=0.25), -1.0, [True, False, False, False, False]),
        (Ipo(max_shift=0.25), 1.0, [True, False, False, False, True]),
        (Ipo(max_shift=0.25), -1.0, [True, False, False, False, True]),
    ],
)
def test_moved_probabilities_are_dropped_beyond_the_bound_only(loss, advantage, dropped):
    shift = row(-0.5, -0.25, 0.0, 0.25, 0.5)

    assert loss.drops_BT(shift, torch.full_like(shift, advantage)).tolist() == [dropped]


def test_dropped_tokens_of_dppo_keep_the_pull():
    inputs = PolicyInputs(
        logprobs_BT=row(math.log(0.9), math.log(0.5)),
        anchor_BT=row(math.log(0.5), math.log(0.5)),
        advantages_BT=row(2.0, 2.0),
        mask_BT=mask(1, 1),
    )

    terms = Dppo(max_shift=0.25, pull=0.1)(inputs)

    assert terms.loss_BT.tolist()[0] == pytest.approx([0.1 * math.log(1.8) ** 2, -2.0])
    assert terms.bound_BT.tolist() == [[True, False]]
    assert terms.ratio_BT.tolist()[0] == pytest.approx([1.8, 1.0])


def test_pull_of_dppo_grows_beyond_the_clamp_of_the_ratio():
    inputs = PolicyInputs(row(-50.0).requires_grad_(), row(-1.0), row(0.0), mask(1))

    loss_BT = Dppo(pull=0.1)(inputs).loss_BT
    loss_BT.sum().backward()

    assert loss_BT.item() == pytest.approx(0.1 * 49.0**2)
    assert inputs.logprobs_BT.grad.item() == pytest.approx(-0.2 * 49.0)


def test_defaults_of_losses_and_corrections():
    defaults = {
        name: {field.name: field.default for field in dataclasses.fields(kind)}
        for name, kind in (POLICY_LOSSES | CORRECTION_CLASSES).items()
    }

    assert defaults == {
        "dapo": {"clip_low": 0.2, "clip_high": 0.28},
        "grpo": {"clip_low": 0.2, "clip_high": 0.2},
        "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2},
        "dual_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        "gspo": {"clip_low": 0.2, "clip_high": 0.2},
        "cispo": {"clip_low": 0.2, "clip_high": 0.28},
        "dppo": {"max_shift": 0.2, "pull": 1e-3},
        "ipo": {"max_shift": 0.1, "pull": 1e-3},
        "importance_sampling": {},
        "token_truncate": {"cap": 2.0},
        "token_mask": {"cap": 5.0, "floor": 0.5},
        "sequence_truncate": {"cap": 2.0},
        "sequence_mask": {"cap": 3.0, "floor": 0.0},
        "geometric_mask": {"cap": 1.01, "floor": 0.99},
    }


@pytest.mark.parametrize(
    ("correction", "log_weights", "weights", "cut"),
    [
        (TokenTruncation(cap=1.0), (0.0, 0.5), (1.0, 1.0), [False, True]),
        (TokenMask(cap=1.0, floor=1.0), (0.0, 0.5), (1.0, 0.0), [False, True]),
        (TokenMask(cap=1.0, floor=1.0), (0.0, -0.5), (1.0, 0.0), [False, True]),
        (SequenceTruncation(cap=1.0), (0.5, -0.5), (1.0, 1.0), [False, False]),
        (SequenceTruncation(cap=1.0), (0.5, 0.5), (1.0, 1.0), [True, True]),
        (SequenceMask(cap=1.0, floor=1.0), (0.5, -0.5), (1.0, 1.0), [False, False]),
        (SequenceMask(cap=1.0, floor=1.0), (0.5, 0.5), (0.0, 0.0), [True, True]),
        (SequenceMask(cap=1.0, floor=1.0), (-0.5, -0.5), (0.0, 0.0), [True, True]),
        (
            GeometricMask(cap=1.0, floor=1.0),
            (0.5, -0.5),
            (math.exp(0.5), math.exp(-0.5)),
            [False, False],
        ),
        (GeometricMask(cap=1.0, floor=1.0), (0.5, 0.0), (0.0, 0.0), [True, True]),
        (GeometricMask(cap=1.0, floor=1.0), (-0.5, 0.0), (0.0, 0.0), [True, True]),
    ],
)
def test_corrections_keep_a_weight_that_equals_the_bound(correction, log_weights, weights, cut):
    result = correction(PolicyMismatch(row(*log_weights), mask(1, 1)))

    assert result.weight_BT.tolist()[0] == pytest.approx(weights)
    assert result.cut_BT.tolist() == [cut]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) + 0.5 - 1)]
)
def test_kl_estimators_by_hand(estimator, expected):
    assert kl_BT(row(-1.0), row(-1.5), estimator=estimator).item() == pytest.approx(expected)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 6.0), (1, 6.0), (3, 2.0)])
def test_share_of_teachers_divides_by_the_tokens_of_the_batch(num_tokens, expected):
    ids = torch.tensor([[[4], [5], [-1]]])
    teacher = TeacherTokens(ids, torch.zeros(1, 3, 1), torch.zeros(1, 3, 1))

    terms = row(6.0, 9.0, 1.0)[..., None]
    assert teacher.mean(terms, mask(1, 0, 1), num_tokens).item() == expected


def test_horizon_below_one_token_is_refused():
    with pytest.raises(ValueError, match="horizon=0"):
        TrainingLoss(horizon=0)
    assert TrainingLoss(horizon=1).horizon == 1


def config(**changes: object) -> TrainingConfig:
    return TrainingConfig(model_name="m", **changes)


def test_settings_reach_every_part_of_the_loss():
    loss = make_loss(
        config(
            kl_coef=0.5, kl_estimator="k1", sft_coef=0.25, policy_coef=0.75, distill_coef=2.0,
            distill_temperature=1.5, loss_horizon=77, loss_reduction="dr_grpo",
        )
    )  # fmt: skip

    assert loss.kl is not None
    assert loss.distillation is not None
    assert (loss.kl.coef, loss.kl.estimator, loss.kl.is_unbiased) == (0.5, "k1", False)
    assert (loss.sft.coef, loss.policy_coef, loss.horizon) == (0.25, 0.75, 77)
    assert (loss.distillation.coef, loss.distillation.temperature) == (2.0, 1.5)
    plain = make_loss(config(seq_len=99))
    assert (plain.kl, plain.distillation, plain.horizon) == (None, None, 99)


def test_parts_add_up_with_their_coefficients():
    loss = dataclasses.replace(
        make_loss(config(kl_coef=0.5, kl_estimator="k1", sft_coef=0.25, policy_coef=0.75)),
        correction=None,
    )
    inputs = LossInputs(
        trainer_logprobs_BT=row(-1.0, -2.0, -3.0).requires_grad_(),
        labels_BT=torch.tensor([[5, 6, 7]]),
        advantages_BT=row(2.0, 4.0, 8.0),
        inference_logprobs_BT=row(-1.0, -2.0, -3.0),
        ref_logprobs_BT=row(-2.0, 1.0, -9.0),  # the second is unknown
        is_sft_BT=mask(0, 0, 1),
    )

    terms = loss(inputs, BatchTotals(num_tokens=2, num_sequences=1, num_sft_tokens=1))

    # policy -(2 + 4) / 2, KL 0.5 * (-1 + 2) / 2, demonstration 3
    assert terms.parts == pytest.approx({"policy": -3.0, "kl_penalty": 0.25, "sft": 3.0})
    assert terms.loss.item() == pytest.approx(0.75 * -3.0 + 0.25 + 0.25 * 3.0)
    assert terms.mask_BT.tolist() == [[True, True, False]]
    assert terms.weights is None


def test_distillation_is_added_with_its_coefficient():
    loss = make_loss(config(distill_coef=2.0, policy_coef=0.0))
    student = torch.tensor([[[-1.0], [-2.0]]], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs_BT=row(-1.0, -2.0).requires_grad_(),
        labels_BT=torch.tensor([[5, -100]]),
        advantages_BT=row(0.0, 0.0),
        inference_logprobs_BT=row(-1.0, 1.0),
        teacher=TeacherTokens(torch.tensor([[[5], [6]]]), torch.zeros(1, 2, 1), student),
    )

    terms = loss(inputs, BatchTotals(num_tokens=1, num_sequences=1, num_distill_tokens=4))

    # the teacher's only choice has probability 1: cross entropy and divergence are 1, of 4 tokens
    assert terms.parts == pytest.approx({"policy": 0.0, "distill": 0.25, "divergence": 0.25})
    assert terms.loss.item() == pytest.approx(0.5)
