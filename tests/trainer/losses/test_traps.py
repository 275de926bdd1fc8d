"""The known traps of policy losses, one by one."""

from __future__ import annotations

import math

import pytest
import torch

from atroposlib.errors import GroupError
from atroposlib.scored_data import MASKED_LOGPROB
from example_trainer.batch import build_batch, make_microbatch
from example_trainer.loss import (
    CORRECTION_CLASSES,
    POLICY_LOSSES,
    BatchTotals,
    Dapo,
    Distillation,
    DualClip,
    Grpo,
    KlPenalty,
    LossInputs,
    TokenTruncation,
    TrainingLoss,
    clipped_surrogate_BT,
    masked_reduce,
)
from example_trainer.loss_choice import ALGORITHMS
from example_trainer.rows import RowRules, group_advantages, overlong_penalty, rows_from_group
from example_trainer.scoring import token_logprobs_BT
from tests.trainer.losses.oracle import (
    ADVANTAGES,
    LABELS,
    MASK,
    TOTALS,
    TRAINER,
    double,
    oracle_inputs,
)
from tests.trainer.tiny import group


def losses():
    for name, row in ALGORITHMS.items():
        for anchor in row.anchors:
            loss = TrainingLoss(
                POLICY_LOSSES[name](), anchor=anchor, reduction=row.reduction, horizon=3
            )
            yield pytest.param(loss, id=f"{name}-{anchor}")
    for name, correction in CORRECTION_CLASSES.items():
        yield pytest.param(TrainingLoss(Dapo(), correction=correction()), id=name)


def test_temperature_divides_the_logits_before_the_softmax():
    logits = torch.randn(3, 2, 5, dtype=torch.float64)
    labels = torch.ones(3, 2, dtype=torch.long)

    result = token_logprobs_BT(logits, labels, torch.tensor([0.5, 1.0, 0.0]))

    torch.testing.assert_close(result[0], (logits[0] / 0.5).log_softmax(-1)[:, 1])
    torch.testing.assert_close(result[1:], logits[1:].log_softmax(-1)[..., 1])


def test_token_logprobs_of_ignored_positions_are_zero_and_the_rest_a_log_softmax():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 4], [-100, 0, 2]])

    result = token_logprobs_BT(logits, labels)

    expected = logits.log_softmax(-1)
    assert result[0, 1] == 0
    assert result[1, 0] == 0
    assert result[0, 2].item() == pytest.approx(expected[0, 2, 4].item())
    assert result[1, 1].item() == pytest.approx(expected[1, 1, 0].item())


@pytest.mark.parametrize(
    ("params", "is_cut"),
    [
        ({}, False),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
        ({"min_p": 0.1}, True),
    ],
)
def test_sampling_from_a_part_of_the_vocabulary_is_counted(params, is_cut):
    sampled = group([[7], [8]], [1.0, 0.0], generation_params=params)

    summary = build_batch([sampled], RowRules(seq_len=64), microbatch_size=2).summary

    assert summary.num_rows_of_partial_sampling == (2 if is_cut else 0)


def test_logprobs_are_aligned_with_tokens_and_shifted_once():
    sampled = group([[7, 8]], [1.0]) | {"inference_logprobs": [[1.0, 1.0, 1.0, -0.7, -0.8]]}

    microbatch = make_microbatch(rows_from_group(sampled, RowRules(seq_len=64)), pad_multiple=1)

    assert microbatch.labels_BT.tolist() == [[-100, -100, 7, 8]]
    expected = pytest.approx([MASKED_LOGPROB, MASKED_LOGPROB, -0.7, -0.8])
    assert microbatch.inference_logprobs_BT[0].tolist() == expected


@pytest.mark.parametrize("loss", losses())
def test_sentinel_is_never_exponentiated(loss):
    trainer = double(TRAINER).requires_grad_()
    unknown = torch.full((4, 3), MASKED_LOGPROB, dtype=torch.float64)
    inputs = oracle_inputs(trainer, inference_logprobs_BT=unknown, proximal_logprobs_BT=None)

    terms = loss(inputs, TOTALS)
    terms.loss.backward()

    assert torch.equal(terms.ratio_BT[MASK], torch.ones(9, dtype=torch.float64))
    if terms.weights is not None:
        assert torch.equal(terms.weights.weight_BT[MASK], torch.ones(9, dtype=torch.float64))
    # On policy every algorithm has REINFORCE's gradient, up to its denominator.
    scaled = trainer.grad / trainer.grad[3, 0] * -0.125
    if loss.reduction != "sequence_mean":
        torch.testing.assert_close(scaled, torch.where(MASK, -double(ADVANTAGES), 0.0))


def test_group_of_one_keeps_its_raw_score():
    assert group_advantages([0.7], std="population", eps=1e-8) == [0.7]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (6, 0.0), (7, -0.25), (9, -0.75), (10, -1.0), (99, -1.0)]
)
def test_overlong_shaping_falls_linearly_over_the_buffer(num_tokens, penalty):
    assert overlong_penalty(num_tokens, max_tokens=10, buffer_tokens=4) == penalty


def test_overlong_shaping_changes_scores_before_advantages():
    rules = RowRules(seq_len=64, advantage_std="none", overlong_max_tokens=4)

    rows = rows_from_group(group([[7] * 4, [8]], [1.0, 1.0]), rules)

    assert [row.advantages[0] for row in rows] == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("truncated", "num_tokens"), [("train", 5 + 2 + 1), ("mask", 1)], ids=["train", "mask"]
)
def test_truncated_completions_are_trained_or_masked_as_told(truncated, num_tokens):
    # Cut by seq_len, stopped by max_tokens, and complete.
    cut = group([[7] * 20], [1.0])
    stopped = group([[7, 7], [8]], [1.0, 0.0], generation_params={"max_tokens": 2})
    rules = RowRules(seq_len=8, truncated_completions=truncated)

    batch = build_batch([cut, stopped], rules, microbatch_size=4)

    assert batch.totals.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("reasons", "trained"),
    [
        (["length", "stop"], [False, True]),
        (["stop", "length"], [True, False]),
        # Where the engine did not say, the length of the completion decides.
        ([None, None], [False, True]),
        (None, [False, True]),
    ],
)
def test_masking_of_truncated_completions_follows_the_engine_s_finish_reasons(reasons, trained):
    given = group([[7, 7], [8]], [1.0, 0.0], generation_params={"max_tokens": 2})
    rules = RowRules(seq_len=8, truncated_completions="mask")

    rows = rows_from_group({**given, "finish_reasons": reasons}, rules)

    assert [any(label != -100 for label in row.labels) for row in rows] == trained


def test_finish_reasons_of_another_count_than_the_trajectories_are_refused():
    given = group([[7, 7], [8]], [1.0, 0.0], finish_reasons=["stop"])

    with pytest.raises(
        GroupError, match="1 entries, tokens has 2; each trajectory needs one, null"
    ):
        rows_from_group(given, RowRules(seq_len=8))


def test_several_short_turns_are_not_a_truncated_completion():
    turns = {"tokens": [[1, 7, 7, 2, 8]], "masks": [[-100, 7, 7, -100, 8]], "scores": [1.0]}
    rules = RowRules(seq_len=8, truncated_completions="mask")

    rows = rows_from_group({**turns, "generation_params": {"max_tokens": 3}}, rules)

    assert list(rows[0].labels) == turns["masks"][0]


def test_rollout_over_two_policy_versions_weighs_each_token_by_its_own_sampler():
    inputs = LossInputs(
        trainer_logprobs_BT=double([[-1.0, -1.0]]),
        labels_BT=torch.tensor([[7, 7]]),
        advantages_BT=double([[1.0, 1.0]]),
        inference_logprobs_BT=double([[-1.0, -1.5]]),
    )

    weights = TrainingLoss(correction=TokenTruncation())(inputs, BatchTotals(2, 1)).weights

    torch.testing.assert_close(weights.weight_BT, double([[1.0, math.exp(0.5)]]))


def test_denominator_counts_the_batch_and_not_the_microbatch():
    loss = TrainingLoss(Grpo())
    shares = [loss(oracle_inputs(rows=rows), TOTALS).loss for rows in (slice(0, 3), slice(3, 4))]
    own = loss(oracle_inputs(rows=slice(3, 4)), BatchTotals(1, 1)).loss

    whole = loss(oracle_inputs(), TOTALS).loss

    assert sum(shares).item() == pytest.approx(whole.item(), abs=1e-12)
    assert own.item() == pytest.approx(9 * shares[1].item(), abs=1e-12)


@pytest.mark.parametrize("loss", losses())
def test_batch_without_trained_tokens_is_a_zero_one_can_send_backward(loss):
    trainer = double(TRAINER).requires_grad_()
    inputs = oracle_inputs(trainer, labels_BT=torch.full((4, 3), -100))

    terms = loss(inputs, BatchTotals(0, 0))
    terms.loss.backward()

    assert terms.loss.item() == 0.0
    assert trainer.grad.abs().sum() == 0


@pytest.mark.parametrize("loss", losses())
def test_batch_without_advantages_can_be_sent_backward(loss):
    trainer = double(TRAINER).requires_grad_()
    inputs = oracle_inputs(
        trainer, advantages_BT=torch.zeros(4, 3, dtype=torch.float64), proximal_logprobs_BT=None
    )

    terms = loss(inputs, TOTALS)
    terms.loss.backward()

    assert torch.isfinite(trainer.grad).all()
    if terms.loss.item() == 0.0:  # a pull to the sampler stays without advantages
        assert trainer.grad.abs().sum() == 0


def test_empty_parts_add_nothing_and_can_be_sent_backward():
    trainer = double(TRAINER).requires_grad_()
    loss = TrainingLoss(kl=KlPenalty(0.1), distillation=Distillation(1.0))

    terms = loss(oracle_inputs(trainer, labels_BT=torch.full((4, 3), -100)), BatchTotals(0, 0))
    terms.loss.backward()

    assert terms.loss.item() == 0.0


@pytest.mark.parametrize("loss", losses())
def test_fully_masked_row_does_not_poison_the_others(loss):
    trainer = double(TRAINER).requires_grad_()
    labels = LABELS.clone()
    labels[1] = -100

    terms = loss(oracle_inputs(trainer, labels_BT=labels), BatchTotals(7, 3))
    terms.loss.backward()

    without = double(TRAINER).requires_grad_()
    loss(oracle_inputs(without, [0, 2, 3]), BatchTotals(7, 3)).loss.backward()
    assert math.isfinite(terms.loss.item())
    torch.testing.assert_close(trainer.grad, without.grad, atol=1e-15, rtol=0)


@pytest.mark.parametrize("loss", losses())
@pytest.mark.parametrize("inference", [-900.0, 0.0])
def test_extreme_mismatch_stays_finite(loss, inference):
    trainer = double(TRAINER).requires_grad_()
    extreme = torch.full((4, 3), inference, dtype=torch.float64)

    terms = loss(oracle_inputs(trainer, inference_logprobs_BT=extreme), TOTALS)
    terms.loss.backward()

    assert math.isfinite(terms.loss.item())
    assert torch.isfinite(trainer.grad).all()


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


@pytest.mark.parametrize(("advantage", "value", "is_bound"), [(-1.0, 3.0, True), (1.0, -1.2, True)])
def test_dual_clip_holds_a_negative_advantage_at_its_bound(advantage, value, is_bound):
    # l - o = 2: ratio 7.39, beyond 3; a positive advantage is held by the ordinary clip at 1.2.
    inputs = LossInputs(
        trainer_logprobs_BT=double([[-1.0]]),
        labels_BT=torch.tensor([[7]]),
        advantages_BT=double([[advantage]]),
        inference_logprobs_BT=double([[MASKED_LOGPROB]]),
        proximal_logprobs_BT=double([[-3.0]]),
    )

    terms = TrainingLoss(DualClip())(inputs, BatchTotals(1, 1))

    assert terms.loss.item() == pytest.approx(value)
    assert terms.bound_BT.item() is is_bound


def test_proximal_logprobs_with_a_gradient_are_constants_of_the_loss():
    proximal_BT = double([[-1.25]]).requires_grad_()
    trainer_BT = double([[-1.0]]).requires_grad_()
    inputs = LossInputs(
        trainer_logprobs_BT=trainer_BT,
        labels_BT=torch.tensor([[7]]),
        advantages_BT=double([[-1.0]]),
        inference_logprobs_BT=double([[-1.5]]),
        proximal_logprobs_BT=proximal_BT,
    )

    TrainingLoss(Dapo(), correction=TokenTruncation())(inputs, BatchTotals(1, 1)).loss.backward()

    assert trainer_BT.grad is not None
    assert proximal_BT.grad is None


def test_inference_anchor_clips_the_ratio_to_the_sampler():
    # One token, l - mu = 0.4: ratio 1.4918 beyond 1.28 with A > 0, so the value is -1.28.
    inputs = LossInputs(
        trainer_logprobs_BT=double([[-0.5]]),
        labels_BT=torch.tensor([[3]]),
        advantages_BT=double([[1.0]]),
        inference_logprobs_BT=double([[-0.9]]),
    )

    terms = TrainingLoss(Dapo(), anchor="inference")(inputs, BatchTotals(1, 1))

    assert terms.loss.item() == pytest.approx(-1.28)


def test_masked_reduce_ignores_what_stands_at_masked_positions():
    loss = double([[1.0, float("nan")]])

    result = masked_reduce(
        loss, torch.tensor([[True, False]]), BatchTotals(1, 1), reduction="token_mean"
    )

    assert result.item() == 1.0
