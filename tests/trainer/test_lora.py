"""LoRA adapters: trained weights, saved files, updates of an engine."""

from __future__ import annotations

import json

import pytest
import torch

from atroposlib.errors import ConfigError, InferenceError
from example_trainer.lora import add_adapters, engine_rank, is_adapter
from example_trainer.model import load_model_and_tokenizer
from example_trainer.training import Trainer
from example_trainer.weight_sync import LoraSwapSync
from tests.trainer.scripted_vllm import ScriptedVllm
from tests.trainer.test_training import PREFERRED, REJECTED, make_trainer, probability
from tests.trainer.tiny import (
    SavedTokenizer,
    group,
    move_adapters,
    save_tiny_model,
    tiny_config,
    tiny_llama,
)

pytestmark = pytest.mark.slow

TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def model_folder(tmp_path):
    return save_tiny_model(tmp_path / "model")


def lora_config(tmp_path, **settings):
    return tiny_config(
        tmp_path,
        model_name=str(tmp_path / "model"),
        weight_bridge_mode="lora_only",
        lora_r=4,
        lora_dropout=0.0,
        **settings,
    )


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_fresh_adapters_are_all_that_is_trained_and_change_nothing(tmp_path, model_folder):
    config = lora_config(tmp_path, lora_layer_indices=[1])
    plain, _ = load_model_and_tokenizer(config.model_copy(update={"weight_bridge_mode": "off"}))

    model, _ = load_model_and_tokenizer(config)

    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert len(trained) == 4  # A and B of q_proj and v_proj in the one block
    assert all("layers.1." in name and "lora_" in name for name in trained)
    assert torch.equal(logits(model), logits(plain))


def test_layer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lora_layer_indices \[2\] do not exist: .* 0-1"):
        add_adapters(tiny_llama(), lora_config(tmp_path, lora_layer_indices=[2]))


def test_module_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lora_target_modules"):
        add_adapters(tiny_llama(), lora_config(tmp_path, lora_target_modules=["nowhere"]))


def test_peft_that_is_too_old_for_transformers_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.0")

    with pytest.raises(ConfigError, match=r"needs peft 99\.0 or later, installed is \d"):
        add_adapters(tiny_llama(), lora_config(tmp_path))


def test_adapters_on_the_output_layer_are_refused_in_one_line(tmp_path, model_folder):
    with pytest.raises(ConfigError, match=r"lora_target_modules: .*lm_head") as caught:
        load_model_and_tokenizer(lora_config(tmp_path, lora_target_modules=["q_proj", "lm_head"]))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "idle"), [("lora_only", "train_layer_indices"), ("none", "lora_layer_indices")]
)
def test_blocks_chosen_for_the_other_mode_are_passed_over_and_told(
    tmp_path, model_folder, caplog, mode, idle
):
    config = lora_config(tmp_path, **{idle: [0]}).model_copy(update={"weight_bridge_mode": mode})

    model, _ = load_model_and_tokenizer(config)

    assert f"{idle} is not used" in caplog.text
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    blocks = {name.partition(".layers.")[2][:1] for name in trained}
    assert {"0", "1"} <= blocks


def test_training_saves_adapters_that_load_again(tmp_path, model_folder):
    config = lora_config(tmp_path)
    model, _ = load_model_and_tokenizer(config)
    before = probability(model, PREFERRED)
    trainer = make_trainer(
        tmp_path,
        model=model,
        weight_bridge_mode="lora_only",
        groups=[group([[PREFERRED], [REJECTED]] * 2, [1.0, 0.0] * 2)],
        training_steps=6,
        checkpoint_interval=3,
    )

    final = trainer.run()

    assert probability(model, PREFERRED) > before
    assert final.name == "final_adapter"
    assert is_adapter(final)
    assert (tmp_path / "saves" / "tokenizer").is_dir()
    assert not (final / "model.safetensors").exists()
    again, _ = load_model_and_tokenizer(config, source=str(final))
    assert torch.equal(logits(again), logits(model))
    assert [p.requires_grad for p in again.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert is_adapter(tmp_path / "saves" / "step_3")
    assert isinstance(trainer, Trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_loaded_as_they_were_saved_whatever_the_type_of_the_frozen_weights(
    tmp_path, model_folder, dtype
):
    config = lora_config(tmp_path, train_dtype=dtype)
    model, _ = load_model_and_tokenizer(config)
    move_adapters(model)
    model.save_pretrained(tmp_path / "adapters")

    again, _ = load_model_and_tokenizer(config, source=str(tmp_path / "adapters"))

    saved, loaded = (
        {name: p for name, p in m.named_parameters() if p.requires_grad} for m in (model, again)
    )
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_adapters_keep_their_shape_when_a_resumed_run_has_other_settings(
    tmp_path, model_folder, caplog
):
    model, _ = load_model_and_tokenizer(lora_config(tmp_path))
    model.save_pretrained(tmp_path / "adapters")

    source = str(tmp_path / "adapters")
    others = {"lora_alpha": 64, "lora_target_modules": ["o_proj"], "lora_layer_indices": [1]}
    again, _ = load_model_and_tokenizer(lora_config(tmp_path, **others), source=source)

    assert again.peft_config["default"].lora_alpha == 32
    warnings = [record.message for record in caplog.records if "lora" in record.message]
    reason = "is not used: the adapters from which the run continues have"
    assert warnings == [
        f"lora_alpha=64 {reason} 32",
        f"lora_target_modules=['o_proj'] {reason} ['q_proj', 'v_proj']",
        f"lora_layer_indices=[1] {reason} None",
    ]


@pytest.mark.parametrize(("rank", "engine"), [(1, 8), (8, 8), (16, 16), (17, 32), (512, 512)])
def test_engine_rank_is_the_next_one_it_knows(rank, engine):
    assert engine_rank(rank) == engine


def test_rank_beyond_the_engines_largest_is_refused():
    with pytest.raises(ConfigError, match="up to 512"):
        engine_rank(513)


def test_swap_names_the_adapter_and_a_path_of_its_own_per_step(tmp_path, model_folder):
    with ScriptedVllm({"/v1/load_lora_adapter": (200, "ok")}) as engine:
        config = lora_config(tmp_path, vllm_port=engine.port)
        model, _ = load_model_and_tokenizer(config)
        sync = LoraSwapSync(config)
        sync.start(model, SavedTokenizer(), source="tiny", step=2)
        sync.publish(model, checkpoint=None, step=4)
        sync.close()

    assert [body for _, _, body in engine.requests] == [
        {
            "lora_name": "training_adapter",
            "lora_path": str(tmp_path / "saves" / f"adapter_step_{step}"),
            "load_inplace": True,
        }
        for step in (2, 4)
    ]
    settings = json.loads(
        (tmp_path / "saves" / "adapter_step_4" / "adapter_config.json").read_text()
    )
    assert settings["r"] == 4


def published(tmp_path, steps, **settings):
    """Publish after each step; return the numbers of the adapters that are left, smallest first."""
    with ScriptedVllm({"/v1/load_lora_adapter": (200, "ok")}) as engine:
        config = lora_config(tmp_path, vllm_port=engine.port, **settings)
        model, _ = load_model_and_tokenizer(config)
        sync = LoraSwapSync(config)
        for step in steps:
            sync.publish(model, checkpoint=None, step=step)
        sync.close()
    return adapters_in(tmp_path / "saves")


def adapters_in(folder):
    return sorted(int(path.name.rpartition("_")[2]) for path in folder.glob("adapter_step_*"))


@pytest.mark.parametrize(("keep", "left"), [(1, [11]), (2, [10, 11]), (None, [0, 9, 10, 11])])
def test_swap_keeps_as_many_adapters_as_checkpoints(tmp_path, model_folder, keep, left):
    assert published(tmp_path, [0, 9, 10, 11], keep_checkpoints=keep) == left


def test_resumed_run_removes_its_earlier_adapters_and_no_other_does(tmp_path, model_folder):
    assert published(tmp_path, [7, 8], keep_checkpoints=2) == [7, 8]

    another = published(tmp_path, [1], keep_checkpoints=2)
    resumed = published(tmp_path, [2, 4], keep_checkpoints=2, resume=True)

    assert another == [1, 7, 8]
    assert resumed == [2, 4], "those after the checkpoint it goes on from are removed as well"


def test_adapter_the_engine_has_stays_where_it_refuses_the_next(tmp_path, model_folder):
    with ScriptedVllm({"/v1/load_lora_adapter": (200, "ok")}) as engine:
        config = lora_config(tmp_path, vllm_port=engine.port, keep_checkpoints=1)
        model, _ = load_model_and_tokenizer(config)
        sync = LoraSwapSync(config)
        sync.publish(model, checkpoint=None, step=1)
        engine.answers["/v1/load_lora_adapter"] = (500, "rank")

        with pytest.raises(InferenceError):
            sync.publish(model, checkpoint=None, step=2)
        sync.close()

    assert adapters_in(tmp_path / "saves") == [1, 2]


def test_swap_without_an_engine_is_refused(tmp_path, free_port):
    sync = LoraSwapSync(lora_config(tmp_path, vllm_port=free_port))
    with pytest.raises(InferenceError, match="lora_restart, which launches its own"):
        sync.check_before_load()
    sync.close()


def test_companion_server_is_asked_by_its_own_route(tmp_path, model_folder):
    routes = {"/v1/load_lora_adapter": (404, {}), "/lora/load": (422, {})}
    with ScriptedVllm(routes) as engine:
        config = lora_config(tmp_path, vllm_port=engine.port)
        model, _ = load_model_and_tokenizer(config)
        sync = LoraSwapSync(config)
        sync.check_before_load()
        engine.answers["/lora/load"] = (200, {})
        sync.publish(model, checkpoint=None, step=4)
        sync.close()

    assert engine.requests[-1][::2] == (
        "/lora/load",
        {
            "adapter_name": "training_adapter",
            "adapter_path": str(tmp_path / "saves" / "adapter_step_4"),
        },
    )


@pytest.mark.parametrize(("status", "is_refused"), [(404, True), (405, True), (400, False)])
def test_engine_without_the_route_is_refused_naming_the_remedy(tmp_path, status, is_refused):
    answers = {"/v1/load_lora_adapter": (status, {}), "/lora/load": (404, {})}
    with ScriptedVllm(answers) as engine:
        sync = LoraSwapSync(lora_config(tmp_path, vllm_port=engine.port))
        if is_refused:
            with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
                sync.check_before_load()
        else:
            sync.check_before_load()
        sync.close()


def test_adapter_the_engine_refuses_is_an_error(tmp_path, model_folder):
    with ScriptedVllm({"/v1/load_lora_adapter": (500, {"error": "rank"})}) as engine:
        config = lora_config(tmp_path, vllm_port=engine.port)
        model, _ = load_model_and_tokenizer(config)
        sync = LoraSwapSync(config)
        with pytest.raises(InferenceError, match="answered 500"):
            sync.publish(model, checkpoint=None, step=1)
        sync.close()
