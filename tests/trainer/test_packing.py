"""Sequences that share a row: balanced, isolated from each other, equal to padded ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from atroposlib.errors import ConfigError
from example_trainer.batch import (
    balanced_bins,
    build_batch,
    make_packed_microbatch,
    plan_microbatches,
)
from example_trainer.loss_choice import ALGORITHMS
from example_trainer.model import load_model_and_tokenizer, use_packed_attention
from example_trainer.policy import prepare_policy, probe, setup_line
from example_trainer.rows import RowRules, rows_from_group
from example_trainer.scoring import PACKED_ATTENTION, packing_arguments, register
from example_trainer.training import row_rules
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group, save_tiny_model, tiny_config, tiny_llama

pytestmark = pytest.mark.slow

lengths_lists = st.lists(st.integers(0, 500), min_size=1, max_size=40)


@given(lengths=lengths_lists, num_bins=st.integers(1, 12))
def test_bins_hold_every_sequence_once_and_are_balanced(lengths, num_bins):
    bins = balanced_bins(lengths, num_bins)

    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert len(bins) <= num_bins
    loads = [sum(lengths[i] for i in indices) for indices in bins]
    # Graham's bound of the greedy rule: the fullest was the emptiest before its last sequence.
    assert max(loads) <= sum(lengths) / num_bins + max(lengths)


@given(lengths=lengths_lists, num=st.integers(1, 12), limit=st.integers(1, 700))
def test_planned_microbatches_keep_the_limit_where_a_sequence_allows_it(lengths, num, limit):
    plan = plan_microbatches(lengths, num_microbatches=num, max_tokens=limit)

    assert sorted(index for indices in plan for index in indices) == list(range(len(lengths)))
    for indices in plan:
        assert len(indices) == 1 or sum(lengths[i] for i in indices) <= limit


def test_bins_of_a_heavy_tail_hold_about_the_same():
    lengths = [100, 7, 9, 30, 31, 29, 4, 96, 50, 44]

    loads = [sum(lengths[i] for i in indices) for indices in balanced_bins(lengths, 4)]

    assert sorted(loads) == [96, 100, 100, 104]


def test_no_bin_is_refused():
    with pytest.raises(ValueError, match="num_bins=0"):
        balanced_bins([1], 0)


def test_packed_microbatch_counts_positions_anew_for_each_sequence():
    given_group = group([[7, 8], [9]], [1.0, 0.0], logprob=-0.5, prompt=(1, 2))
    given_group["overrides"] = [{"temperature": 0.5}, {"sft": True}]
    rows = rows_from_group(given_group, RowRules(seq_len=64))

    packed = make_packed_microbatch(rows)

    assert packed.tokens_BT.tolist() == [[1, 2, 7, 1, 2]]
    assert packed.labels_BT.tolist() == [[-100, 7, 8, -100, 9]]
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.sequence_ids_BT.tolist() == [[0, 0, 0, 1, 1]]
    assert packed.sequence_lengths == (3, 2)
    assert packed.temperatures_BT.tolist() == [[0.5, 0.5, 0.5, 1.0, 1.0]]
    assert packed.is_sft_BT.tolist() == [[False, False, False, True, True]]


def architectures():
    """Small models of several makes: grouped heads, sliding windows, learned positions."""
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        MistralConfig,
        MistralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    small = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "use_cache": False,
    }
    return {
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**small)),
        "mistral": (MistralForCausalLM, MistralConfig(**small, sliding_window=3)),
        "gemma2": (Gemma2ForCausalLM, Gemma2Config(**small, sliding_window=3)),
        "gpt2": (
            GPT2LMHeadModel,
            GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, use_cache=False),
        ),
    }


def make_model(name, *, implementation):
    torch.manual_seed(0)
    kind, config = architectures()[name]
    model = kind(config).double().eval()
    register()
    model.set_attn_implementation(implementation)
    return model


def packed_logits(model, sequences):
    lengths = [len(sequence) for sequence in sequences]
    return (
        model(
            input_ids=torch.cat(sequences)[None],
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            **packing_arguments(lengths, device=torch.device("cpu")),
        )
        .logits[0]
        .split(lengths)
    )


@pytest.mark.parametrize("implementation", [PACKED_ATTENTION, "sdpa"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2"])
def test_changing_one_sequence_leaves_the_others_logits(name, implementation):
    model = make_model(name, implementation=implementation)
    sequences = [torch.randint(0, 32, (n,)) for n in (6, 9, 4)]
    changed = [sequences[0], torch.randint(0, 32, (9,)), sequences[2]]

    with torch.no_grad():
        before, after = packed_logits(model, sequences), packed_logits(model, changed)

    assert not torch.equal(before[1], after[1])
    assert torch.equal(before[0], after[0])
    torch.testing.assert_close(before[2], after[2], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2"])
def test_packed_sequences_have_the_logits_of_lone_ones_under_the_library_s_attention(name):
    packed = make_model(name, implementation=PACKED_ATTENTION)
    plain = make_model(name, implementation="sdpa")
    sequences = [torch.randint(0, 32, (n,)) for n in (6, 9, 4)]

    with torch.no_grad():
        found = packed_logits(packed, sequences)

        for sequence, logits in zip(sequences, found, strict=True):
            alone = plain(input_ids=sequence[None]).logits[0]
            torch.testing.assert_close(logits, alone, atol=1e-10, rtol=0)


def test_probe_finds_what_each_architecture_can_do():
    found = {
        name: probe(make_model(name, implementation=PACKED_ATTENTION), packing="auto")
        for name in architectures()
    }

    assert {name for name, can in found.items() if can.packs} == {"qwen3", "mistral", "gpt2"}
    assert {name for name, can in found.items() if can.whole_logits} == {"gemma2"}  # caps logits


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 16, "intermediate_size_mlp": 48,
}  # fmt: skip


def large_weights(kind, **settings):
    """A model of another make whose logits are of the size of trained ones."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SMALL | settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(std=0.3)
    return model


def logits_and_gradients(model, sequences, *, packs):
    parameters = [p for p in model.parameters() if p.requires_grad]
    if packs:
        found = packed_logits(model, sequences)
    else:
        found = [model(input_ids=sequence[None]).logits[0] for sequence in sequences]
    loss = sum(logits.log_softmax(-1)[:, 5].sum() for logits in found)
    return found, torch.autograd.grad(loss, parameters, allow_unused=True)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt_oss", {"sliding_window": 8}),  # sinks
        ("qwen3_moe", {}),  # experts, which round differently with other tokens in the row
    ],
)
def test_packed_rows_of_other_makes_have_the_logits_and_gradients_of_their_own_attention(
    kind, settings
):
    model = large_weights(kind, **settings)
    sequences = [torch.randint(3, 64, (n,)) for n in (30, 41, 9)]
    expected, expected_gradients = logits_and_gradients(model, sequences, packs=False)

    use_packed_attention(model, longest=64)
    can = probe(model, packing="auto")
    found, gradients = logits_and_gradients(model, sequences, packs=True)

    assert model.config._attn_implementation == PACKED_ATTENTION
    assert can.packs
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-3)
    for ours, own in zip(gradients, expected_gradients, strict=True):
        if own is not None:
            assert float((ours - own).norm()) <= 1e-3 * float(own.norm()) + 1e-6


def test_a_window_that_only_a_mask_knows_keeps_the_attention_of_the_model():
    """OLMoE's layers do not hand their window on; short sequences do not show it."""
    for longest, expected in ((64, "sdpa"), (16, PACKED_ATTENTION)):
        model = large_weights("olmoe", sliding_window=16)

        use_packed_attention(model, longest=longest)

        assert model.config._attn_implementation == expected


def test_chunks_of_attention_are_not_packed_since_their_borders_would_move():
    model = large_weights("llama4_text", attention_chunk_size=16, no_rope_layers=[1, 0])

    use_packed_attention(model, longest=64)
    can = probe(model, packing="auto")

    assert (can.packs, can.obstacle) == (
        False,
        "its attention has chunks, which would begin elsewhere",
    )


class Recurrent(torch.nn.Module):
    """A model whose state runs through a row, whatever stands in it."""

    def __init__(self):
        super().__init__()
        model = tiny_llama()
        self.config, self.device = model.config, model.device
        self.embedding = torch.nn.Embedding(32, 8)
        self.cells = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 32)

    def forward(self, input_ids, **_):
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=self.head(self.cells(self.embedding(input_ids))[0]))


def test_probe_refuses_to_pack_a_model_whose_state_crosses_sequences():
    can = probe(Recurrent(), packing="auto")

    assert (can.packs, can.whole_logits) == (False, True)
    assert can.obstacle == "its layers mix packed sequences"
    with pytest.raises(ConfigError, match="packing=on: its layers"):
        probe(Recurrent(), packing="on")


def test_loaded_model_keeps_its_attention_where_ours_would_change_it(tmp_path):
    kind, config = architectures()["gemma2"]
    kind(config).save_pretrained(tmp_path / "gemma2")
    save_tiny_model(tmp_path / "llama")
    for name, is_ours in (("llama", True), ("gemma2", False)):
        AutoTokenizer.from_pretrained(tmp_path / "llama").save_pretrained(tmp_path / name)
        settings = tiny_config(tmp_path, model_name=str(tmp_path / name))

        model, _ = load_model_and_tokenizer(settings)

        assert (model.config._attn_implementation == PACKED_ATTENTION) == is_ours
        model.save_pretrained(tmp_path / "again")
        assert PACKED_ATTENTION not in (tmp_path / "again" / "config.json").read_text()


def test_model_with_a_mask_of_its_own_is_not_packed_beyond_it():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    config = GPTNeoConfig(**sizes, attention_types=[[["global"], 2]], max_position_embeddings=16)

    can = probe(GPTNeoForCausalLM(config), packing="auto")

    assert not can.packs
    assert can.obstacle == "its attention has a mask for 16 tokens, which rows would exceed"


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_encoder_is_refused_because_later_tokens_change_its_logprobs(packing):
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "initializer_range": 0.5}
    encoder, decoder = (
        BertLMHeadModel(BertConfig(**sizes, **heads, is_decoder=is_decoder))
        for is_decoder in (False, True)
    )

    with pytest.raises(ConfigError, match=r"a model of type bert is not causal: later tokens"):
        probe(encoder, packing=packing)
    probe(decoder, packing=packing)


def test_probe_leaves_the_mode_of_the_model():
    model = tiny_llama().train()

    probe(model, packing="off")

    assert model.training


def mixed_groups():
    """Uneven lengths, demonstrations, temperatures, a teacher, reference logprobs."""
    groups = [
        group([[7, 8, 9], [4], [5] * 20], [1.0, 0.0, 0.4], logprob=-3.0),
        group([[5] * 70, [6, 6]], [0.2, 0.9], logprob=-3.5, prompt=(4, 5)),
    ]
    for number, one in enumerate(groups):
        one["overrides"] = [{} for _ in one["tokens"]]
        one["generation_params"] = {"temperature": 0.5 + number}
        one["ref_logprobs"] = [[-3.2] * len(tokens) for tokens in one["tokens"]]
        one["distill_token_ids"] = [[[3, 4]] * len(tokens) for tokens in one["tokens"]]
        one["distill_logprobs"] = [[[-0.5, -1.5]] * len(tokens) for tokens in one["tokens"]]
    groups[0]["overrides"][1] = {"sft": True}
    return groups


def loss_and_gradient(tmp_path, *, algorithm, whole_logits=False, **layout):
    """Return loss and gradients of one batch in double precision."""
    model = tiny_llama(dtype=torch.float64)
    trainer = make_trainer(
        tmp_path,
        model=model,
        algorithm=algorithm,
        kl_coef=0.1,
        distill_coef=0.2,
        entropy_coef=0.05,
        logprobs_mode="processed",
        max_grad_norm=1e9,
    )
    trainer._scorer._whole_logits = whole_logits
    batch = build_batch(mixed_groups(), row_rules(trainer.config), **layout)
    gradients = []

    def capture():
        gradients.extend(p.grad.clone() for p in model.parameters())

    trainer._optimizer.step = capture
    return trainer.train_on(batch)["train/loss"], gradients


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradient_of_a_batch_depend_on_no_layout(tmp_path, algorithm):
    value, gradient = loss_and_gradient(
        tmp_path, algorithm=algorithm, microbatch_size=5, whole_logits=True
    )
    layouts = [
        {"microbatch_size": 2, "pad_multiple": 7},
        {"microbatch_size": 5, "packs": True},
        {"microbatch_size": 2, "packs": True},
        {"microbatch_size": 2, "packs": True, "max_tokens": 30},
    ]
    for layout in layouts:
        other_value, other_gradient = loss_and_gradient(tmp_path, algorithm=algorithm, **layout)

        assert other_value == pytest.approx(value, abs=1e-10)
        for one, other in zip(gradient, other_gradient, strict=True):
            torch.testing.assert_close(other, one, atol=1e-10, rtol=0)


def test_packing_leaves_no_padding_and_is_what_a_run_does(tmp_path):
    packed = make_trainer(tmp_path, groups=mixed_groups()[:1], unsupported_fields="ignore")
    padded = make_trainer(
        tmp_path, groups=mixed_groups()[:1], unsupported_fields="ignore", packing="off"
    )

    batches = [t._build(t._feed.next_batch(0)) for t in (packed, padded)]

    assert [batch.summary.padding_fraction for batch in batches] == [0.0, pytest.approx(0.83, 0.1)]
    assert [len(batch.microbatches) for batch in batches] == [2, 2]


def test_mixed_training_runs_the_model_in_bfloat16_and_learns_in_float32(tmp_path):
    whole = make_trainer(tmp_path, training_steps=1)
    mixed = make_trainer(tmp_path, training_steps=1, train_dtype="mixed")
    leased = whole._feed.next_batch(0)

    norms = [t.train_on(t._build(leased))["train/grad_norm"] for t in (whole, mixed)]

    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert norms[1] != norms[0]
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("packs", "settings", "num_passes"),
    [
        # 16 sequences of 512 tokens, 511 of them inputs: 8,176 tokens.
        (True, {"max_tokens": 8192}, 1),
        (True, {"max_tokens": 8175}, 2),
        (True, {"max_tokens": 4096}, 2),
        (True, {"max_tokens": 8192, "num_ranks": 4}, 4),
        (True, {"max_tokens": 2048, "num_ranks": 3}, 6),
        (True, {}, 8),
        (False, {"max_tokens": 8192}, 1),
        (False, {"max_tokens": 4096}, 2),
        (False, {"max_tokens": 100}, 16),
        (False, {"max_tokens": 8192, "num_ranks": 4}, 4),
        (False, {}, 8),
    ],
)
def test_token_limit_alone_decides_the_number_of_passes(packs, settings, num_passes):
    given = group([[7] * 510] * 16, [1.0, 0.0] * 8, prompt=(1, 2))

    batch = build_batch([given], RowRules(seq_len=512), microbatch_size=2, packs=packs, **settings)

    assert len(batch.microbatches) == num_passes
    assert sum(int((mb.labels_BT >= 0).sum()) for mb in batch.microbatches) == 510 * 16


class BfloatOnly(torch.nn.Module):
    """Stands for a kernel that takes bfloat16 only, as flash-attn's do."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("this attention only supports float16 and bfloat16")
        return self.attention(*args, **kwargs)


def test_probe_under_autocast_packs_a_model_that_takes_bfloat16_only(tmp_path):
    model = tiny_llama()
    use_packed_attention(model)
    for layer in model.model.layers:
        layer.self_attn = BfloatOnly(layer.self_attn)
    config = tiny_config(tmp_path, train_dtype="mixed")

    policy = prepare_policy(model, config)

    assert policy.packs
    assert policy.layout == "sequences packed, equal prefixes computed once"


def test_setup_is_one_line_with_the_reasons_of_fallbacks(tmp_path):
    config = tiny_config(tmp_path, optimizer="adamw_8bit", packing="off")
    model = tiny_llama()

    line = setup_line(model, config, prepare_policy(model, config))

    assert line == (
        "setup on cpu: float32 trained weights, float32 forward passes (--train-dtype auto); "
        "attention sdpa (flash-attn needs a GPU); sequences padded (--packing off); "
        "optimizer AdamW (not adamw_8bit: it needs a GPU)"
    )


def test_setup_says_why_a_model_is_not_packed(tmp_path):
    policy = prepare_policy(Recurrent(), tiny_config(tmp_path))

    assert policy.layout == (
        "sequences padded (its layers mix packed sequences), whole logits (the model's head is not "
        "a linear layer)"
    )
