"""The earlier trainer's loss function: its signature, its metrics, its defects gone."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from example_trainer import training
from example_trainer.training import compute_grpo_loss
from tests.trainer.losses.oracle import ADVANTAGES, INFERENCE, LABELS, TRAINER, double

KEYS = {
    "pos_logp", "neg_logp", "avg_logp", "pos_count", "neg_count", "training_logprobs",
    "inference_logprobs", "interpretable_loss", "mean_ratio", "clipped_fraction",
    "logprob_diff_mean", "logprob_diff_abs_mean", "logprob_diff_max",
}  # fmt: skip


def scripted_logits(logprobs=TRAINER, *, temperature=1.0):
    """Logits over two dozen words whose word 7 has the given logprobs at that temperature."""
    target = double(logprobs).clamp(max=-1e-9)
    rest = torch.log1p(-target.exp()) - torch.tensor(23.0).log()
    logits = rest[..., None].repeat(1, 1, 24)
    logits[..., 7] = target
    return (logits * temperature).requires_grad_()


def compute(*, labels=LABELS, inference=INFERENCE, temperature=1.0, accumulation=1, **settings):
    logits = scripted_logits(temperature=temperature)
    loss, metrics = compute_grpo_loss(
        lambda x: SimpleNamespace(logits=logits),
        torch.zeros(4, 3, dtype=torch.long),
        labels,
        double(ADVANTAGES)[:, :1],
        torch.full((4, 1, 1), temperature),
        accumulation,
        None if inference is None else double(inference),
        **settings,
    )
    return loss, metrics, logits


def test_signature_is_the_contracts():
    assert list(inspect.signature(compute_grpo_loss).parameters) == [
        "model", "tokens", "labels", "advantages", "temperatures", "gradient_accumulation_steps",
        "inference_logprobs", "clip_eps",
    ]  # fmt: skip
    assert training.compute_grpo_loss is compute_grpo_loss


def test_value_is_the_sequence_mean_of_the_plain_minimum():
    loss, metrics, _ = compute(accumulation=2)

    ratio = (double(TRAINER) - double(INFERENCE)).exp()
    advantages = double(ADVANTAGES)
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    mask = LABELS != -100
    expected = -((objective * mask).sum(1) / mask.sum(1)).mean()
    assert loss.item() == pytest.approx(expected.item() / 2, abs=1e-8)
    assert metrics["interpretable_loss"] == pytest.approx(expected.item(), abs=1e-8)
    assert set(metrics) == KEYS
    assert metrics["mean_ratio"] == pytest.approx(ratio[mask].mean().item(), abs=1e-7)
    assert metrics["training_logprobs"].shape == (9,)
    assert (metrics["pos_count"], metrics["neg_count"]) == (2.0, 2.0)


def test_logits_are_divided_by_the_temperature():
    hot, _, _ = compute(temperature=2.0)
    plain, _, _ = compute()

    assert hot.item() == pytest.approx(plain.item(), abs=1e-12)


def test_microbatch_without_trained_positions_gives_a_zero_one_can_send_backward():
    loss, metrics, logits = compute(labels=torch.full((4, 3), -100))
    loss.backward()

    assert loss.item() == 0.0
    assert logits.grad.abs().sum() == 0
    assert metrics["logprob_diff_max"] == 0.0


def test_placeholders_count_as_ratio_one():
    _, metrics, _ = compute(inference=[[1.0] * 3] * 4)

    assert metrics["mean_ratio"] == 1.0
    assert metrics["logprob_diff_abs_mean"] == 0.0


def test_without_inference_logprobs_it_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"--openai\.server_type vllm"):
        compute(inference=None)
