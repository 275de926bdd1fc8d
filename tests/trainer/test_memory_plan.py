"""Memory of a step by sizes worked out by hand, and what is advised when it will not fit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from example_trainer.memory_plan import GIB, ModelSizes, StepSetup, advice, plan_memory
from example_trainer.model import create_optimizer
from example_trainer.policy import sizes_of, step_setup
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import tiny_config, tiny_llama

MODEL = ModelSizes(
    num_parameters=1000,
    num_trained=1000,
    num_outside_blocks=200,
    num_layers=4,
    hidden=8,
    intermediate=16,
    vocabulary=100,
    weight_bytes=2,
)
SETUP = StepSetup(
    pass_tokens=10,
    chunk_tokens=5,
    activation_bytes=2,
    optimizer="adamw",
    gradient_checkpointing=False,
)


def test_parts_of_a_whole_model_are_those_worked_out_by_hand():
    plan = plan_memory(MODEL, SETUP)

    assert plan.weights == 2000
    assert plan.gradients == 2000
    assert plan.optimizer == 4000  # two states of the parameters' type
    assert plan.gathered == 0
    assert plan.activations == 10 * 4 * (10 * 8 + 4 * 16) * 2
    assert plan.logits == 3 * 4 * 5 * 100 + 4 * 100 * 8
    assert plan.total == sum(plan)


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer():
    plan = plan_memory(MODEL, SETUP._replace(gradient_checkpointing=True))

    assert plan.activations == 10 * (4 * 8 + (10 * 8 + 4 * 16)) * 2


def test_sharding_divides_what_is_kept_and_gathers_two_blocks():
    plan = plan_memory(MODEL, SETUP._replace(shards=4))

    assert (plan.weights, plan.gradients, plan.optimizer) == (500, 500, 1000)
    assert plan.gathered == (200 + 2 * 800 / 4) * 2  # outside the blocks 200, a block 200


def test_frozen_parameters_have_no_gradient_and_no_state():
    plan = plan_memory(MODEL._replace(num_trained=100), SETUP._replace(optimizer="adamw_8bit"))

    assert (plan.weights, plan.gradients, plan.optimizer) == (2000, 200, 200)


def test_chunk_is_no_longer_than_the_pass():
    assert plan_memory(MODEL, SETUP._replace(chunk_tokens=99)).logits == 3 * 4 * 10 * 100 + 3200


def test_step_that_fits_needs_no_advice():
    assert advice(MODEL, SETUP, plan_memory(MODEL, SETUP).total) == []


LARGE = ModelSizes(8_000_000_000, 8_000_000_000, 10**9, 32, 4096, 14336, 128_256, 2)
LARGE_SETUP = StepSetup(2 * 8192, 512, 2, "adamw", False)


def test_advice_names_what_saves_most_easily_first_and_what_would_fit():
    lines = advice(LARGE, LARGE_SETUP, 120 * GIB)

    assert "a step needs about" in lines[0]
    assert "120.0 GiB are available" in lines[0]
    assert lines[1].startswith("--gradient-checkpointing saves")
    assert any(line.startswith("--optimizer adafactor saves") for line in lines)
    assert any("ranks with --parallel-mode fsdp fit" in line for line in lines)
    assert any("--lora " in line for line in lines)


def test_advised_tokens_and_ranks_do_fit():
    setup = LARGE_SETUP._replace(gradient_checkpointing=True, optimizer="adamw_8bit")
    room = plan_memory(LARGE, setup._replace(pass_tokens=5000)).total
    tokens = next(line for line in advice(LARGE, setup, room) if "forward passes" in line)
    assert "at most 5000 tokens" in tokens

    ranks = next(line for line in advice(LARGE, LARGE_SETUP, 120 * GIB) if "ranks" in line)
    count = int(ranks.split()[0])
    assert plan_memory(LARGE, LARGE_SETUP._replace(shards=count)).total <= 120 * GIB
    assert plan_memory(LARGE, LARGE_SETUP._replace(shards=count // 2)).total > 120 * GIB


def test_nothing_is_advised_that_is_on_already():
    setup = LARGE_SETUP._replace(gradient_checkpointing=True, optimizer="adafactor")

    lines = advice(LARGE._replace(num_trained=10**6), setup, 10 * GIB)

    assert not any(line.startswith("--") for line in lines)


def _llama(heads: tuple[int, int]) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **_attention(heads))).train()


def _qwen3(heads: tuple[int, int]) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **_attention(heads), head_dim=64)).train()


def _attention(heads: tuple[int, int]) -> dict[str, int]:
    return {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}


SHAPE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3
}  # fmt: skip


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize(
    ("build", "heads", "tokens"),
    [(_llama, (4, 2), 256), (_llama, (4, 4), 512), (_qwen3, (4, 2), 256), (_qwen3, (2, 2), 300)],
)
def test_activations_are_about_what_autograd_keeps(build, heads, tokens, autocasts):
    model = build(heads)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        # Casts of weights are a part of their own in the plan.
        if storage.data_ptr() not in weights and tokens in tensor.shape:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts),
    ):
        hidden = model.base_model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    measured = sum(num_bytes for num_bytes, _ in kept.values())

    setup = SETUP._replace(pass_tokens=tokens, activation_bytes=2 if autocasts else 4)
    planned = plan_memory(sizes_of(model), setup).activations
    assert hidden.last_hidden_state.requires_grad
    assert planned == pytest.approx(measured, rel=0.15)


def test_compiled_layers_keep_less():
    plan, compiled = (plan_memory(MODEL, SETUP._replace(is_compiled=c)) for c in (False, True))

    assert compiled.activations == pytest.approx(0.7 * plan.activations)
    assert compiled.logits < plan.logits


PEAKS_ON_A_GPU = [  # benchmarks/results/trainer_h200.json: kind, passes of 16,384 tokens, GiB
    (Qwen3ForCausalLM, False, False, 48.5),
    (Qwen3ForCausalLM, True, False, 34.1),
    (Qwen2ForCausalLM, False, False, 76.1),
    (Qwen2ForCausalLM, True, False, 61.5),
    (Qwen2ForCausalLM, False, True, 29.4),
]


@pytest.mark.parametrize(("kind", "is_compiled", "recomputes", "peak"), PEAKS_ON_A_GPU)
def test_plan_is_near_the_peaks_measured_on_a_gpu(kind, is_compiled, recomputes, peak):
    shape = {
        "vocab_size": 151_936, "num_hidden_layers": 28, "tie_word_embeddings": True,
        "hidden_size": 1536, "intermediate_size": 8960,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    }  # fmt: skip
    if kind is Qwen3ForCausalLM:
        shape |= {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
        shape |= {"num_attention_heads": 16, "num_key_value_heads": 8}
    with torch.device("meta"):
        sizes = sizes_of(kind(kind.config_class(**shape)))
    setup = SETUP._replace(
        pass_tokens=16_384,
        chunk_tokens=1766 if is_compiled else 441,
        gradient_checkpointing=recomputes,
        is_compiled=is_compiled,
    )

    assert plan_memory(sizes, setup).total / GIB == pytest.approx(peak, rel=0.1)


def test_sizes_are_read_from_the_model():
    model = tiny_llama()

    sizes = sizes_of(model)

    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    # embedding and output layer 32 x 16 each, the last norm 16
    assert sizes.num_outside_blocks == 2 * 32 * 16 + 16
    assert sizes[3:] == (2, 16, 32, 32, 4, 4, 16, 0)


@pytest.mark.parametrize(
    ("kind", "settings", "intermediate", "query_width"),
    [
        ("gemma4_text", {"global_head_dim": 16, "intermediate_size": 32}, 32, 4 * 16),
        ("gemma3n_text", {"intermediate_size": [32, 64, 32, 32], "laurel_rank": 4}, 64, 4 * 8),
    ],
)
def test_model_whose_blocks_differ_is_trained_with_the_sizes_of_the_largest(
    tmp_path, kind, settings, intermediate, query_width
):
    config = CONFIG_MAPPING[kind](
        vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=32,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=0, **settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

    make_trainer(tmp_path, model=model, training_steps=1).run()

    sizes = sizes_of(model)
    assert (sizes.intermediate, sizes.query_width) == (intermediate, query_width)


@pytest.mark.parametrize(
    ("settings", "packs", "tokens"),
    [
        ({"batch_size": 2, "seq_len": 65, "pad_multiple": 64}, False, 128),
        ({"batch_size": 2, "seq_len": 65, "pad_multiple": 64, "microbatch_tokens": 70}, True, 70),
        ({"batch_size": 2, "seq_len": 65, "pad_multiple": 64, "microbatch_tokens": 70}, False, 70),
    ],
)
def test_largest_pass_follows_the_settings(tmp_path, settings, packs, tokens):
    config = tiny_config(tmp_path, **settings)
    model = tiny_llama()

    setup = step_setup(
        config, sizes_of(model), optimizer=create_optimizer(model, config), packs=packs
    )

    assert setup.pass_tokens == tokens
    assert setup.optimizer == "adamw"


def test_shapes_and_memory_are_logged_once_before_the_first_step(tmp_path, caplog):
    trainer = make_trainer(tmp_path, training_steps=2)
    caplog.set_level(logging.INFO, logger="example_trainer")

    trainer.run()

    told = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("first batch:") for line in told) == 1
    assert sum("memory of a step" in line for line in told) == 1
    first_step = next(n for n, line in enumerate(told) if line.startswith("step 1/2"))
    assert "(B, T, D) = " in " ".join(told[:first_step])
