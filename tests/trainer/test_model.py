"""Loading, freezing, the optimiser and its schedule, and the package's light face."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import example_trainer
from atroposlib.errors import ConfigError
from example_trainer.model import (
    attention_kinds,
    attention_note,
    choose_optimizer,
    create_optimizer,
    flash_attention_obstacle,
    freeze_other_layers,
    load_frozen_model,
    load_model_and_tokenizer,
    require_device,
)
from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine
from example_trainer.training import learning_rate_at
from tests.trainer.tiny import save_tiny_model, tiny_config, tiny_llama

pytestmark = pytest.mark.slow

_LOST = "model.layers.1.self_attn.q_proj.weight"


def test_model_on_a_cpu_is_float32_in_training_mode_without_cache(tmp_path):
    save_tiny_model(tmp_path / "model")
    config = tiny_config(tmp_path, model_name=str(tmp_path / "model"), gradient_checkpointing=True)

    model, tokenizer = load_model_and_tokenizer(config)

    assert model.training
    assert model.config.use_cache is False
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(tokenizer) == 32


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"optimizer": "adafactor", "weight_decay": 0.1}, "weight_decay"),
        ({"optimizer": "adafactor", "adafactor_relative_step": True}, "lr"),
        ({"adafactor_scale_parameter": True}, "adafactor_scale_parameter"),
        ({"min_lr": 1e-3}, "min_lr"),
        ({"kl_estimator": "k1"}, "kl_estimator"),
        ({"distill_loss": "reverse_kl"}, "distill_loss"),
    ],
)
def test_setting_without_an_effect_is_named(tmp_path, caplog, settings, name):
    save_tiny_model(tmp_path / "model")

    load_model_and_tokenizer(tiny_config(tmp_path, model_name=str(tmp_path / "model"), **settings))

    assert f"{name} is not used: " in caplog.text


def test_settings_that_have_an_effect_are_not_named(tmp_path, caplog):
    save_tiny_model(tmp_path / "model")
    settings = {"weight_decay": 0.1, "lr_schedule": "cosine", "min_lr": 1e-3}
    settings |= {"kl_coef": 0.1, "kl_estimator": "k1", "reference_model": "groups"}

    load_model_and_tokenizer(tiny_config(tmp_path, model_name=str(tmp_path / "model"), **settings))

    assert "is not used" not in caplog.text


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_gpu_that_is_not_there_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, num_gpus
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = tiny_config(tmp_path, model_name="nowhere", device="cuda:2")

    with pytest.raises(ConfigError, match=f"device=cuda:2: torch sees {num_gpus} GPUs"):
        load_model_and_tokenizer(config)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerator_that_is_not_there_is_refused_as_well(monkeypatch, kind):
    backend = torch.backends.mps if kind == "mps" else torch.xpu
    monkeypatch.setattr(backend, "is_available", lambda: False)

    with pytest.raises(ConfigError, match=f"device={kind}: torch sees 0 GPUs"):
        require_device(kind)


@pytest.mark.parametrize(
    ("capability", "is_installed", "is_supported", "reason"),
    [
        (None, True, True, "flash-attn needs a GPU"),
        ((9, 0), False, False, "flash-attn is not installed"),
        ((9, 0), True, False, "transformers does not support the installed flash-attn"),
        ((7, 5), True, True, "flash-attn needs compute capability 8.0, this GPU has 7.5"),
        ((8, 0), True, True, None),
        ((12, 0), True, True, None),
    ],
)
def test_flash_attention_is_used_where_all_it_needs_is_there(
    capability, is_installed, is_supported, reason
):
    obstacle = flash_attention_obstacle(
        capability, is_installed=is_installed, is_supported=is_supported
    )

    assert obstacle == reason
    assert attention_kinds(obstacle)[0] == ("flash_attention_2" if reason is None else "sdpa")


def test_model_without_the_fast_attention_is_loaded_with_its_own_unless_ours_computes_the_same(
    tmp_path,
):
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    class SlowConfig(LlamaConfig):
        model_type = "slow_llama"

    class SlowLlama(LlamaForCausalLM):
        config_class = SlowConfig
        _supports_sdpa = False

    AutoConfig.register("slow_llama", SlowConfig, exist_ok=True)
    AutoModelForCausalLM.register(SlowConfig, SlowLlama, exist_ok=True)
    SlowLlama(SlowConfig(**tiny_llama().config.to_dict())).save_pretrained(tmp_path / "slow")

    for packing, note in (("off", "eager"), ("auto", "sdpa for each sequence")):
        config = tiny_config(tmp_path, packing=packing)
        model = load_frozen_model(str(tmp_path / "slow"), config)

        assert attention_note(model, "cpu") == f"{note} (flash-attn needs a GPU)"


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


@pytest.mark.parametrize(
    ("width", "lost", "reason"),
    [
        (72, (), r"its weights have other shapes than its config\.json"),
        (None, (_LOST,), f"1 of its weights are missing, the first is {_LOST}"),
    ],
    ids=["other shapes", "missing"],
)
def test_weights_that_do_not_fill_the_model_are_refused_instead_of_drawn_at_random(
    tmp_path, width, lost, reason
):
    folder = save_tiny_model(tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    described["intermediate_size"] = width or described["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=reason):
        load_model_and_tokenizer(tiny_config(tmp_path, model_name=str(folder)))
    with pytest.raises(ConfigError, match=reason):
        load_engine(TorchEngineOptions(str(folder), device="cpu"))


def test_weights_do_not_follow_a_file_that_is_overwritten_during_training(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    config = tiny_config(tmp_path, model_name=str(folder))
    models = [load_model_and_tokenizer(config)[0], load_frozen_model(str(folder), config)]
    before = [[tensor.clone() for tensor in model.parameters()] for model in models]

    # Not truncated, which would end this process if the file were mapped.
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))

    for model, tensors in zip(models, before, strict=True):
        assert all(map(torch.equal, model.parameters(), tensors))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_dropout_of_a_model_is_pointed_out(tmp_path, caplog, share):
    folder = save_tiny_model(tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "attention_dropout": share}))

    load_model_and_tokenizer(tiny_config(tmp_path, model_name=str(folder)))

    lines = [record.getMessage() for record in caplog.records]
    assert any("dropout of 0.1 in training" in line for line in lines) == (share > 0)


@pytest.mark.parametrize(
    ("kind", "noise", "expected"),
    [
        ("seed_oss", {"residual_dropout": 0.2}, "residual dropout of 0.2 in training"),
        ("phimoe", {"router_jitter_noise": 0.05}, "router jitter noise of 0.05 in training"),
    ],
)
def test_noise_of_a_model_is_named_where_its_code_draws_it(tmp_path, caplog, kind, noise, expected):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    folder = save_tiny_model(tmp_path / "model")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    quiet = {"attention_dropout": 0.0, "input_jitter_noise": 0.0}
    config = CONFIG_MAPPING[kind](**sizes, **heads, **{**quiet, **noise}, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    load_model_and_tokenizer(tiny_config(tmp_path, model_name=str(folder)))

    assert any(expected in record.getMessage() for record in caplog.records)


def test_model_that_cannot_compute_activations_again_is_refused_with_the_flag(tmp_path):
    from transformers import CTRLConfig, CTRLLMHeadModel

    folder = save_tiny_model(tmp_path / "model")
    CTRLLMHeadModel(
        CTRLConfig(vocab_size=32, n_embd=16, dff=16, n_layer=1, n_head=2, n_positions=64)
    ).save_pretrained(folder)
    config = tiny_config(tmp_path, model_name=str(folder), gradient_checkpointing=True)

    with pytest.raises(ConfigError, match=r"does not support.*--no-gradient-checkpointing"):
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
    with pytest.raises(RuntimeError, match="match no parameter"):
        freeze_other_layers(tiny_llama(layers=2), [])


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


@pytest.mark.parametrize(
    ("device", "train_dtype", "settings", "loaded", "autocasts"),
    [
        ("cpu", "auto", {}, "float32", False),
        ("cuda", "auto", {}, "float32", True),
        ("cuda:1", "mixed", {}, "float32", True),
        ("cpu", "mixed", {}, "float32", True),
        ("cuda", "float32", {}, "float32", True),
        ("cuda", "bfloat16", {}, "bfloat16", False),
        # Frozen weights get no update that could be lost; the adapters are float32.
        ("cuda", "auto", {"weight_bridge_mode": "lora_only"}, "bfloat16", True),
        ("cpu", "mixed", {"weight_bridge_mode": "lora_only"}, "float32", True),
        ("cuda", "auto", {"weight_bridge_mode": "lora_only", "world_size": 2}, "float32", True),
    ],
)
def test_precision_follows_the_device(tmp_path, device, train_dtype, settings, loaded, autocasts):
    config = tiny_config(tmp_path, device=device, train_dtype=train_dtype, **settings)

    assert (config.loaded_dtype, config.autocasts) == (loaded, autocasts)


@pytest.mark.parametrize(
    ("settings", "trains_bfloat16", "has_bitsandbytes", "described"),
    [
        ({"device": "cuda", "optimizer": "adamw"}, False, False, "AdamW, fused"),
        ({"device": "cpu", "optimizer": "adamw"}, False, False, "AdamW"),
        ({"device": "cuda"}, False, True, "8-bit AdamW"),
        (
            {"device": "cuda"},
            False,
            False,
            "AdamW, fused (not adamw_8bit: bitsandbytes is not installed)",
        ),
        (
            {"device": "cuda", "world_size": 2},
            False,
            True,
            "AdamW, fused (not adamw_8bit: its state cannot be sharded)",
        ),
        ({"device": "cuda", "optimizer": "adamw"}, True, False, "AdamW, stochastic rounding"),
        (
            {"device": "cuda"},
            True,
            True,
            "8-bit AdamW (updates smaller than half a bfloat16 step are lost; use --train-dtype "
            "mixed, or --optimizer adamw, which rounds stochastically)",
        ),
    ],
)
def test_optimizer_follows_device_and_precision(
    tmp_path, settings, trains_bfloat16, has_bitsandbytes, described
):
    config = tiny_config(tmp_path, **{"optimizer": "adamw_8bit", **settings})

    choice = choose_optimizer(
        config, trains_bfloat16=trains_bfloat16, has_bitsandbytes=has_bitsandbytes
    )

    assert choice.describe() == described


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        # Four steps after the warm-up: 0, 1/4, 2/4 and 3/4 of the way from 1.0 to 0.2.
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157]),
    ],
)
def test_learning_rate_warms_up_and_then_follows_its_schedule(tmp_path, schedule, expected):
    config = tiny_config(
        tmp_path, lr=1.0, min_lr=0.2, warmup_steps=2, training_steps=6, lr_schedule=schedule
    )

    rates = [learning_rate_at(step, config) for step in range(6)]

    assert rates == pytest.approx(expected, abs=1e-6)


def test_learning_rate_of_an_unknown_schedule_raises(tmp_path):
    config = tiny_config(tmp_path, training_steps=6).model_copy(update={"lr_schedule": "step"})

    with pytest.raises(AssertionError, match="step"):
        learning_rate_at(5, config)


def test_learning_rate_that_would_rise_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"min_lr=0\.1 must not be above lr=0\.01"):
        tiny_config(tmp_path, min_lr=0.1)
