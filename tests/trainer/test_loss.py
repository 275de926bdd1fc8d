"""The policy loss against the oracle: values and gradients from the peers' own functions."""

from __future__ import annotations

import math

import pytest
import torch

from example_trainer.loss import (
    BatchTotals,
    GrpoLoss,
    clipped_surrogate_BT,
    importance_weights_BT,
    masked_reduce,
    token_logprobs_BT,
)

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
LABELS = torch.where(MASK, 7, -100)
TOTALS = BatchTotals(num_tokens=9, num_sequences=4)
TRAINER = [[-0.5, -1, -0.2], [-0.7, -1.5, 0], [-0.4, -0.9, -2], [-0.3, 0, 0]]
PROXIMAL = [[-0.8, -1, -0.25], [-0.4, -1.6, 0], [-0.9, -0.8, -1.5], [-0.9, 0, 0]]
INFERENCE = [[-0.9, -1.1, -0.2], [-0.4, -1.2, 0], [-0.8, -1.9, -1.5], [-1.1, 0, 0]]
ADVANTAGES = [[0.625] * 3, [-0.375] * 3, [-0.375] * 3, [0.125] * 3]


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def oracle_loss(loss: GrpoLoss, rows: slice = slice(None), inference=INFERENCE):
    """The loss and its gradient with respect to the trainer's logprobs, for some of the rows."""
    trainer = double(TRAINER).requires_grad_()
    terms = loss(
        trainer[rows],
        LABELS[rows],
        double(ADVANTAGES)[rows],
        double(inference)[rows],
        TOTALS,
        proximal_logprobs_BT=double(PROXIMAL)[rows],
    )
    terms.loss.backward()
    return terms.loss.item(), trainer.grad


TOKEN_MEAN_GRADIENT = [
    [0, -0.069444, -0.073005],
    [0, 0.046049, 0],
    [0.068697, 0.037702, 0],
    [0, 0, 0],
]
SEQUENCE_MEAN_GRADIENT = [
    [0, -0.052083, -0.054754],
    [0, 0.051805, 0],
    [0.051523, 0.028276, 0],
    [0, 0, 0],
]
DR_GRPO_GRADIENT = [[0, -0.052083, -0.054754], [0, 0.034537, 0], [0.051523, 0.028276, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("reduction", "value", "gradient"),
    [
        ("token_mean", -0.03000231, TOKEN_MEAN_GRADIENT),
        ("sequence_mean", -0.01940011, SEQUENCE_MEAN_GRADIENT),
        ("dr_grpo", -0.02250174, DR_GRPO_GRADIENT),
    ],
)
def test_loss_without_correction_equals_the_oracle(reduction, value, gradient):
    loss = GrpoLoss(importance_cap=None, reduction=reduction, horizon=3)

    result, result_gradient = oracle_loss(loss)

    assert result == pytest.approx(value, abs=1e-8)
    torch.testing.assert_close(result_gradient, double(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("cap", "floor", "value"), [(2.0, None, -0.03104709), (2.0, 0.5, -0.10645021)]
)
def test_loss_with_correction_equals_the_oracle(cap, floor, value):
    result, _ = oracle_loss(GrpoLoss(importance_cap=cap, importance_floor=floor))

    assert result == pytest.approx(value, abs=1e-8)


def test_importance_weights_of_the_oracle_are_truncated_at_the_cap():
    weights = importance_weights_BT(double(PROXIMAL), double(INFERENCE), cap=2.0)

    expected = [1.105171, 1.105171, 0.951229, 1, 0.67032, 0.904837, 2, 1, 1.221403]
    torch.testing.assert_close(weights[MASK], double(expected), atol=1e-6, rtol=0)


def test_earlier_clip_defect_is_not_reproduced():
    # TRAINER_MATH section 7: sequence mean, 0.2 on both sides, no correction.
    loss = GrpoLoss(clip_high=0.2, importance_cap=None, reduction="sequence_mean")

    value, gradient = oracle_loss(loss)

    assert value == pytest.approx(-0.0127334405, abs=1e-10)
    expected = [[0, 0.051805, 0], [0.051523, 0.028276, 0]]
    torch.testing.assert_close(gradient[1:3], double(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_gradient"),
    [
        (1.5, 1.0, 0.0),  # already pushed up beyond 1.28: leave it
        (0.5, 1.0, -1.0),  # fell although it should rise: push on
        (1.5, -1.0, 1.0),  # rose although it should fall: push down
        (0.5, -1.0, 0.0),  # already pushed down below 0.8: leave it
        (1.1, 1.0, -1.0),
        (0.9, -1.0, 1.0),
    ],
)
def test_clip_binds_only_beyond_the_bound_in_the_wanted_direction(
    ratio, advantage, expected_gradient
):
    ratio_BT = double([[ratio]]).requires_grad_()

    clipped_surrogate_BT(
        ratio_BT, double([[advantage]]), clip_low=0.2, clip_high=0.28
    ).sum().backward()

    assert ratio_BT.grad.item() == pytest.approx(expected_gradient)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "dr_grpo"])
def test_loss_split_into_microbatches_adds_up_to_the_whole(reduction):
    loss = GrpoLoss(reduction=reduction, horizon=3)
    whole, whole_gradient = oracle_loss(loss)

    parts = [oracle_loss(loss, rows) for rows in (slice(0, 1), slice(1, 3), slice(3, 4))]

    assert sum(value for value, _ in parts) == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(sum(g for _, g in parts), whole_gradient, atol=1e-12, rtol=0)


def test_loss_with_more_padding_is_the_same():
    loss = GrpoLoss()
    plain, _ = oracle_loss(loss)
    pad = torch.nn.functional.pad

    terms = loss(
        pad(double(TRAINER), (0, 5)),
        pad(LABELS, (0, 5), value=-100),
        pad(double(ADVANTAGES), (0, 5), value=3.0),
        pad(double(INFERENCE), (0, 5), value=1.0),
        TOTALS,
        proximal_logprobs_BT=pad(double(PROXIMAL), (0, 5)),
    )

    assert terms.loss.item() == pytest.approx(plain, abs=1e-12)


def test_loss_of_a_fully_masked_row_is_zero_and_does_not_poison_the_others():
    masked = torch.full((1, 3), -100)
    trainer = double(TRAINER[:1] * 2).requires_grad_()

    terms = GrpoLoss(reduction="sequence_mean")(
        trainer,
        torch.cat([LABELS[:1], masked]),
        double(ADVANTAGES[:1] * 2),
        torch.cat([double(INFERENCE[:1]), torch.ones(1, 3, dtype=torch.float64)]),
        BatchTotals(3, 1),
    )
    terms.loss.backward()

    assert math.isfinite(terms.loss.item())
    assert trainer.grad[1].abs().sum() == 0
    assert trainer.grad[0].abs().sum() > 0


def test_loss_of_a_batch_without_trained_tokens_is_a_zero_one_can_send_backward():
    trainer = double(TRAINER).requires_grad_()

    terms = GrpoLoss()(
        trainer,
        torch.full((4, 3), -100),
        double(ADVANTAGES),
        torch.ones(4, 3, dtype=torch.float64),
        BatchTotals(0, 0),
    )
    terms.loss.backward()

    assert terms.loss.item() == 0.0
    assert trainer.grad.abs().sum() == 0


@pytest.mark.parametrize("anchor", ["trainer", "inference"])
def test_placeholder_logprobs_count_as_ratio_and_weight_one(anchor):
    loss = GrpoLoss(anchor=anchor, importance_cap=2.0 if anchor == "trainer" else None)
    trainer = double(TRAINER).requires_grad_()
    unknown = torch.ones(4, 3, dtype=torch.float64)

    terms = loss(trainer, LABELS, double(ADVANTAGES), unknown, TOTALS)
    terms.loss.backward()

    assert torch.equal(terms.ratio_BT, torch.ones(4, 3, dtype=torch.float64))
    assert torch.equal(terms.weight_BT, torch.ones(4, 3, dtype=torch.float64))
    expected = torch.where(MASK, -double(ADVANTAGES) / 9, 0.0)
    torch.testing.assert_close(trainer.grad, expected)


def test_inference_anchor_clips_the_ratio_to_the_sampler():
    # One token, l - mu = 0.4: ratio 1.4918 beyond 1.28 with A > 0, so the value is -1.28.
    terms = GrpoLoss(anchor="inference", importance_cap=None)(
        double([[-0.5]]), torch.tensor([[3]]), double([[1.0]]), double([[-0.9]]), BatchTotals(1, 1)
    )

    assert terms.loss.item() == pytest.approx(-1.28)


def test_inference_anchor_with_a_cap_is_refused():
    with pytest.raises(ValueError, match="twice"):
        GrpoLoss(anchor="inference", importance_cap=2.0)


def test_extreme_mismatch_stays_finite():
    terms = GrpoLoss(anchor="inference", importance_cap=None)(
        double([[-0.1]]), torch.tensor([[3]]), double([[-1.0]]), double([[-900.0]]), TOTALS
    )

    assert math.isfinite(terms.loss.item())


def test_token_logprobs_of_ignored_positions_are_zero_and_the_rest_a_log_softmax():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 4], [-100, 0, 2]])

    result = token_logprobs_BT(logits, labels)

    expected = logits.log_softmax(-1)
    assert result[0, 1] == 0
    assert result[1, 0] == 0
    assert result[0, 2].item() == pytest.approx(expected[0, 2, 4].item())
    assert result[1, 1].item() == pytest.approx(expected[1, 1, 0].item())


def test_token_logprobs_are_divided_by_each_rows_temperature():
    logits = torch.randn(3, 2, 5, dtype=torch.float64)
    labels = torch.ones(3, 2, dtype=torch.long)

    result = token_logprobs_BT(logits, labels, torch.tensor([0.5, 1.0, 0.0]))

    torch.testing.assert_close(result[0], (logits[0] / 0.5).log_softmax(-1)[:, 1])
    torch.testing.assert_close(result[1:], logits[1:].log_softmax(-1)[..., 1])


def test_masked_reduce_ignores_what_stands_at_masked_positions():
    loss = double([[1.0, float("nan")]])

    result = masked_reduce(
        loss,
        torch.tensor([[True, False]]),
        BatchTotals(1, 1),
        reduction="token_mean",
        horizon=1,
    )

    assert result.item() == 1.0
