"""Metrics: step statistics worked out by hand, wandb settings, the terminal line."""

from __future__ import annotations

import math

import pytest
import torch

from example_trainer.batch import Microbatch
from example_trainer.loss import BatchTotals, LossInputs, TokenTruncation, TrainingLoss
from example_trainer.metrics import StepStats, StepTimes, step_line
from example_trainer.run_log import with_wandb_names
from example_trainer.scoring import TokenScores
from tests.trainer.tiny import tiny_config


def collect(rows):
    """Statistics of rows (trainer logprob, inference logprob, advantage), one per micro-batch."""
    stats = StepStats(clip_low=0.2, clip_high=0.28)
    for trainer, inference, advantage in rows:
        logprobs_BT = torch.tensor([[trainer, 0.0]])
        microbatch = Microbatch(
            tokens_BT=torch.tensor([[1, 2]]),
            labels_BT=torch.tensor([[2, -100]]),
            advantages_BT=torch.tensor([[advantage, advantage]]),
            inference_logprobs_BT=torch.tensor([[inference, 1.0]]),
            temperatures_S=torch.ones(1),
        )
        inputs = LossInputs(
            logprobs_BT,
            microbatch.labels_BT,
            microbatch.advantages_BT,
            microbatch.inference_logprobs_BT,
        )
        terms = TrainingLoss(correction=TokenTruncation())(inputs, BatchTotals(len(rows), 1))
        stats.add(microbatch, TokenScores(logprobs_BT, torch.full((1, 2), 0.7), None), terms)
    return stats.metrics()


def test_step_statistics_are_means_over_trained_tokens():
    # Differences +0.1 and -1.0, so ratios e^0.1 (inside the clip) and e^-1 (outside).
    metrics = collect([(-0.4, -0.5, 1.0), (-2.0, -1.0, -1.0)])

    assert metrics["train/trained_tokens"] == 2
    assert metrics["train/logp"] == pytest.approx(-1.2)
    assert metrics["train/entropy_estimate"] == pytest.approx(1.2)
    assert metrics["train/entropy"] == pytest.approx(0.7)
    assert metrics["train/pos_logp"] == pytest.approx(-0.4)
    assert metrics["train/neg_logp"] == pytest.approx(-2.0)
    assert metrics["logprobs/training_std"] == pytest.approx(0.8)
    assert metrics["logprobs/inference_mean"] == pytest.approx(-0.75)
    assert metrics["alignment/diff_mean"] == pytest.approx(-0.45)
    assert metrics["alignment/diff_abs_mean"] == pytest.approx(0.55)
    assert metrics["alignment/diff_max"] == pytest.approx(1.0)
    assert metrics["alignment/missing_fraction"] == 0.0
    assert metrics["grpo/mean_ratio"] == pytest.approx((math.exp(0.1) + math.exp(-1.0)) / 2)
    assert metrics["grpo/clipped_fraction"] == 0.5
    assert metrics["grpo/truncated_fraction"] == 0.0


def test_step_statistics_count_weights_at_the_cap():
    metrics = collect([(-0.5, -3.0, 1.0)])

    assert metrics["grpo/mean_importance_weight"] == 2.0
    assert metrics["grpo/truncated_fraction"] == 1.0


def test_step_statistics_without_inference_logprobs_leave_the_comparison_out():
    metrics = collect([(-0.5, 1.0, 1.0)])

    assert metrics["alignment/missing_fraction"] == 1.0
    assert "grpo/mean_ratio" not in metrics
    assert "alignment/diff_abs_mean" not in metrics


def test_step_statistics_of_nothing_are_finite():
    metrics = StepStats(clip_low=0.2, clip_high=0.28).metrics()

    assert all(math.isfinite(value) for value in metrics.values())


def test_wandb_without_a_project_is_switched_off_with_a_warning(tmp_path, caplog):
    config = with_wandb_names(tiny_config(tmp_path, use_wandb=True), "a" * 32)

    assert config.use_wandb is False
    assert "wandb_project" in caplog.text


def test_missing_wandb_group_is_that_of_the_run_however_often_it_is_resumed(tmp_path):
    config = tiny_config(tmp_path, use_wandb=True, wandb_project="p")

    named = with_wandb_names(config, "0123456789abcdef")

    assert named.wandb_group == "01234567"
    assert with_wandb_names(named, "another") == named


def test_step_line_shows_what_one_watches():
    times = StepTimes(fetch_s=1.0, compute_s=2.0, sync_s=0.5)
    metrics = {
        "train/reward_mean": 0.25,
        "train/loss": -0.001,
        "train/grad_norm": 1.5,
        "grpo/mean_ratio": 1.01,
        "grpo/clipped_fraction": 0.125,
        **times.metrics(num_input_tokens=3000),
    }

    line = step_line(3, 20, metrics)

    assert line == (
        "step 3/20 | reward 0.250 | loss -0.001000 | grad 1.500 | ratio 1.010 | "
        "outside clip 12.5% | 1,500 tok/s | fetch 1.00 s, train 2.00 s, sync 0.50 s"
    )
