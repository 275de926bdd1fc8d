"""Metrics of a step outside the loss: staleness and truncation of groups, phases, FLOPs."""

from __future__ import annotations

import pytest
import torch

from example_trainer.metrics import (
    ModelShape,
    PhaseClock,
    StepObserver,
    group_metrics,
    peak_flops_of,
)
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group, tiny_config, tiny_llama


def test_staleness_is_the_mean_over_trajectories_that_tell_their_version():
    groups = [
        group([[7], [8], [9]], [1.0, 0.0, 0.0], policy_version=10),
        group([[7]], [1.0], policy_version=6),
        group([[7], [8]], [1.0, 0.0]),
    ]

    metrics = group_metrics(groups, step=10, seq_len=64)

    assert metrics["train/staleness_mean"] == 1.0  # (3 * 0 + 1 * 4) / 4
    assert metrics["train/staleness_max"] == 4.0
    assert metrics["train/staleness_unknown_fraction"] == pytest.approx(2 / 6)


def test_staleness_of_groups_without_a_version_is_left_out():
    metrics = group_metrics([group([[7]], [1.0])], step=10, seq_len=64)

    assert metrics == {"train/staleness_unknown_fraction": 1.0, "train/truncation_rate": 0.0}


def test_staleness_leaves_out_versions_that_this_trainer_has_not_reached():
    groups = [group([[7]], [1.0], policy_version=version) for version in (8, 10, 41)]

    metrics = group_metrics(groups, step=10, seq_len=64)

    assert (metrics["train/staleness_mean"], metrics["train/staleness_max"]) == (1.0, 2.0)
    assert metrics["train/staleness_unknown_fraction"] == pytest.approx(1 / 3)


def test_truncation_counts_what_the_engine_or_the_trainer_cut():
    params = {"max_tokens": 3}
    groups = [
        group([[7, 8, 9], [7]], [1.0, 0.0], generation_params=params),
        group([[7] * 20, [8]], [1.0, 0.0]),
    ]

    assert group_metrics(groups, step=0, seq_len=16)["train/truncation_rate"] == 0.5


def test_truncation_counts_what_the_engine_says_it_cut():
    # No max_tokens: the budget of each completion was what its prompt left of the context.
    groups = [group([[7, 8, 9], [7]], [1.0, 0.0], finish_reasons=["length", "stop"])]

    assert group_metrics(groups, step=0, seq_len=16)["train/truncation_rate"] == 0.5


def test_phases_add_up_and_begin_anew():
    seconds = iter([0.0, 1.0, 5.0, 7.5, 8.0, 8.25])
    phases = PhaseClock(clock=lambda: next(seconds))
    for phase in ("forward", "backward", "forward"):
        with phases.measure(phase):
            pass

    assert phases.take_metrics() == {"train/forward_time": 1.25, "train/backward_time": 2.5}
    assert phases.take_metrics() == {}


def test_flops_of_a_step():
    shape = ModelShape(num_body_parameters=100, num_head_parameters=10, attention_width=8)

    # 6 * 100 * 5 tokens + 6 * 10 * 2 trained + 6 * 8 * (9 + 4)
    assert shape.step_flops([3, 2], num_trained_tokens=2) == 3000 + 120 + 624


def test_shape_of_a_model_leaves_the_embeddings_out():
    model = tiny_llama()

    shape = ModelShape.of(model)

    total = sum(p.numel() for p in model.parameters())
    assert shape is not None
    assert shape.num_head_parameters == 32 * 16
    assert shape.num_body_parameters == total - 2 * 32 * 16
    assert shape.attention_width == 2 * 16


def test_shape_of_a_model_whose_layers_differ_adds_their_attention():
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, global_head_dim=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=32,
    )  # fmt: skip

    shape = ModelShape.of(AutoModelForCausalLM.from_config(config))

    assert shape is not None
    assert shape.attention_width == 2 * (8 + 8 + 16)


def test_shape_of_a_mixture_of_experts_is_not_known():
    model = tiny_llama()
    model.config.num_local_experts = 8

    assert ModelShape.of(model) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Some other thing", None),
        ("", None),
    ],
)
def test_peak_of_a_device(name, peak):
    assert peak_flops_of(name) == peak


class RecordingView:
    def __init__(self):
        self.activities, self.steps = [], {}

    def show_activity(self, text):
        self.activities.append(text)

    def show_step(self, step, metrics):
        self.steps[step] = metrics


def test_observer_updates_its_view_and_starts_each_step_from_zero(tmp_path):
    view = RecordingView()
    observer = StepObserver(tiny_config(tmp_path), tiny_llama(), view=view)
    known = {"train/trained_tokens": 1.0, "train/compute_time": 1.0}

    observer.note("training")
    observer.take_groups([group([[7]], [1.0], policy_version=1)], step=3)
    with observer.measure("forward"):
        pass
    first = observer.metrics(known)
    observer.show(4, first)

    assert first["train/staleness_mean"] == 2.0
    assert first["train/forward_time"] >= 0.0
    assert "train/mfu" not in first, "the peak of a CPU is unknown"
    assert "train/forward_time" not in observer.metrics(known)
    assert (view.activities, view.steps) == (["training"], {4: first})


def test_a_step_logs_how_old_its_groups_are_and_where_its_time_went(tmp_path):
    scored = group([[7], [8]], [1.0, 0.0], logprob=-3.0, policy_version=0)
    trainer = make_trainer(tmp_path, groups=[scored], training_steps=2)
    logged = {}
    trainer._run_log.log = lambda metrics, step: logged.update({step: metrics})

    trainer.run()

    assert [logged[step]["train/staleness_mean"] for step in (1, 2)] == [0.0, 1.0]
    parts = [logged[2][f"train/{name}_time"] for name in ("forward", "backward", "optimizer")]
    assert 0.0 < sum(parts) <= logged[2]["train/compute_time"]
    first = logged[1]
    # One token each: k3 of trainer - sampler, d, is e^d - d - 1, so about d^2 / 2 or more.
    assert first["alignment/k3"] >= 0.0
    assert first["train/input_tokens"] == 6
    assert torch.isfinite(torch.tensor(list(first.values()))).all()
