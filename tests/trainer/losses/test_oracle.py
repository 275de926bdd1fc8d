"""Every loss against the oracle: values and gradients the peers' own functions produced."""

from __future__ import annotations

import pytest
import torch

from example_trainer.loss import (
    Cispo,
    Dapo,
    Dppo,
    DrGrpo,
    DualClip,
    GeometricMask,
    Grpo,
    Gspo,
    ImportanceSampling,
    Ipo,
    KlPenalty,
    PolicyMismatch,
    SequenceMask,
    SequenceTruncation,
    TokenMask,
    TokenTruncation,
    TrainingLoss,
    kl_BT,
    masked_reduce,
)
from tests.trainer.losses.oracle import (
    INFERENCE,
    MASK,
    PROXIMAL,
    REFERENCE,
    TOTALS,
    TRAINER,
    double,
    oracle_inputs,
    oracle_loss,
)

TOKEN_MEAN = [
    [0, -0.069444, -0.073005],
    [0, 0.046049, 0],
    [0.068697, 0.037702, 0],
    [0, 0, 0],
]
SEQUENCE_MEAN = [
    [0, -0.052083, -0.054754],
    [0, 0.051805, 0],
    [0.051523, 0.028276, 0],
    [0, 0, 0],
]
DR_GRPO = [[0, -0.052083, -0.054754], [0, 0.034537, 0], [0.051523, 0.028276, 0], [0, 0, 0]]
GSPO = [[-0.058528] * 3, [0.042414, 0.042414, 0], [0.030226] * 3, [0, 0, 0]]
CISPO = [
    [-0.088889, -0.069444, -0.073005],
    [0.033333, 0.046049, 0],
    [0.053333, 0.037702, 0.033333],
    [-0.017778, 0, 0],
]
CISPO_CAP = [
    [-0.09374, -0.069444, -0.073005],
    [0.030867, 0.046049, 0],
    [0.068697, 0.037702, 0.025272],
    [-0.025307, 0, 0],
]
DPPO = [
    [-0.10351, -0.076726, -0.069444],
    [0.030801, 0.030801, 0],
    [0.062248, 0.113484, 0.025161],
    [0.000178, 0, 0],
]
CLIP = (0.2, 0.28)


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        (TrainingLoss(Dapo()), -0.03000231, TOKEN_MEAN),
        (TrainingLoss(DualClip(*CLIP)), -0.03000231, TOKEN_MEAN),
        (TrainingLoss(Grpo(*CLIP), reduction="sequence_mean"), -0.01940011, SEQUENCE_MEAN),
        (TrainingLoss(Grpo(*CLIP), reduction="sequence_sum"), -0.06750521, None),
        (TrainingLoss(DrGrpo(*CLIP), reduction="dr_grpo", horizon=3), -0.02250174, DR_GRPO),
        (TrainingLoss(Gspo(*CLIP), reduction="sequence_mean"), -0.04008011, GSPO),
        (TrainingLoss(Cispo()), -0.08051471, CISPO),
        (TrainingLoss(Cispo(1.0, 4.0)), -0.06412700, CISPO_CAP),
        (
            TrainingLoss(Grpo(*CLIP), reduction="sequence_mean", kl=KlPenalty(0.1)),
            -0.01841987,
            None,
        ),
        (TrainingLoss(Dppo(), anchor="inference"), 0.01290337, DPPO),
        (TrainingLoss(Ipo(), anchor="inference"), -0.08978622, None),
    ],
    ids=[
        "dapo",
        "dual_clip",
        "grpo",
        "sequence_sum",
        "dr_grpo",
        "gspo",
        "cispo",
        "cispo_5",
        "grpo_k3",
        "dppo",
        "ipo",
    ],
)
def test_loss_and_gradient_equal_the_oracle(loss, value, gradient):
    result, result_gradient = oracle_loss(loss)

    assert result == pytest.approx(value, abs=1e-8)
    if gradient is not None:
        torch.testing.assert_close(result_gradient, double(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [
        (ImportanceSampling(), -0.1644622657),
        (Grpo(0.2, 0.2), 0.2630581235),
        (Cispo(0.2, 0.2), -0.6092681762),
    ],
    ids=["importance_sampling", "ppo", "cispo"],
)
def test_sums_anchored_on_the_sampler_equal_tinkers(algorithm, value):
    result, _ = oracle_loss(TrainingLoss(algorithm, anchor="inference", reduction="sum"))

    assert result == pytest.approx(value, abs=1e-10)


@pytest.mark.parametrize(
    ("correction", "value"),
    [
        (TokenTruncation(2.0), -0.03104709),
        (TokenTruncation(3.0), 0.00665447),
        (TokenMask(cap=2.0, floor=0.5), -0.10645021),
        (SequenceTruncation(2.0), 0.04218410),
        (SequenceMask(3.0), 0.14255078),
    ],
    ids=["token_2", "token_3", "icepop", "sequence", "sequence_mask"],
)
def test_corrected_loss_equals_the_oracle(correction, value):
    result, _ = oracle_loss(TrainingLoss(Dapo(), correction=correction))

    assert result == pytest.approx(value, abs=1e-8)


SEQUENCE_WEIGHTS = [1.161834, 0.67032, 2.718282, 1.221403]
TOKEN_WEIGHTS = [1.105171, 1.105171, 0.951229, 1, 0.67032, 0.904837, 2.718282, 1, 1.221403]


def per_token(weights):
    return [weights[0]] * 3 + [weights[1]] * 2 + [weights[2]] * 3 + [weights[3]]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TokenTruncation(2.0), [min(w, 2.0) for w in TOKEN_WEIGHTS]),
        (TokenMask(cap=2.0, floor=0.5), [w if w <= 2 else 0.0 for w in TOKEN_WEIGHTS]),
        (SequenceTruncation(2.0), per_token([min(w, 2.0) for w in SEQUENCE_WEIGHTS])),
        (SequenceMask(2.0), per_token([w if w <= 2 else 0.0 for w in SEQUENCE_WEIGHTS])),
        # Geometric means e^0.05, e^-0.2, e^(1/3), e^0.2: only the first lies within 0.9 and 1.1.
        (GeometricMask(cap=1.1, floor=0.9), [*TOKEN_WEIGHTS[:3], 0, 0, 0, 0, 0, 0]),
    ],
    ids=["token", "icepop", "sequence", "sequence_mask", "geometric_mask"],
)
def test_weights_of_the_oracle(correction, expected):
    log_weight = torch.where(MASK, double(PROXIMAL) - double(INFERENCE), 0.0)

    weights = correction(PolicyMismatch(log_weight, MASK))

    torch.testing.assert_close(weights.weight_BT[MASK], double(expected), atol=1e-6, rtol=0)
    raw = double(TOKEN_WEIGHTS)
    if isinstance(correction, TokenTruncation | TokenMask):
        assert torch.equal(weights.cut_BT[MASK], raw > 2)


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", 0.0111111111), ("k2", 0.0083333333), ("k3", 0.0083328819)],
)
def test_masked_mean_of_a_kl_estimator_equals_the_oracle(estimator, value):
    estimate = kl_BT(double(TRAINER), double(REFERENCE), estimator=estimator)

    mean = masked_reduce(estimate, MASK, TOTALS, reduction="token_mean")

    assert mean.item() == pytest.approx(value, abs=1e-10)


def test_ratios_of_the_oracle():
    terms = TrainingLoss()(oracle_inputs(), TOTALS)

    expected = [1.349859, 1, 1.051271, 0.740818, 1.105171, 1.648721, 0.904837, 0.606531, 1.822119]
    torch.testing.assert_close(terms.ratio_BT[MASK], double(expected), atol=1e-6, rtol=0)


def test_earlier_clip_defect_is_not_reproduced():
    # Sequence mean, 0.2 on both sides, no correction.
    value, gradient = oracle_loss(TrainingLoss(Grpo(), reduction="sequence_mean"))

    assert value == pytest.approx(-0.0127334405, abs=1e-10)
    expected = [[0, 0.051805, 0], [0.051523, 0.028276, 0]]
    torch.testing.assert_close(gradient[1:3], double(expected), atol=1e-6, rtol=0)
