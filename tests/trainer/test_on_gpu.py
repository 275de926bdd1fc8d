"""The trainer and the torch engine on a GPU: `pytest --run-gpu tests/trainer/test_on_gpu.py`."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from example_trainer.batch import build_batch
from example_trainer.checkpointing import load_training_state, save_checkpoint
from example_trainer.engine import EngineControl
from example_trainer.model import (
    checkpoint_activations,
    create_optimizer,
    use_packed_attention,
)
from example_trainer.policy import prepare_policy
from example_trainer.prefix_tree import build_prefix_tree
from example_trainer.training import row_rules
from example_trainer.tree_attention import ancestor_mask, tree_attention
from example_trainer.weight_sync import export_for_engine
from tests.end_to_end.conftest import save_spread_out_model
from tests.trainer.test_prefix_tree import PADDED, TREES, WHOLE_TREE, groups_of_a_batch, tokens_of
from tests.trainer.test_training import PREFERRED, make_trainer
from tests.trainer.tiny import VOCAB, SavedTokenizer
from tests.trainer.torch_engine.conftest import serve_locally

# The compiler causes warnings, which would be errors here.
pytestmark = [pytest.mark.slow, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NEAR = 0.03
"""Rounding of bfloat16, relative to the norm of a gradient; a wrong layout gives 0.1 to 1."""


LOSS = {"distill_coef": 0.2, "kl_coef": 0.1}
"""Settings for all fields of the groups."""


def small_qwen3(*, dtype=torch.float32):
    """A model on the GPU with heads of 32 entries; FlexAttention needs 16 or more."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to("cuda", dtype).train()
    use_packed_attention(model)
    return model


def trainer_on_gpu(tmp_path, *, model=None, **settings):
    trainer = make_trainer(tmp_path, model=model or small_qwen3(), device="cuda", **settings)
    policy = prepare_policy(trainer.model, trainer.config)
    return make_trainer(
        tmp_path, model=trainer.model, policy=policy, device="cuda", **settings
    ), policy


def branching_tree():
    """A tree of several blocks of FlexAttention, with branches within branches."""
    prompt, turn = tokens_of(0, 300), tokens_of(1, 150)
    ends = [tokens_of(seed, 20 + 40 * seed) for seed in range(2, 8)]
    return build_prefix_tree(
        [[*prompt, *turn, *ends[0]], [*prompt, *turn, *ends[1]]]
        + [[*prompt, *end] for end in ends[2:]]
        + [tokens_of(9, 130)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_tree_equals_the_one_of_the_cpu(dtype):
    tree = branching_tree()
    torch.manual_seed(0)
    shapes = [(1, heads, tree.num_tokens, 32) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, requires_grad=True, dtype=torch.float64) for shape in shapes]
    on_gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs]
    slope = torch.randn(1, tree.num_tokens, 4, 32, dtype=torch.float64)

    mask = ancestor_mask(tree.subtree_ends_M.cuda())
    found = tree_attention(*on_gpu, tree, mask)
    expected = tree_attention(*inputs, tree)

    gradients = torch.autograd.grad((found * slope.to("cuda", dtype)).sum(), on_gpu)
    wanted = torch.autograd.grad((expected * slope).sum(), inputs)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip((found, *gradients), (expected, *wanted), strict=True):
        gap = (one.detach().double().cpu() - other.detach()).norm() / other.detach().norm()
        assert float(gap) < near


def first_gradient(tmp_path, layout, *, dtype, **settings):
    """Return the gradient of one batch as one vector, on the CPU."""
    model = small_qwen3(dtype=dtype)
    if settings.get("gradient_checkpointing"):
        checkpoint_activations(model)
    trainer, _ = trainer_on_gpu(
        tmp_path, model=model, max_grad_norm=1e9, seq_len=60,
        shared_prefixes="on", **LOSS, **settings,
    )  # fmt: skip
    batch = build_batch(groups_of_a_batch(), row_rules(trainer.config), **layout)
    gradients = []

    def capture():
        parts = [p.grad.float().flatten().cpu() for p in trainer.model.parameters()]
        gradients.append(torch.cat(parts))

    trainer._optimizer.step = capture
    trainer.train_on(batch)
    return gradients[0]


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("torch_compile", ["on", "off"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_gradient_of_a_tree_equals_the_padded_one(tmp_path, algorithm, torch_compile, recomputes):
    settings = {"dtype": torch.float32, "train_dtype": "mixed", "algorithm": algorithm}
    expected = first_gradient(tmp_path, PADDED, torch_compile="off", **settings)

    settings |= {"torch_compile": torch_compile, "gradient_checkpointing": recomputes}
    for layout in (WHOLE_TREE, TREES, {"microbatch_size": 20, "packs": True}):
        found = first_gradient(tmp_path, layout, **settings)

        assert float((found - expected).norm() / expected.norm()) < NEAR


def test_default_settings_pack_and_share_on_a_gpu(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer, policy = trainer_on_gpu(tmp_path, seq_len=512)

    assert policy.packs
    assert policy.min_shared_fraction is not None, caplog.text
    assert "compiled layers" in policy.layout, caplog.text
    assert trainer.config.resolved_train_dtype == "mixed"


@pytest.mark.parametrize("shared_prefixes", ["on", "off"])
def test_a_run_raises_the_preferred_token(tmp_path, shared_prefixes):
    trainer, _ = trainer_on_gpu(tmp_path, training_steps=8, shared_prefixes=shared_prefixes)
    prompt = torch.tensor([[1, 2, 3]], device="cuda")

    def probability():
        with torch.no_grad():
            return trainer.model(input_ids=prompt).logits[0, -1].softmax(-1)[PREFERRED].item()

    before = probability()
    trainer.run()

    assert probability() > 2 * before


@pytest.mark.parametrize(
    ("optimizer", "train_dtype"),
    [("adamw", "mixed"), ("adamw", "bfloat16"), ("adafactor", "mixed"), ("adamw_8bit", "mixed")],
)
def test_optimizers_resume_on_a_gpu(tmp_path, optimizer, train_dtype):
    loaded = torch.bfloat16 if train_dtype == "bfloat16" else torch.float32
    settings = {
        "optimizer": optimizer, "train_dtype": train_dtype, "lr": 1e-3, "seq_len": 60, **LOSS
    }  # fmt: skip

    def steps(trainer, count):
        for _ in range(count):
            batch = build_batch(groups_of_a_batch(), row_rules(trainer.config), **PADDED)
            metrics = trainer.train_on(batch)
            assert not metrics["train/skipped_steps"]

    trainer, _ = trainer_on_gpu(tmp_path, model=small_qwen3(dtype=loaded), **settings)
    start = copy.deepcopy(trainer.model.state_dict())
    steps(trainer, 2)
    path = save_checkpoint(
        trainer.model, SavedTokenizer(), tmp_path / "kept", 2, optimizer=trainer._optimizer
    )
    steps(trainer, 2)

    model = Qwen3ForCausalLM.from_pretrained(path, dtype=loaded).to("cuda").train()
    resumed, _ = trainer_on_gpu(tmp_path, model=model, **settings)
    resumed._optimizer = create_optimizer(model, resumed.config)
    assert load_training_state(path, resumed._optimizer) == 2
    steps(resumed, 2)

    ends = [[p.detach().float() for p in t.model.parameters()] for t in (trainer, resumed)]
    begins = [start[name].float() for name, _ in trainer.model.named_parameters()]
    moved = sum(float((a - b).norm() ** 2) for a, b in zip(ends[0], begins, strict=True)) ** 0.5
    apart = sum(float((a - b).norm() ** 2) for a, b in zip(*ends, strict=True)) ** 0.5
    # Kernels of the backward pass add in any order.
    assert apart < 0.05 * moved


def test_engine_serves_the_weights_of_a_trainer(tmp_path):
    from transformers import AutoModelForCausalLM

    save_spread_out_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").to("cuda").eval()

    def worst_gap(choice):
        prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0].double()
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu()
        return float((chosen - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max())

    with serve_locally(tmp_path / "model", device="cuda", dtype="float32") as local:
        options = {"n": 4, "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
        before = local.complete([9, 30, 31, *range(40, 90)], **options)["choices"]
        assert max(map(worst_gap, before)) < 1e-3
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.8)
        assert max(map(worst_gap, before)) > 0.1
        control = EngineControl(local.url)
        control.reload_weights(
            export_for_engine(model, tmp_path / "weights"), pause_mode="keep", version=3
        )
        control.close()
        after = local.complete([9, 30, 31, *range(40, 90)], **options)["choices"]

    assert max(map(worst_gap, after)) < 1e-3
    assert {span["version"] for choice in after for span in choice["weight_versions"]} == {"3"}
