"""Loss terms except the policy loss: demonstrations, distillation, a KL penalty."""

from __future__ import annotations

import math

import pytest
import torch

from atroposlib.errors import GroupError
from example_trainer.batch import build_batch
from example_trainer.loss import (
    BatchTotals,
    Distillation,
    KlPenalty,
    SupervisedLoss,
    TeacherTokens,
    TrainingLoss,
)
from example_trainer.rows import RowRules, rows_from_group
from example_trainer.scoring import topk_logprobs_BTK
from tests.trainer.losses.oracle import MASK, TOTALS, TRAINER, double, oracle_inputs, oracle_loss
from tests.trainer.tiny import group

RULES = RowRules(seq_len=64)
DISTILLING = RowRules(seq_len=64, uses_teacher=True)


def test_demonstrations_are_trained_by_likelihood_over_their_own_tokens():
    is_sft = torch.zeros_like(MASK)
    is_sft[1] = True
    trainer = double(TRAINER).requires_grad_()

    terms = TrainingLoss(sft=SupervisedLoss(0.5))(
        oracle_inputs(trainer, is_sft_BT=is_sft), BatchTotals(7, 3, num_sft_tokens=2)
    )
    terms.loss.backward()

    assert terms.parts["sft"] == pytest.approx((0.7 + 1.5) / 2)
    assert terms.loss.item() == pytest.approx(0.5 * terms.parts["sft"] + terms.parts["policy"])
    assert trainer.grad[1].tolist() == [-0.25, -0.25, 0.0]
    assert not terms.mask_BT[1].any()


def test_demonstrations_leave_the_policy_loss_as_it_is_without_them():
    is_sft = torch.zeros_like(MASK)
    is_sft[1] = True
    others = BatchTotals(7, 3, num_sft_tokens=2)

    with_sft = TrainingLoss(sft=SupervisedLoss(0.0))(oracle_inputs(is_sft_BT=is_sft), others)
    labels = torch.where(MASK & ~is_sft, 7, -100)
    without = TrainingLoss()(oracle_inputs(labels_BT=labels), others)

    assert with_sft.loss.item() == pytest.approx(without.loss.item(), abs=1e-15)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"group_overrides": {"sft": True}}, [True, True]),
        ({"overrides": [{}, {"sft": True}]}, [False, True]),
        ({"group_overrides": {"sft": True}, "overrides": [{"sft": False}, {}]}, [False, True]),
        ({"overrides": [{"sft": None}, None]}, [False, False]),
    ],
)
def test_sft_of_a_trajectory_wins_over_that_of_its_group(fields, expected):
    rows = rows_from_group(group([[7], [8]], [1.0, 0.0], **fields), RULES)

    assert [row.is_sft for row in rows] == expected


def test_demonstration_takes_no_part_in_its_siblings_baseline():
    overrides = [{}, {}, {"sft": True}]

    rows = rows_from_group(group([[7], [8], [9]], [1.0, 0.0, 1.0], overrides=overrides), RULES)

    assert [row.advantages[0] for row in rows] == pytest.approx([1.0, -1.0, 0.0])


def test_advantages_sent_with_demonstrations_are_not_looked_at():
    demonstration = group([[7]], [1.0], advantages=[[1.0] * 99], group_overrides={"sft": True})

    batch = build_batch([demonstration], RULES, microbatch_size=1)

    assert batch.totals == (0, 0, 1, 0)
    assert batch.microbatches[0].is_sft_BT[0, :3].all()
    assert batch.summary.num_zero_gradient_groups == 0


def test_demonstration_that_is_silenced_is_refused():
    overrides = [{"sft": True, "set_advantage_to_zero": True}]

    with pytest.raises(GroupError, match=r"overrides\[0\]: sft and set_advantage_to_zero"):
        rows_from_group(group([[7]], [1.0], overrides=overrides), RULES)


def test_policy_loss_counts_with_its_coefficient():
    whole, gradient = oracle_loss(TrainingLoss())

    half, half_gradient = oracle_loss(TrainingLoss(policy_coef=0.5))
    none, no_gradient = oracle_loss(TrainingLoss(policy_coef=0.0))

    assert half == pytest.approx(0.5 * whole)
    torch.testing.assert_close(half_gradient, 0.5 * gradient)
    assert none == 0.0
    assert not no_gradient.any()


def test_rewards_that_are_not_used_leave_no_advantage():
    rules = RowRules(seq_len=64, uses_rewards=False)
    scored = group([[7], [8]], [1.0, 0.0])
    given = group([[7], [8]], [1.0, 0.0], advantages=[[0.5] * 4] * 2)

    batch = build_batch([scored, given], rules, microbatch_size=4)

    assert not batch.microbatches[0].advantages_BT.any()
    assert batch.summary.num_zero_gradient_groups == 2


def teacher(student, teacher_logprobs=((-0.5, -1.5),), ids=((1, 2),)):
    return TeacherTokens(torch.tensor([ids]), double([teacher_logprobs]), student)


def test_distillation_is_the_cross_entropy_to_the_teachers_renormalised_choices():
    student = double([[[-1.0, -2.0]]]).requires_grad_()

    share = Distillation(1.0)(teacher(student), torch.tensor([[True]]), 1)
    share.backward()

    # p = softmax(-0.5, -1.5) = (0.7311, 0.2689); loss = p1 + 2 p2.
    p = 1 / (1 + math.exp(-1.0))
    assert share.item() == pytest.approx(p + 2 * (1 - p))
    torch.testing.assert_close(student.grad, double([[[-p, p - 1]]]))


def test_distillation_temperature_flattens_the_teacher():
    student = double([[[-1.0, -2.0]]])

    share = Distillation(1.0, temperature=2.0)(teacher(student), torch.tensor([[True]]), 1)

    p = 1 / (1 + math.exp(-0.5))
    assert share.item() == pytest.approx(p + 2 * (1 - p))


def test_reverse_kl_within_the_teachers_choices_is_zero_where_the_two_agree():
    agreeing = double([[[-3.0, -4.0]]]).requires_grad_()  # the same odds, less mass

    share = Distillation(1.0, "reverse_kl")(teacher(agreeing), torch.tensor([[True]]), 1)
    share.backward()

    assert share.item() == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(agreeing.grad, torch.zeros_like(agreeing), atol=1e-12, rtol=0)


def test_reverse_kl_by_hand():
    # q' = (1/2, 1/2), p = (0.7311, 0.2689): 0.5 log(0.5 / p1) + 0.5 log(0.5 / p2).
    p = 1 / (1 + math.exp(-1.0))

    share = Distillation(1.0, "reverse_kl")(
        teacher(double([[[-2.0, -2.0]]])), torch.tensor([[True]]), 1
    )

    assert share.item() == pytest.approx(0.5 * math.log(0.25 / (p * (1 - p))))


@pytest.mark.parametrize("kind", ["cross_entropy", "reverse_kl"])
def test_divergence_is_the_kl_from_teacher_to_student_for_both_kinds(kind):
    # p = (0.7311, 0.2689), q = (e^-1, e^-2): sum of p (log p - log q); nothing flows back.
    p = 1 / (1 + math.exp(-1.0))
    student = double([[[-1.0, -2.0]] * 2]).requires_grad_()
    tokens = teacher(student, teacher_logprobs=((-0.5, -1.5),) * 2, ids=((1, 2),) * 2)

    share = Distillation(1.0, kind).divergence(tokens, torch.tensor([[True, False]]), 1)

    assert share.item() == pytest.approx(p * (math.log(p) + 1) + (1 - p) * (math.log(1 - p) + 2))
    assert not share.requires_grad


def test_divergence_is_zero_for_a_student_like_its_teacher():
    p = double([[[0.25, 0.75]]]).log()

    share = Distillation(1.0).divergence(
        teacher(p, teacher_logprobs=p[0].tolist()), torch.tensor([[True]]), 1
    )

    assert share.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["cross_entropy", "reverse_kl"])
def test_positions_without_a_teacher_or_untrained_add_nothing(kind):
    student = double([[[-1.0, -2.0]] * 3]).requires_grad_()
    tokens = teacher(
        student,
        teacher_logprobs=((-0.5, -1.5), (-1e9, -1e9), (-0.5, -1.5)),
        ids=((1, 2), (-1, -1), (1, 2)),
    )

    Distillation(1.0, kind)(tokens, torch.tensor([[True, True, False]]), 1).backward()

    assert student.grad[0, 1:].abs().sum() == 0
    assert torch.isfinite(student.grad).all()


def test_student_logprobs_are_those_of_the_scaled_softmax():
    logits = torch.randn(1, 2, 5, dtype=torch.float64)
    ids = torch.tensor([[[1, 4], [0, -1]]])

    result = topk_logprobs_BTK(logits, ids, temperature=2.0)

    expected = (logits / 2.0).log_softmax(-1)
    torch.testing.assert_close(result[0, 0], expected[0, 0, [1, 4]])
    assert result[0, 1, 0].item() == pytest.approx(expected[0, 1, 0].item())


def test_teacher_with_another_vocabulary_is_refused():
    with pytest.raises(GroupError, match="id 5, the model's vocabulary has 5 entries"):
        topk_logprobs_BTK(torch.zeros(1, 1, 5), torch.tensor([[[5]]]))


def distilled(ids, logprobs, **extra):
    return group([[7, 8]], [1.0], distill_token_ids=[ids], distill_logprobs=[logprobs], **extra)


def test_teacher_arrays_are_shifted_padded_and_counted():
    ids = [[], [1], [2, 3], [7, 9], [8]]
    logprobs = [[], [-0.1], [-0.2, -0.3], [-0.4, -0.5], [-0.6]]

    batch = build_batch([distilled(ids, logprobs)], DISTILLING, microbatch_size=1, pad_multiple=1)

    microbatch = batch.microbatches[0]
    assert microbatch.distill_token_ids_BTK.tolist() == [[[1, -1], [2, 3], [7, 9], [8, -1]]]
    assert microbatch.distill_logprobs_BTK[0, 2].tolist() == pytest.approx([-0.4, -0.5])
    assert batch.totals.num_distill_tokens == 2  # the prompt is not distilled


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"distill_logprobs": None}, "distill_logprobs: missing"),
        ({"distill_token_ids": [[[1]]]}, r"distill_token_ids\[0\]: 1 entries, tokens\[0\] has 5"),
        ({"distill_logprobs": [[[], [], [], [], []]]}, r"distill_logprobs\[0\]\[0\]: 0 entries"),
    ],
)
def test_teacher_arrays_that_do_not_line_up_are_refused(fields, message):
    broken = {**distilled([[1]] * 5, [[-0.1]] * 5), **fields}

    with pytest.raises(GroupError, match=message):
        rows_from_group(broken, DISTILLING)


def test_kl_penalty_is_added_beside_the_correction():
    plain, _ = oracle_loss(TrainingLoss())

    terms = TrainingLoss(kl=KlPenalty(0.5, "k1"))(oracle_inputs(), TOTALS)

    assert terms.parts["kl_penalty"] == pytest.approx(0.5 * 0.0111111111, abs=1e-10)
    assert terms.loss.item() == pytest.approx(plain + terms.parts["kl_penalty"])


def test_kl_penalty_without_reference_logprobs_is_refused():
    rules = RowRules(seq_len=64, uses_reference=True)

    with pytest.raises(GroupError, match="ref_logprobs: missing"):
        rows_from_group(group([[7]], [1.0]), rules)


def test_reference_logprobs_are_shifted_like_labels():
    rules = RowRules(seq_len=64, uses_reference=True)
    given = group([[7]], [1.0], ref_logprobs=[[-0.1, -0.2, -0.3, -0.4]])

    batch = build_batch([given], rules, microbatch_size=1, pad_multiple=4)

    expected = pytest.approx([-0.2, -0.3, -0.4, 1.0])
    assert batch.microbatches[0].ref_logprobs_BT[0].tolist() == expected


def test_entropy_bonus_is_the_mean_over_the_tokens_of_the_policy_loss():
    entropy = double(TRAINER).abs().requires_grad_()
    plain, _ = oracle_loss(TrainingLoss())

    terms = TrainingLoss(entropy_coef=0.5)(oracle_inputs(entropy_BT=entropy), TOTALS)
    terms.loss.backward()

    mean = entropy[MASK].sum().item() / TOTALS.num_tokens
    assert terms.parts["entropy_bonus"] == pytest.approx(0.5 * mean)
    assert terms.loss.item() == pytest.approx(plain - 0.5 * mean)
    torch.testing.assert_close(entropy.grad, -0.5 / TOTALS.num_tokens * MASK.double())
