"""Tables for the assignment of rows to passes and ranks; the numbers were computed by hand."""

from __future__ import annotations

import pytest
import torch

from example_trainer.batch import (
    Batch,
    BatchSummary,
    Microbatch,
    _is_worth_sharing,
    _padded_starts,
    _split_rows,
    balanced_bins,
    build_batch,
    make_microbatch,
    make_packed_microbatch,
    plan_microbatches,
    split_batch,
)
from example_trainer.loss import BatchTotals
from example_trainer.rows import Row, RowRules
from tests.trainer.tiny import group


def row(*tokens: int, **fields: object) -> Row:
    defaults = {
        "labels": [-100, *tokens[1:]],
        "advantages": [1.0] * len(tokens),
        "inference_logprobs": None,
        "temperature": 1.0,
    }
    return Row(list(tokens), **(defaults | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "num_bins", "expected"),
    [
        ([3, 3, 3, 3], 2, [[0, 2], [1, 3]]),
        ([1, 9, 5, 4], 2, [[0, 1], [2, 3]]),  # 9 | 5 + 4, then 1 to the first of equal loads
        ([5, 4, 3, 2, 1], 3, [[0], [1, 4], [2, 3]]),
        ([7], 4, [[0]]),
        ([0, 0, 4], 3, [[0, 1], [2]]),  # a sequence without tokens fills no bin
        ([], 2, []),
    ],
)
def test_balanced_bins_table(lengths, num_bins, expected):
    assert balanced_bins(lengths, num_bins) == expected


@pytest.mark.parametrize("num_bins", [0, -1])
def test_bins_need_at_least_one(num_bins):
    with pytest.raises(ValueError, match="at least one bin"):
        balanced_bins([1], num_bins)
    assert balanced_bins([1], 1) == [[0]]


@pytest.mark.parametrize(
    ("lengths", "settings", "num_passes"),
    [
        ([4, 4, 4, 4], {"num_microbatches": 2}, 2),
        ([4, 4, 4, 4], {"num_microbatches": 0}, 1),
        ([4, 4, 4, 4], {"num_microbatches": 1, "max_tokens": 16}, 1),
        ([4, 4, 4, 4], {"num_microbatches": 1, "max_tokens": 15}, 2),
        ([4, 4, 4, 4], {"num_microbatches": 3, "max_tokens": 16}, 3),
        ([4, 4, 4, 4], {"num_microbatches": 1, "max_tokens": 4}, 4),
        ([4, 4, 4, 4], {"num_microbatches": 1, "max_tokens": 3}, 4),  # each has its own
        ([5, 5, 5], {"num_microbatches": 1, "max_tokens": 8}, 3),  # two bins would hold 10
        ([5, 5, 5, 5, 5], {"num_microbatches": 1, "max_tokens": 8, "multiple_of": 2}, 5),
        ([4, 4, 4, 4], {"num_microbatches": 1, "multiple_of": 2}, 2),
        ([4, 4, 4, 4], {"num_microbatches": 3, "multiple_of": 2}, 4),
        ([9, 1, 1], {"num_microbatches": 1, "max_tokens": 6}, 2),  # the long one alone
    ],
)
def test_number_of_passes_table(lengths, settings, num_passes):
    plan = plan_microbatches(lengths, **settings)

    assert len(plan) == num_passes
    assert sorted(index for bin_ in plan for index in bin_) == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("lengths", "settings", "expected"),
    [
        ([3, 3, 3, 3, 3], {"microbatch_size": 2}, [2, 4, 5]),
        ([3, 3, 3, 3], {"microbatch_size": 2}, [2, 4]),
        ([3], {"microbatch_size": 2}, [1]),
        # rows of 5 tokens are 4 columns
        ([5, 5, 5, 5], {"max_tokens": 8}, [2, 4]),
        ([5, 5, 5, 5], {"max_tokens": 11}, [2, 4]),
        ([5, 5, 5, 5], {"max_tokens": 12}, [3, 4]),
        ([5, 5, 5, 5], {"max_tokens": 1}, [1, 2, 3, 4]),
        ([3, 3, 9, 3, 3], {"max_tokens": 8}, [2, 3, 5]),  # the long row does not widen later ones
        ([9, 3, 3], {"max_tokens": 8}, [1, 3]),
        ([3, 3, 3, 3], {"max_tokens": 99, "num_ranks": 2}, [2, 4]),
        ([3, 3, 3, 3], {"max_tokens": 99, "num_ranks": 8}, [1, 2, 3, 4]),
        ([3, 3, 3], {"max_tokens": 99}, [3]),
    ],
)
def test_ends_of_padded_passes_table(lengths, settings, expected):
    rows = [row(*range(1, length + 1)) for length in lengths]
    defaults = {"microbatch_size": 1, "max_tokens": None, "num_ranks": 1}
    chosen = defaults | settings

    starts = _padded_starts(
        rows, chosen["microbatch_size"], 1, chosen["max_tokens"], chosen["num_ranks"]
    )

    assert starts == [0, *expected[:-1]]


# Prefixes of 16 tokens or more are shared: here 20.
PREFIXED = tuple([first] * 20 + [branch, 9] for first in (7, 8) for branch in (1, 2))


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        # without the last tokens, each first token has a tree of 20 + 2 tokens
        (44, [[0, 1, 2, 3]]),
        (43, [[0, 1], [2, 3]]),
        (22, [[0, 1], [2, 3]]),
        (21, [[0], [1], [2], [3]]),
        (1, [[0], [1], [2], [3]]),  # a part has at least one row
    ],
)
def test_group_is_cut_where_its_prefixes_part(max_tokens, expected):
    rows = [row(*tokens) for tokens in PREFIXED]

    parts = _split_rows(rows, max_tokens)

    assert sorted([rows.index(member) for member in part] for part in parts) == expected


def test_packed_rows_without_tokens_are_one_padded_column():
    packed = make_packed_microbatch([row(5), row(6)])

    assert packed.tokens_BT.tolist() == [[0], [0]]
    assert packed.sequence_ids_BT is None
    assert packed.tree is None


def test_packed_rows_leave_empty_ones_out_of_the_lengths():
    packed = make_packed_microbatch([row(5, 6, 7), row(9), row(8, 3)])

    assert packed.tokens_BT.tolist() == [[5, 6, 8]]
    assert packed.sequence_ids_BT.tolist() == [[0, 0, 2]]
    assert packed.position_ids_BT.tolist() == [[0, 1, 0]]
    assert packed.sequence_lengths == (2, 1)
    assert packed.tree is None
    assert packed.num_cells == 3


def test_packed_rows_have_the_temperatures_of_their_sequences():
    packed = make_packed_microbatch([row(5, 6, 7, temperature=0.5), row(8, 3)])

    assert packed.temperatures_BT.tolist() == [[0.5, 0.5, 1.0]]


def test_packed_rows_share_a_prefix_on_request():
    rows = [row(*tokens) for tokens in PREFIXED[:2]]

    packed = make_packed_microbatch(rows, shares_prefixes=True)

    assert packed.tokens_BT.tolist() == [[*[7] * 20, 1, *[7] * 20, 2]]
    assert packed.num_cells == 22
    assert packed.tree is not None


@pytest.mark.parametrize("has_image", [False, True])
def test_rows_with_an_image_share_no_prefix(has_image):
    # Equal tokens may stand for different images.
    members = [row(*tokens) for tokens in PREFIXED[:2]]
    if has_image:
        members.append(row(5, 6, images=object()))

    assert _is_worth_sharing([members], 0.0) is not has_image


def pairs(num_groups: int, *, prompt_tokens: int) -> list[dict[str, object]]:
    """Groups of two trajectories that differ in their last token, with prompts of their own."""
    return [
        group([[5, 6], [5, 7]], [1.0, 0.0], prompt=(10 + number,) * prompt_tokens)
        for number in range(num_groups)
    ]


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({"microbatch_size": 2, "pad_multiple": 1}, [(2, 4), (2, 4)]),
        ({"microbatch_size": 3, "pad_multiple": 1}, [(3, 4), (1, 4)]),
        ({"microbatch_size": 9, "pad_multiple": 8}, [(4, 8)]),
        ({"microbatch_size": 2, "packs": True}, [(1, 8), (1, 8)]),
        ({"microbatch_size": 3, "packs": True}, [(1, 8), (1, 8)]),
        ({"microbatch_size": 4, "packs": True}, [(1, 16)]),
        ({"microbatch_size": 1, "packs": True, "max_tokens": 16}, [(1, 16)]),
        ({"microbatch_size": 1, "packs": True, "max_tokens": 15}, [(1, 8), (1, 8)]),
        (
            {"microbatch_size": 1, "packs": True, "max_tokens": 16, "num_ranks": 2},
            [(1, 8), (1, 8)],
        ),
        ({"microbatch_size": 4, "packs": True, "num_ranks": 2}, [(1, 16)]),
    ],
)
def test_shapes_of_passes_table(settings, shapes):
    batch = build_batch(pairs(2, prompt_tokens=3), RowRules(seq_len=64), **settings)

    assert [tuple(mb.tokens_BT.shape) for mb in batch.microbatches] == shapes


@pytest.mark.parametrize(
    ("share", "is_shared"),
    # twice 20 input tokens, of which 20 are left out
    [(0.0, True), (0.5, True), (0.51, False), (None, False)],
)
def test_prefixes_are_shared_from_a_part_of_the_tokens(share, is_shared):
    batch = build_batch(
        pairs(1, prompt_tokens=19), RowRules(seq_len=64), microbatch_size=2, packs=True,
        min_shared_fraction=share,
    )  # fmt: skip

    assert [mb.tree is not None for mb in batch.microbatches] == [is_shared]
    assert batch.summary.shared_prefix_fraction == (0.5 if is_shared else 0.0)


def test_groups_without_a_common_prefix_are_packed_without_trees():
    groups = [group([[5, 6]], [1.0]), group([[5, 6]], [1.0], prompt=(9, 9))]

    batch = build_batch(
        groups, RowRules(seq_len=64), microbatch_size=2, packs=True, min_shared_fraction=0.0
    )

    assert [mb.tree for mb in batch.microbatches] == [None]


@pytest.mark.parametrize(
    ("settings", "cells"),
    [
        # two groups whose trees have 20 tokens each
        ({"microbatch_size": 4}, [40]),
        ({"microbatch_size": 2}, [40]),  # 2 * 20 tokens
        ({"microbatch_size": 1}, [20, 20]),
        ({"microbatch_size": 2, "num_ranks": 2}, [20, 20]),
        ({"microbatch_size": 4, "num_ranks": 2}, [40]),  # fewer packed passes than ranks
        ({"microbatch_size": 4, "max_tokens": 40}, [40]),
        ({"microbatch_size": 4, "max_tokens": 39}, [20, 20]),
        ({"microbatch_size": 4, "max_tokens": 40, "num_ranks": 2}, [20, 20]),
    ],
)
def test_passes_with_trees_table(settings, cells):
    batch = build_batch(
        pairs(2, prompt_tokens=19),
        RowRules(seq_len=64),
        packs=True,
        min_shared_fraction=0.1,
        **settings,
    )

    assert [mb.num_cells for mb in batch.microbatches] == cells


def test_passes_grow_in_number_while_a_common_tree_is_too_large():
    # Prompts of 16 tokens are shared, the 8 tokens after them are not: 24 + 24 in one tree each.
    groups = [group([[number] * 8 + [9]], [1.0], prompt=(5,) * 16) for number in (10, 11, 12, 13)]

    batch = build_batch(
        groups, RowRules(seq_len=64), microbatch_size=4, packs=True, max_tokens=48,
        min_shared_fraction=0.0,
    )  # fmt: skip

    assert all(mb.num_cells <= 48 for mb in batch.microbatches)
    assert sum(len(mb.sequence_lengths or ()) for mb in batch.microbatches) == 4


def passes(*lengths: int) -> Batch:
    microbatches = [make_microbatch([row(*[5] * (n + 1))], pad_multiple=1) for n in lengths]
    summary = BatchSummary(0.0, 0.0, 0.0, 0.0, 1, 0, 0, 0, 0, 0, 0, 0.0)
    return Batch(microbatches, BatchTotals(9, 3), summary, needs_reference=True)


def trained(share: Batch) -> list[int]:
    return [mb.num_cells for mb in share.microbatches if (mb.labels_BT != -100).any()]


@pytest.mark.parametrize(
    ("lengths", "world_size", "expected"),
    [
        ((3, 9, 5), 1, [[3, 9, 5]]),
        ((3, 9, 5), 2, [[9], [5, 3]]),
        ((9, 5, 4, 1), 2, [[9, 1], [5, 4]]),
        ((9, 1, 1, 1), 2, [[9, 1], [1, 1]]),  # equally many passes each
        ((9,), 3, [[9], [], []]),
    ],
)
def test_ranks_have_about_the_same_tokens(lengths, world_size, expected):
    batch = passes(*lengths)

    shares = split_batch(batch, world_size)

    assert [trained(share) for share in shares] == expected
    assert len({len(share.microbatches) for share in shares}) == 1
    assert all(share.totals == batch.totals and share.needs_reference for share in shares)


def test_passes_that_fill_up_train_nothing():
    _, filled = split_batch(passes(4), 2)

    empty: Microbatch = filled.microbatches[0]
    assert empty.labels_BT.tolist() == [[-100, -100]]
    assert empty.inference_logprobs_BT.tolist() == [[1.0, 1.0]]
    assert empty.tokens_BT.tolist() == [[0, 0]]
    assert empty.tokens_BT.dtype == torch.int64
    assert empty.advantages_BT.tolist() == [[0.0, 0.0]]
    assert empty.temperatures_S.tolist() == [1.0]
