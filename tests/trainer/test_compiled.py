"""Compiled layers: the logprobs and gradients of the model's own code, for any lengths."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from atroposlib.errors import ConfigError
from example_trainer import policy as policies
from example_trainer.batch import build_batch
from example_trainer.model import checkpoint_activations, use_packed_attention
from example_trainer.policy import prepare_policy
from example_trainer.scoring import linear_logprobs
from example_trainer.training import row_rules
from tests.trainer.kill_supervisor import seeded_groups
from tests.trainer.parallel_runs import largest_difference, run_trainer, service_with
from tests.trainer.test_prefix_tree import PADDED, TREES, WHOLE_TREE, groups_of_a_batch, qwen3
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import save_tiny_model, tiny_llama

# The compiler itself causes warnings, which would be errors here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SETTINGS = {"kl_coef": 0.1, "distill_coef": 0.2, "max_grad_norm": 1e9, "seq_len": 60}
PACKED = {"microbatch_size": 20, "packs": True}


@pytest.fixture(autouse=True)
def needs_compiler():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs g++ or clang++ on a CPU; apt-get install g++")


def first_gradient(tmp_path, layouts, *, model=qwen3, **settings):
    """Return the first gradients of one model with several layouts, each as one vector."""
    built = model().train()
    use_packed_attention(built)
    settings = {**SETTINGS, **settings}
    if settings.get("gradient_checkpointing"):
        checkpoint_activations(built)
    config = make_trainer(tmp_path, model=built, **settings).config
    policy = prepare_policy(built, config)
    trainer = make_trainer(tmp_path, model=built, policy=policy, **settings)
    found = []

    def capture():
        found.append(torch.cat([p.grad.flatten() for p in built.parameters()]))

    trainer._optimizer.step = capture
    for layout in layouts:
        trainer.train_on(build_batch(groups_of_a_batch(), row_rules(config), **layout))
    return found, policy


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_equal_those_of_the_models_own_code(tmp_path, recomputes):
    settings = {"gradient_checkpointing": recomputes, "shared_prefixes": "on"}
    (expected,), _ = first_gradient(tmp_path, [PADDED], torch_compile="off", **settings)

    layouts = [PADDED, PACKED, WHOLE_TREE, TREES]
    found, policy = first_gradient(tmp_path, layouts, torch_compile="on", **settings)

    assert "compiled layers" in policy.layout
    assert policy.min_shared_fraction is not None
    for gradient in found:
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_gradients_in_bfloat16_are_near_those_of_the_models_own_code(tmp_path):
    settings = {"train_dtype": "mixed"}
    (expected,), _ = first_gradient(tmp_path, [PADDED], torch_compile="off", **settings)

    (found,), _ = first_gradient(tmp_path, [PACKED], torch_compile="on", **settings)

    assert float((found - expected).norm() / expected.norm()) < 0.03


def test_other_lengths_compile_nothing_again(tmp_path):
    one, two = {**PACKED, "max_tokens": 90}, {**TREES, "max_tokens": 120}
    compiled = []
    built = qwen3().train()
    use_packed_attention(built)
    settings = {**SETTINGS, "torch_compile": "on"}
    config = make_trainer(tmp_path, model=built, **settings).config
    trainer = make_trainer(tmp_path, model=built, policy=prepare_policy(built, config), **settings)
    for number, layout in enumerate([PACKED, WHOLE_TREE, one, two, TREES, PACKED]):
        groups = groups_of_a_batch()[: 1 + number % 3]
        trainer.train_on(build_batch(groups, row_rules(config), **layout))
        compiled.append(counters["stats"]["unique_graphs"])

    assert 0 < compiled[1] == compiled[-1]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_tempered", [False, True])
def test_fused_logprobs_and_gradients_equal_the_others(has_bias, is_tempered):
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 16).double(), torch.randn(90, 16).double()
    bias = torch.randn(90).double() if has_bias else None
    temperatures = torch.linspace(0.5, 2, 70).double() if is_tempered else None
    targets = torch.randint(0, 90, (70, 2))
    results = []
    for fuses in (False, True):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        found = linear_logprobs(
            *inputs, bias, targets, temperatures_N=temperatures, chunk_tokens=32, fuses=fuses
        )
        (found.logprobs_NK * torch.linspace(-1, 1, 140).double().view(70, 2)).sum().backward()
        results.append((*found, *(x.grad for x in inputs)))

    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, atol=1e-10, rtol=0)


def test_layers_that_cannot_be_compiled_are_left_alone_and_named(tmp_path, monkeypatch, caplog):
    def fail(model):
        raise RuntimeError("no backend for this device\nand a trace")

    monkeypatch.setattr(policies, "compile_layers", fail)
    monkeypatch.setattr(policies, "obstacle_to_compiling", lambda model, config: None)

    with caplog.at_level(logging.WARNING):
        _, policy = first_gradient(tmp_path, [PACKED], torch_compile="auto")
    with pytest.raises(
        ConfigError, match=r"torch_compile=on: the compiler failed .*no backend for"
    ):
        first_gradient(tmp_path, [PACKED], torch_compile="on")

    assert (
        "the layers are not compiled: the compiler failed (RuntimeError: no backend" in caplog.text
    )
    assert "and a trace" not in caplog.text
    assert not policy.scorer.fuses
    assert "compiled" not in policy.layout


def test_layers_that_compute_something_else_are_not_used(tmp_path, monkeypatch):
    def compile_wrongly(model):
        model.lm_head.weight.data.neg_()

    monkeypatch.setattr(policies, "compile_layers", compile_wrongly)

    with pytest.raises(ConfigError, match="logprobs of compiled layers differ from those of the"):
        first_gradient(tmp_path, [PACKED], torch_compile="on", model=tiny_llama)


def test_a_cpu_compiles_only_on_request(tmp_path):
    _, policy = first_gradient(tmp_path, [PACKED], torch_compile="auto")

    assert "compiled" not in policy.layout


def test_padded_sequences_are_not_compiled(tmp_path):
    with pytest.raises(ConfigError, match="torch_compile=on: packing is off"):
        first_gradient(tmp_path, [PADDED], torch_compile="on", packing="off")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_runs_with_compiled_layers_end_with_the_same_weights(tmp_path):
    save_tiny_model(tmp_path / "model")
    steps, runs = 6, {}
    replicated = ["--parallel-mode", "data"]
    compiled = ["--torch-compile", "on", "--gradient-checkpointing"]
    for name, ranks, flags in (
        ("plain", 1, ["--torch-compile", "off"]),
        ("compiled", 1, compiled),
        ("two_ranks", 2, [*compiled, *replicated]),
    ):
        with service_with(seeded_groups(steps), tmp_path, name) as service:
            runs[name], _ = run_trainer(
                service, tmp_path / name, *flags, ranks=ranks, steps=steps,
                final="final_model/model.safetensors",
            )  # fmt: skip

    assert largest_difference(runs["compiled"], runs["plain"]) < 1e-5
    assert largest_difference(runs["two_ranks"], runs["plain"]) < 1e-5
