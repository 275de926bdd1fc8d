"""The merged model of a run that trains adapters: weights, files, what engines get."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from atroposlib.errors import ConfigError
from example_trainer.launch import check_trainer
from example_trainer.lora import add_adapters, is_adapter
from example_trainer.merging import MergedModel, MergingSync, merged_weights, with_merged_adapters
from example_trainer.parallel import GatheredModel, gather_weights
from example_trainer.weight_sync import export_for_engine
from example_trainer.weights.training_sync import stage_weights
from tests.trainer.test_training import PREFERRED, REJECTED, make_trainer
from tests.trainer.tiny import SavedTokenizer, group, save_tiny_model, tiny_config, tiny_llama

pytestmark = pytest.mark.slow

TOKENS = torch.tensor([[1, 2, 3, 4, 5]])
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    )


def tiny_qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
        )
    )


def tied_llama() -> Any:
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


MODELS = {
    "llama": (tiny_llama, ALL_LINEAR),
    "tied": (tied_llama, ["q_proj"]),
    "gpt2": (tiny_gpt2, ["c_attn", "c_proj"]),
    "experts": (tiny_qwen3_moe, ["q_proj", "v_proj"]),
}


def with_moved_adapters(model: Any, tmp_path: Path, modules: list[str]) -> Any:
    """Add adapters that change what the model computes."""
    add_adapters(model, tiny_config(tmp_path, lora=True, lora_r=4, lora_target_modules=modules))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    return model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft, of GPT-2
@pytest.mark.parametrize("writer", ["save", "export", "publish"])
@pytest.mark.parametrize("kind", MODELS)
def test_written_model_computes_the_same_without_adapters(kind, writer, tmp_path):
    make, modules = MODELS[kind]
    plain = make()
    model = with_moved_adapters(copy.deepcopy(plain), tmp_path, modules)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged, folder = MergedModel(model), tmp_path / "merged"

    if writer == "save":
        merged.save_pretrained(folder)
    elif writer == "export":
        export_for_engine(merged, folder)
    else:
        stage_weights(merged, folder, dtype="float32", unties=True)

    again = loaded(folder)
    assert torch.allclose(logits(again), logits(model), atol=1e-5)
    assert not torch.allclose(logits(again), logits(plain), atol=1e-2)
    assert not is_adapter(folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_have_the_names_of_the_model_without_adapters(tmp_path):
    plain = tiny_llama(dtype=torch.bfloat16)
    model = with_moved_adapters(copy.deepcopy(plain), tmp_path, ALL_LINEAR)

    weights = merged_weights(model)

    assert {n: (v.dtype, v.shape) for n, v in weights.items()} == {
        n: (v.dtype, v.shape) for n, v in plain.state_dict().items()
    }
    embedding = "model.embed_tokens.weight"
    assert weights[embedding].data_ptr() == model.state_dict()[embedding].data_ptr()


def test_gathered_weights_of_a_sharded_model_are_merged_alike(tmp_path):
    model = with_moved_adapters(tiny_llama(), tmp_path, ALL_LINEAR)

    merged = MergedModel(GatheredModel(model, gather_weights(model, keep=True)))

    expected = merged_weights(model)
    assert all(torch.equal(v, expected[n]) for n, v in merged.state_dict().items())


def test_layer_that_is_not_linear_is_refused(tmp_path):
    model = with_moved_adapters(tiny_llama(), tmp_path, ["embed_tokens"])

    with pytest.raises(ConfigError, match=r"adapter of model\.embed_tokens cannot be merged"):
        merged_weights(model)


class RecordingInner:
    """The engine's side of a weight sync: keeps what it is given."""

    mode = "in_place"
    publishes_final = True

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.published: list[tuple[Path | None, int]] = []
        self.logits: list[torch.Tensor] = []

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        self.started.append((source, step))
        if Path(source).is_dir():
            self.logits.append(logits(loaded(Path(source))))

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        self.published.append((checkpoint, step))

    def close(self) -> None:
        pass


def test_engine_of_a_resumed_run_starts_with_the_merged_model(tmp_path):
    config = tiny_config(tmp_path, lora=True)
    model = with_moved_adapters(tiny_llama(), tmp_path, ["q_proj"])
    checkpoint = tmp_path / "saves" / "step_3"
    model.save_pretrained(checkpoint)
    inner = RecordingInner()
    sync = with_merged_adapters(config, inner)

    sync.start(model, SavedTokenizer(), source=str(checkpoint), step=3)
    sync.publish(model, checkpoint=tmp_path / "saves" / "step_4", step=4)
    sync.close()

    [(source, step)] = inner.started
    assert step == 3
    assert source != str(checkpoint)
    assert torch.allclose(inner.logits[0], logits(model), atol=1e-5)
    assert inner.published == [(None, 4)], "a checkpoint has the adapters alone"
    assert not Path(source).exists()


def test_engine_of_a_new_run_starts_with_its_model(tmp_path):
    inner = RecordingInner()
    sync = MergingSync(tiny_config(tmp_path, lora=True), inner)

    sync.start(
        with_moved_adapters(tiny_llama(), tmp_path, ["q_proj"]), SavedTokenizer(), source="tiny"
    )

    assert inner.started == [("tiny", 0)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_bridge_mode": "lora_only"}, {"lora": True, "weight_bridge_mode": "lora_restart"}],
)
def test_other_runs_give_the_engine_what_they_did(tmp_path, settings):
    inner = RecordingInner()

    assert with_merged_adapters(tiny_config(tmp_path, **settings), inner) is inner
    assert with_merged_adapters(tiny_config(tmp_path, lora=True), None) is None


def test_run_writes_the_adapters_and_the_merged_model(tmp_path):
    config = tiny_config(tmp_path, lora=True, model_name=str(save_tiny_model(tmp_path / "model")))
    model = tiny_llama()
    add_adapters(model, config)
    trainer = make_trainer(
        tmp_path,
        model=model,
        lora=True,
        groups=[group([[PREFERRED], [REJECTED]] * 2, [1.0, 0.0] * 2)],
        checkpoint_interval=2,
    )

    final = trainer.run()

    assert final == tmp_path / "saves" / "final_model"
    assert is_adapter(tmp_path / "saves" / "final_adapter")
    assert is_adapter(tmp_path / "saves" / "step_2")
    assert torch.allclose(logits(loaded(final)), logits(model), atol=1e-5)
    assert (final / "tokenizer_config.json").is_file()


def test_published_weights_and_the_torch_engine_need_a_merged_model(tmp_path):
    for settings in ({"publish_weights": "store"}, {"engine": "torch"}):
        assert tiny_config(tmp_path, lora=True, **settings).merges_adapters
        with pytest.raises(ValidationError, match="use lora with"):
            tiny_config(tmp_path, weight_bridge_mode="lora_restart", **settings)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not a valid JSON file"),
        ('{"model_type": "nonesuch"}', "nonesuch"),
        ('{"model_type": "vit"}', "Unrecognized configuration class"),  # it reads no text
    ],
)
def test_check_of_adapters_names_a_model_that_cannot_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(SystemExit) as end:
        check_trainer.main(["--model-name", str(tmp_path), "--training-steps", "1", "--lora"])

    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2
    assert last.startswith(f"atropos-grpo: model '{tmp_path}' cannot be loaded: ")
    assert reason in last
