"""Loading, freezing, the optimiser and its schedule, and the package's light face."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import example_trainer
from atroposlib.errors import ConfigError
from example_trainer.model import freeze_other_layers, load_model_and_tokenizer
from example_trainer.optimizer import create_optimizer, learning_rate_at
from tests.trainer.tiny import save_tiny_model, tiny_config, tiny_llama


def test_model_on_a_cpu_is_float32_in_training_mode_without_cache(tmp_path):
    save_tiny_model(tmp_path / "model")
    config = tiny_config(tmp_path, model_name=str(tmp_path / "model"), gradient_checkpointing=True)

    model, tokenizer = load_model_and_tokenizer(config)

    assert model.training
    assert model.config.use_cache is False
    assert model.is_gradient_checkpointing
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(tokenizer) == 32


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_gpu_that_is_not_there_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, num_gpus
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = tiny_config(tmp_path, model_name="nowhere", device="cuda:2")

    with pytest.raises(ConfigError, match=f"device=cuda:2: torch sees {num_gpus} GPUs"):
        load_model_and_tokenizer(config)


def test_gradient_checkpointing_changes_no_gradient(tmp_path):
    save_tiny_model(tmp_path / "model")
    gradients = []
    for checkpointing in (False, True):
        config = tiny_config(
            tmp_path, model_name=str(tmp_path / "model"), gradient_checkpointing=checkpointing
        )
        model, _ = load_model_and_tokenizer(config)
        model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])

    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_model_that_is_not_there_is_a_config_error_naming_it(tmp_path):
    config = tiny_config(tmp_path, model_name=str(tmp_path / "nowhere"))

    with pytest.raises(ConfigError, match="nowhere"):
        load_model_and_tokenizer(config)


def test_only_the_chosen_layers_stay_trainable():
    model = tiny_llama(layers=3)

    freeze_other_layers(model, [0, 2])

    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert all(".layers.0." in name or ".layers.2." in name for name in trainable)


def test_blocks_of_gpt2_style_models_are_found():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16))

    freeze_other_layers(model, [1])

    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all(".h.1." in name for name in trainable)


def test_layer_the_model_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"\[5\] do not exist: the model has layers 0-1"):
        freeze_other_layers(tiny_llama(layers=2), [0, 5])


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", "AdamW"), ("adamw_8bit", "AdamW"), ("adafactor", "Adafactor")]
)
def test_optimizer_on_a_cpu_is_the_one_named_or_its_stand_in(tmp_path, name, kind):
    optimizer = create_optimizer(tiny_llama(), tiny_config(tmp_path, optimizer=name))

    assert type(optimizer).__name__ == kind


def test_optimizer_without_anything_to_train_is_an_error(tmp_path):
    model = tiny_llama().requires_grad_(False)

    with pytest.raises(RuntimeError, match="no parameter requires a gradient"):
        create_optimizer(model, tiny_config(tmp_path))


def test_learning_rate_warms_up_linearly_then_stays(tmp_path):
    config = tiny_config(tmp_path, lr=0.4, warmup_steps=4)

    rates = [learning_rate_at(step, config) for step in range(6)]

    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_package_offers_the_names_of_the_contract_without_loading_torch():
    code = (
        "import sys, example_trainer as t; t.TrainingConfig, t.parse_args, t.config_from_args; "
        "assert not {'torch', 'transformers', 'vllm', 'wandb'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)

    assert callable(example_trainer.train_legacy)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = example_trainer.nothing_such


@pytest.mark.parametrize(("train_dtype", "is_learned"), [("bfloat16", False), ("mixed", True)])
def test_small_updates_survive_under_float32_weights_only(tmp_path, train_dtype, is_learned):
    save_tiny_model(tmp_path / "model")
    config = tiny_config(
        tmp_path, model_name=str(tmp_path / "model"), train_dtype=train_dtype, lr=1e-6
    )
    model, _ = load_model_and_tokenizer(config)
    weight = model.model.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    optimizer = create_optimizer(model, config)

    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train_dtype == "mixed"):
            logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
        logits.float().log_softmax(-1)[0, -1, 5].neg().backward()
        optimizer.step()
        optimizer.zero_grad()

    changed = (weight != before).float().mean()
    assert logits.dtype == torch.bfloat16
    assert (changed > 0.9) == is_learned
