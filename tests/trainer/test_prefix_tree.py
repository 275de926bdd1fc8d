"""Prefix trees: every sequence once, and the losses and gradients of single sequences."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from atroposlib.errors import ConfigError
from example_trainer.batch import build_batch, make_packed_microbatch, split_batch
from example_trainer.loss_choice import ALGORITHMS, CORRECTIONS
from example_trainer.model import checkpoint_activations, use_packed_attention
from example_trainer.policy import obstacle_to_sharing, prepare_policy
from example_trainer.prefix_tree import build_prefix_tree, in_tree_order, num_tree_tokens
from example_trainer.rows import Row, RowRules
from example_trainer.scoring import PolicyScorer
from example_trainer.training import row_rules
from example_trainer.tree_attention import ancestor_mask, flex_tree_attention, tree_attention
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import VOCAB, group, tiny_config, tiny_llama

pytestmark = pytest.mark.slow

sequence_lists = st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=8).filter(
    any
)  # two token ids, so that prefixes are often shared


def ancestors_MM(tree, sequences):
    """Return which tokens of the row precede or are which, from the sequences alone."""
    matrix = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.bool)
    for nodes in tree.nodes_T.split([len(sequence) for sequence in sequences]):
        for place, node in enumerate(nodes):
            matrix[node, nodes[: place + 1]] = True
    return matrix


limits = st.fixed_dictionaries({"min_shared": st.integers(1, 5), "max_small": st.integers(0, 30)})


@given(sequences=sequence_lists, limits=limits)
def test_tree_holds_every_sequence_at_its_positions(sequences, limits):
    tree = build_prefix_tree(sequences, **limits)

    flat = list(itertools.chain.from_iterable(sequences))
    assert tree.tokens_1M[0, tree.nodes_T].tolist() == flat
    positions = [position for sequence in sequences for position in range(len(sequence))]
    assert tree.position_ids_1M[0, tree.nodes_T].tolist() == positions
    assert tree.num_tokens == num_tree_tokens(sequences, **limits)
    assert set(tree.nodes_T.tolist()) == set(range(tree.num_tokens))


@given(sequences=sequence_lists)
def test_tree_has_one_token_for_each_different_prefix(sequences):
    prefixes = {tuple(s[:end]) for s in sequences for end in range(1, len(s) + 1)}

    assert num_tree_tokens(sequences, min_shared=1) == len(prefixes)


@given(sequences=sequence_lists, limits=limits)
def test_intervals_and_blocks_hold_each_ancestor_once(sequences, limits):
    tree = build_prefix_tree(sequences, **limits)
    expected = ancestors_MM(tree, sequences)

    row = torch.arange(tree.num_tokens)
    interval = (row[None] <= row[:, None]) & (row[:, None] < tree.subtree_ends_M[None])
    covered = torch.zeros(expected.shape, dtype=torch.int64)
    for queries, keys, is_causal, mask in tree.blocks:
        pairs = row[keys][None] <= row[queries][:, None] if is_causal else torch.tensor(True)
        covered[queries, keys] += pairs if mask is None else mask

    assert torch.equal(interval, expected)
    assert torch.equal(covered, expected.long())


@given(sequences=sequence_lists)
def test_order_of_a_tree_keeps_common_prefixes_together(sequences):
    order = in_tree_order(sequences)

    assert sorted(order) == list(range(len(sequences)))
    assert [sequences[i] for i in order] == sorted(sequences)


def test_short_common_parts_are_computed_for_each_sequence():
    prompt = list(range(20))
    sequences = [[*prompt, 1, 2, 3], [*prompt, 1, 4], [*prompt, 5]]

    assert num_tree_tokens(sequences, min_shared=1, max_small=0) == 20 + 3 + 1 + 1
    assert num_tree_tokens(sequences, min_shared=2, max_small=0) == 20 + 3 + 2 + 1
    assert num_tree_tokens(sequences, min_shared=22, max_small=0) == 23 + 22 + 21


def test_small_subtree_shares_any_common_part_and_is_one_block():
    prompt = list(range(40))
    sequences = [[*prompt, 1, 2, 3], [*prompt, 1, 4], [*prompt, 5]]

    tree = build_prefix_tree(sequences, min_shared=16, max_small=8)

    assert tree.num_tokens == 40 + 3 + 1 + 1
    ranges = [(*(each[:2]), each.mask_LL is not None) for each in tree.blocks]
    small = slice(37, 45)  # the last 3 tokens of the prompt and all that follow
    assert ranges == [
        (slice(0, 37), slice(0, 37), False),
        (small, small, True),
        (small, slice(0, 37), False),
    ]


def test_group_takes_its_prompt_once():
    prompt, group_size, completion = list(range(30)), 8, 40

    sequences = [[*prompt, *[100 + i] * completion] for i in range(group_size)]

    assert build_prefix_tree(sequences).num_tokens == 30 + 8 * 40


def random_heads(tree, *, requires_grad=True):
    shapes = [(1, heads, tree.num_tokens, 8) for heads in (4, 2, 2)]
    torch.manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, requires_grad=requires_grad) for s in shapes]


def dense_attention(query, key, value, mask):
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


@given(sequences=sequence_lists, limits=limits)
def test_attention_by_blocks_equals_a_dense_mask(sequences, limits):
    tree = build_prefix_tree(sequences, **limits)
    inputs = random_heads(tree)

    found = tree_attention(*inputs, tree)

    expected = dense_attention(*inputs, ancestors_MM(tree, sequences))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    slope = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * slope).sum(), inputs) for out in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_attention_in_bfloat16_is_near_to_float32():
    tree = build_prefix_tree([[1] * 20 + [2] * 9, [1] * 20 + [3] * 9, [4] * 5])
    inputs = [x.detach().bfloat16().requires_grad_() for x in random_heads(tree)]
    wide = [x.detach().float().requires_grad_() for x in inputs]

    outputs = [tree_attention(*x, tree) for x in (inputs, wide)]
    for out in outputs:
        out.float().square().sum().backward()

    assert outputs[0].dtype == inputs[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(outputs[0].float(), outputs[1], atol=0.02, rtol=0.02)
    for one, other in zip(inputs, wide, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, atol=0.1, rtol=0.05)


@given(sequences=sequence_lists, block_size=st.integers(1, 9))
def test_blocks_of_the_mask_on_a_gpu_leave_out_no_pair(sequences, block_size):
    tree = build_prefix_tree(sequences, min_shared=1)
    expected = ancestors_MM(tree, sequences)

    mask = ancestor_mask(tree.subtree_ends_M, block_size=block_size)

    row = torch.arange(tree.num_tokens)
    mask_mod = mask.mask_mod(torch.tensor(0), torch.tensor(0), row[:, None], row[None])
    assert torch.equal(mask_mod, expected)
    for number, queries in enumerate(row.split(block_size)):
        kinds = (
            (mask.full_kv_num_blocks, mask.full_kv_indices, True),
            (mask.kv_num_blocks, mask.kv_indices, False),
        )
        listed = set()
        for counts, indices, is_full in kinds:
            for block in indices[0, 0, number, : counts[0, 0, number]].tolist():
                keys = slice(block * block_size, (block + 1) * block_size)
                assert not is_full or expected[queries][:, keys].all()
                listed.add(block)
        needed = expected[queries].any(dim=0).nonzero()[:, 0] // block_size
        assert set(needed.tolist()) <= listed


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_the_mask_of_a_tree_equals_the_blocks():
    sequences = [[1] * 9 + [2] * 5, [1] * 9 + [3] * 7, [1] * 4, [4] * 3]
    tree = build_prefix_tree(sequences, min_shared=1)
    inputs = random_heads(tree, requires_grad=False)

    mask = ancestor_mask(tree.subtree_ends_M, block_size=4)
    found = flex_tree_attention(flex_attention, *inputs, mask, scaling=None)

    torch.testing.assert_close(found, tree_attention(*inputs, tree), atol=1e-12, rtol=0)


class WideNorm(torch.nn.Module):
    """The RMS norm of a model in the type of its weights; transformers computes it in float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight
        is_gemma = type(norm).__name__.startswith("Gemma")
        self._offset, self._eps = float(is_gemma), norm.eps if is_gemma else norm.variance_epsilon

    def forward(self, hidden):
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self._eps)
        return hidden * scale * (self._offset + self.weight)


def in_float64(model, *, recomputes=False):
    """Return a model that computes all but positions in float64, with attention over trees."""
    model = model.double().train()
    if recomputes:
        checkpoint_activations(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, WideNorm(child))
    use_packed_attention(model)
    return model


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL))


def gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    return GemmaForCausalLM(GemmaConfig(**SMALL))


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
MODELS = {"llama": tiny_llama, "qwen3": qwen3, "gemma": gemma}
SEQ_LEN = 60


def tokens_of(seed, count):
    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


def single_turn():
    """Completions of one prompt: different, equal, a prefix of another, empty, truncated."""
    prompt = tokens_of(0, 24)
    first = tokens_of(1, 20)
    completions = [first, tokens_of(2, 9), first, first[:18], [*first[:17], 5, 6], tokens_of(3, 50)]
    return group(completions, [1.0, 0.0, 0.4, 0.2, 0.7, 0.1], prompt=tuple(prompt), logprob=-3.0)


def several_turns():
    """Conversations that share a trained turn and branch in the next one, and a single token."""
    start, turn, reply = tokens_of(4, 17), tokens_of(5, 18), tokens_of(6, 5)
    ends = [tokens_of(7, 6), tokens_of(8, 9), []]
    tokens = [[*start, *turn, *reply, *end] for end in ends] + [[*start, 9, 9], [start[0]]]
    masks = [[-100] * 17 + turn + [-100] * 5 + end for end in ends] + [[-100] * 17 + [9, 9], [-100]]
    return {
        "tokens": tokens,
        "masks": masks,
        "scores": [1.0, 0.0, 0.5, 0.3, 0.9],
        "inference_logprobs": [[-3.3] * len(one) for one in tokens],
    }


def little_shared():
    return group([[5] * 3, [6, 6]], [0.2, 0.9], logprob=-3.5, prompt=(4, 5))


def groups_of_a_batch():
    groups = [single_turn(), several_turns(), little_shared()]
    for number, one in enumerate(groups):
        one["overrides"] = [{} for _ in one["tokens"]]
        one["generation_params"] = {"temperature": 0.5 + number}
        one["ref_logprobs"] = [[-3.2] * len(tokens) for tokens in one["tokens"]]
        one["distill_token_ids"] = [[[3, 4]] * len(tokens) for tokens in one["tokens"]]
        one["distill_logprobs"] = [[[-0.5, -1.5]] * len(tokens) for tokens in one["tokens"]]
    groups[0]["overrides"][1] = {"sft": True}
    return groups


def loss_and_gradients(tmp_path, layout, *, model="llama", **settings):
    """Return loss and gradients of one batch in double precision, added up over its ranks."""
    built = in_float64(MODELS[model](), recomputes=settings.get("gradient_checkpointing", False))
    trainer = make_trainer(
        tmp_path,
        model=built,
        logprobs_mode="processed",
        max_grad_norm=1e9,
        shared_prefixes="on",
        seq_len=SEQ_LEN,
        **{"kl_coef": 0.1, "distill_coef": 0.2, **settings},
    )
    batch = build_batch(groups_of_a_batch(), row_rules(trainer.config), **layout)
    gradients = []

    def capture():
        gradients.append([p.grad.clone() for p in built.parameters()])

    trainer._optimizer.step = capture
    shares = split_batch(batch, layout.get("num_ranks", 1))
    value = sum(trainer.train_on(share)["train/loss"] for share in shares)
    return value, [sum(parts) for parts in zip(*gradients, strict=True)]


PADDED = {"microbatch_size": 4}
WHOLE_TREE = {"microbatch_size": 20, "packs": True, "min_shared_fraction": 0.0}
TREES = {"microbatch_size": 2, "packs": True, "min_shared_fraction": 0.0, "max_tokens": 90}
TREES_OF_RANKS = {**TREES, "num_ranks": 2}


def assert_equal_to_padded(tmp_path, *layouts, **settings):
    value, gradient = loss_and_gradients(tmp_path, PADDED, **settings)
    assert any(float(g.abs().max()) > 1e-4 for g in gradient)
    for layout in layouts:
        other_value, other_gradient = loss_and_gradients(tmp_path, layout, **settings)

        assert other_value == pytest.approx(value, abs=1e-8)
        for one, other in zip(gradient, other_gradient, strict=True):
            torch.testing.assert_close(other, one, atol=1e-8, rtol=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradient_of_a_tree_equal_the_padded_ones(tmp_path, algorithm):
    assert_equal_to_padded(tmp_path, WHOLE_TREE, TREES, algorithm=algorithm)


def test_gradients_of_the_ranks_trees_add_up(tmp_path):
    assert_equal_to_padded(tmp_path, TREES_OF_RANKS)


@pytest.mark.parametrize("model", ["qwen3", "gemma"])
def test_other_models_have_the_same_gradient_as_a_tree(tmp_path, model):
    assert_equal_to_padded(tmp_path, WHOLE_TREE, model=model)


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_reduction": name} for name in ("sequence_mean", "dr_grpo", "sequence_sum", "sum")),
        *({"importance_correction": name} for name in ("none", *CORRECTIONS)),
        {"entropy_coef": 0.3},
        {"kl_estimator": "k1"},
        {"kl_estimator": "k2", "kl_unbiased": True},
        {"distill_loss": "reverse_kl", "distill_temperature": 2.0},
        {"truncated_completions": "mask"},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_settings_of_the_loss_do_not_depend_on_the_tree(tmp_path, settings):
    assert_equal_to_padded(tmp_path, WHOLE_TREE, **settings)


def test_batch_as_a_tree_computes_each_prefix_once():
    rules = RowRules(seq_len=SEQ_LEN, unsupported_fields="ignore")

    batch = build_batch(groups_of_a_batch(), rules, **WHOLE_TREE)

    (microbatch,) = batch.microbatches
    flat = sum(max(0, min(SEQ_LEN, len(t)) - 1) for g in groups_of_a_batch() for t in g["tokens"])
    assert microbatch.tokens_BT.shape == (1, flat)
    assert batch.summary.num_input_tokens == flat
    assert batch.summary.num_computed_tokens == microbatch.tree.num_tokens
    assert batch.summary.shared_prefix_fraction == pytest.approx(
        1 - microbatch.tree.num_tokens / flat
    )
    assert batch.summary.padding_fraction == 0.0


@given(
    limit=st.integers(1, 200),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_ranks=st.integers(1, 3),
)
def test_passes_with_trees_keep_the_limit_where_a_sequence_allows_it(limit, sizes, num_ranks):
    groups = [
        group(
            [tokens_of(10 * number + i, 8) for i in range(size)],
            [float(i) for i in range(size)],
            prompt=tuple(tokens_of(100 + number, 20)),
        )
        for number, size in enumerate(sizes)
    ]

    batch = build_batch(
        groups,
        RowRules(seq_len=64),
        microbatch_size=1,
        packs=True,
        max_tokens=limit,
        num_ranks=num_ranks,
        min_shared_fraction=0.0,
    )

    assert sum(int((mb.labels_BT >= 0).sum()) for mb in batch.microbatches) == 8 * sum(sizes)
    for microbatch in batch.microbatches:
        assert microbatch.num_cells <= limit or len(microbatch.sequence_lengths) == 1
    shares = split_batch(batch, num_ranks)
    assert len({len(share.microbatches) for share in shares}) == 1


def test_members_of_a_group_share_a_pass_where_the_limit_allows_it():
    groups = [
        group(
            [[1 + i, *tokens_of(10 * number + i, 9)] for i in range(4)],
            [1.0, 0.0, 0.0, 0.0],
            prompt=(1 + number, *tokens_of(100 + number, 40)),
        )
        for number in range(3)
    ]

    # Inputs of a group: 41 + 4 * 9 tokens, as every last token is a label only.
    batch = build_batch(
        groups, RowRules(seq_len=64), microbatch_size=2, packs=True, max_tokens=80,
        min_shared_fraction=0.05,
    )  # fmt: skip

    assert [mb.num_cells for mb in batch.microbatches] == [77, 77, 77]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_every_rank_has_a_pass_although_the_batch_fits_one(num_groups):
    groups = [
        group(
            [[1 + i, *tokens_of(10 * number + i, 7)] for i in range(4)],
            [1.0, 0.0, 0.0, 0.0],
            prompt=(1 + number, *tokens_of(100 + number, 39)),
        )
        for number in range(num_groups)
    ]

    batch = build_batch(
        groups, RowRules(seq_len=64), microbatch_size=2, packs=True, num_ranks=2,
        min_shared_fraction=0.05,
    )  # fmt: skip

    shares = split_batch(batch, 2)
    assert [[mb.tree is not None for mb in share.microbatches] for share in shares] == [[True]] * 2
    costs = [share.microbatches[0].num_cells for share in shares]
    assert costs == ([54, 54] if num_groups == 1 else [68, 68])


def test_batch_that_shares_little_is_packed_without_a_tree():
    rules = RowRules(seq_len=64)

    batch = build_batch(
        [little_shared()], rules, microbatch_size=2, packs=True, min_shared_fraction=0.5
    )

    assert [mb.tree for mb in batch.microbatches] == [None]
    assert batch.summary.shared_prefix_fraction == 0.0


def test_linear_layers_compute_the_tokens_of_the_tree_only():
    prompt, completion, group_size = 40, 30, 8
    rows = []
    for i in range(group_size):
        ids = [*tokens_of(0, prompt), 1 + i, *tokens_of(1 + i, completion - 1)]
        labels = [-100] * prompt + ids[prompt:]
        rows.append(Row(ids, labels, [1.0] * len(ids), inference_logprobs=None, temperature=1.0))
    model = tiny_llama()
    use_packed_attention(model)
    scorer = PolicyScorer(model, shares_prefixes=True)
    in_layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    # The output layer is computed again in the backward pass, and torch does not count `addmm_`,
    # which adds up the gradient of its weights.
    head = 6 * model.lm_head.weight.numel() * group_size * completion
    tokens = {
        False: group_size * (prompt + completion - 1),
        True: prompt + group_size * (completion - 1),
    }

    for shares_prefixes, count in tokens.items():
        microbatch = make_packed_microbatch(rows, shares_prefixes=shares_prefixes)
        with FlopCounterMode(display=False) as counter:
            scorer(microbatch).logprobs_BT.sum().backward()
        flops = counter.get_flop_counts()["Global"]
        products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        found = sum(flops.get(product, 0) for product in products)
        assert found == 6 * in_layers * count + head


def test_model_with_dropout_keeps_its_sequences_apart_and_says_so(tmp_path, caplog):
    model = tiny_llama()
    use_packed_attention(model)
    model.model.layers[0].mlp.act_fn = torch.nn.Dropout(0.1)

    with caplog.at_level(logging.WARNING):
        policy = prepare_policy(model, tiny_config(tmp_path))

    assert policy.min_shared_fraction is None
    assert not policy.scorer.shares_prefixes
    assert [r.getMessage() for r in caplog.records] == [
        "equal prefixes are computed for each sequence: it has dropout, which differs between "
        "sequences"
    ]
    with pytest.raises(ConfigError, match=r"shared_prefixes=on: it has dropout.*--shared-prefixes"):
        prepare_policy(model, tiny_config(tmp_path, shared_prefixes="on"))


def test_model_with_dropout_in_its_attention_is_refused():
    model = tiny_llama()
    use_packed_attention(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1

    obstacle = obstacle_to_sharing(PolicyScorer(model), longest=64)

    assert obstacle == "its attention drops a share of 0.1 of the weights"


def test_attention_window_shorter_than_a_sequence_is_refused():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=32))
    use_packed_attention(model)

    assert obstacle_to_sharing(PolicyScorer(model), longest=32) is None
    obstacle = obstacle_to_sharing(PolicyScorer(model), longest=33)
    assert obstacle == "its attention has a window of 32 tokens, sequences up to 33"


def test_attention_that_ignores_the_tree_is_found():
    model = tiny_llama()  # transformers' own attention, causal over the whole row

    obstacle = obstacle_to_sharing(PolicyScorer(model), longest=64)

    assert obstacle == "its attention, sdpa, has no trees"


def test_layers_that_mix_branches_are_found():
    model = tiny_llama()
    use_packed_attention(model)
    model.model.layers[0].mlp = Summing()

    obstacle = obstacle_to_sharing(PolicyScorer(model), longest=64)

    assert obstacle == "its layers mix branches of a tree"


class Summing(torch.nn.Module):
    """Stands for a recurrent layer, whose state runs through the row."""

    def forward(self, hidden):
        return hidden.cumsum(dim=1)


class ScaledBackward(torch.nn.Module):
    """A layer whose gradient depends on how many tokens it computes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        out = self.layer(hidden)
        return out + (out - out.detach()) * hidden.shape[1]


def test_gradients_that_depend_on_the_row_are_found():
    model = tiny_llama()
    use_packed_attention(model)
    model.model.layers[0].mlp = ScaledBackward(model.model.layers[0].mlp)

    obstacle = obstacle_to_sharing(PolicyScorer(model), longest=64)

    assert obstacle is not None
    assert obstacle.startswith("gradients of a tree differ from those of its sequences by")


def test_trial_leaves_gradients_and_mode_alone(tmp_path):
    model = tiny_llama()
    use_packed_attention(model)

    policy = prepare_policy(model, tiny_config(tmp_path))

    assert policy.scorer.shares_prefixes
    assert policy.layout == "sequences packed, equal prefixes computed once"
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_shared_prefixes_without_packing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="shared_prefixes=on needs packed sequences"):
        tiny_config(tmp_path, shared_prefixes="on", packing="off")


def test_run_reports_the_tokens_it_left_out(tmp_path, caplog):
    model = tiny_llama()
    use_packed_attention(model)
    one = group([[7, 8], [9, 8], [7, 7], [5, 5]], [1.0, 0.0, 0.0, 1.0], prompt=tuple(range(1, 21)))
    trainer = make_trainer(tmp_path, model=model, groups=[one], training_steps=1, batch_size=4)

    with caplog.at_level(logging.INFO):
        trainer.run()

    # 4 sequences of 21 inputs; the prompt of 20 tokens and 3 different first tokens once.
    assert "equal prefixes computed once: 23 of 84 tokens remain" in caplog.text
    assert "equal prefixes computed once: 23 of 84 tokens of this run remained" in caplog.text
    assert '"train/shared_prefix_fraction": 0.726' in (tmp_path / "metrics.jsonl").read_text()
