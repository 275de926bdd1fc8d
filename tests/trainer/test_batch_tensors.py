"""Tensors and statistics of a batch, field by field; the numbers were computed by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from atroposlib.errors import GroupError
from example_trainer.batch import (
    Batch,
    BatchSummary,
    _mean_and_deviation,
    build_batch,
    make_microbatch,
    make_packed_microbatch,
    padded_length,
    shift_row,
)
from example_trainer.loss import PADDED_TEACHER_ID, PADDED_TEACHER_LOGPROB
from example_trainer.rows import Row, RowRules
from tests.trainer.tiny import group

RULES = RowRules(seq_len=64)


@dataclass(frozen=True)
class Image:
    """One image of a row: two patches of one number each."""

    number: float

    @property
    def pixels_PD(self) -> torch.Tensor:
        return torch.full((2, 1), self.number)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (1, 1, 2)


@dataclass(frozen=True)
class ImagesOfRow:
    """Images among the tokens of a row, with positions that count from ten."""

    images: tuple[Image, ...]
    num_tokens: int

    @property
    def positions_3L(self) -> torch.Tensor:
        return torch.arange(10, 10 + self.num_tokens).expand(3, -1)

    def without_last_token(self) -> ImagesOfRow:
        return ImagesOfRow(self.images, self.num_tokens - 1)


def row(*tokens: int, **fields: object) -> Row:
    defaults = {
        "labels": [-100, *tokens[1:]],
        "advantages": [float(number) for number in range(len(tokens))],
        "inference_logprobs": None,
        "temperature": 1.0,
    }
    return Row(list(tokens), **(defaults | fields))  # type: ignore[arg-type]


def build(*groups: dict[str, object], **settings: object) -> Batch:
    rules = settings.pop("rules", RULES)
    defaults = {"microbatch_size": 8, "pad_multiple": 1}
    return build_batch(list(groups), rules, **(defaults | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("longest", "multiple", "columns"),
    [(0, 4, 4), (1, 4, 4), (5, 4, 4), (6, 4, 8), (9, 4, 8), (10, 4, 12), (1, 1, 1), (3, 1, 2)],
)
def test_padded_length_table(longest, multiple, columns):
    assert padded_length(longest, multiple=multiple) == columns


def test_shift_drops_the_last_input_and_the_first_of_every_other_field():
    shifted = shift_row(
        row(
            4, 5, 6,
            inference_logprobs=[1.0, -0.5, -0.6], ref_logprobs=[1.0, -0.7, -0.8],
            distill_token_ids=[(), (5,), (6,)], distill_logprobs=[(), (-0.1,), (-0.2,)],
            images=ImagesOfRow((), 3),
        )
    )  # fmt: skip

    assert (shifted.tokens, shifted.labels, shifted.advantages) == ([4, 5], [5, 6], [1.0, 2.0])
    assert (shifted.inference_logprobs, shifted.ref_logprobs) == ([-0.5, -0.6], [-0.7, -0.8])
    assert (shifted.distill_token_ids, shifted.distill_logprobs) == (
        [(5,), (6,)],
        [(-0.1,), (-0.2,)],
    )
    assert shifted.images == ImagesOfRow((), 2)
    plain = shift_row(row(4, 5))
    assert (plain.inference_logprobs, plain.ref_logprobs, plain.images) == (None, None, None)


def test_fields_that_some_rows_have_are_filled_in_for_the_others():
    microbatch = make_microbatch(
        [
            row(1, 2, 3, ref_logprobs=[1.0, -0.5, -0.6], is_sft=True, temperature=0.5),
            row(4, 5, inference_logprobs=[1.0, -0.7]),
        ],
        pad_multiple=1,
    )

    assert microbatch.tokens_BT.tolist() == [[1, 2], [4, 0]]
    assert microbatch.labels_BT.tolist() == [[2, 3], [5, -100]]
    assert microbatch.advantages_BT.tolist() == [[1.0, 2.0], [1.0, 0.0]]
    assert microbatch.is_sft_BT.tolist() == [[True, True], [False, False]]
    assert microbatch.ref_logprobs_BT.flatten().tolist() == pytest.approx([-0.5, -0.6, 1.0, 1.0])
    logprobs = microbatch.inference_logprobs_BT.flatten().tolist()
    assert logprobs == pytest.approx([1.0, 1.0, -0.7, 1.0])
    assert microbatch.temperatures_S.tolist() == [0.5, 1.0]
    assert microbatch.temperatures_BT.tolist() == [[0.5, 0.5], [1.0, 1.0]]
    assert microbatch.num_cells == 4


def test_fields_that_no_row_has_are_none():
    microbatch = make_microbatch([row(1, 2)], columns=3)

    assert microbatch.tokens_BT.shape == (1, 3)
    fields = vars(microbatch)
    assert [name for name in fields if fields[name] is None] == [
        "is_sft_BT", "ref_logprobs_BT", "proximal_logprobs_BT", "distill_token_ids_BTK",
        "distill_logprobs_BTK", "sequence_ids_BT", "position_ids_BT", "sequence_lengths",
        "pixels_PD", "image_grids_I3", "image_positions_3BT", "tree",
    ]  # fmt: skip
    assert microbatch.image_places == ()


def test_teachers_choices_are_padded_to_the_most_of_any_position():
    with_teacher = row(
        1, 2, 3,
        distill_token_ids=[(9, 9, 9, 9), (5,), (6, 7)],
        distill_logprobs=[(-1.0,) * 4, (-0.25,), (-0.5, -2.0)],
    )  # fmt: skip

    microbatch = make_microbatch([with_teacher, row(1, 2)], pad_multiple=1)

    none, low = PADDED_TEACHER_ID, PADDED_TEACHER_LOGPROB
    assert microbatch.distill_token_ids_BTK.tolist() == [
        [[5, none], [6, 7]], [[none, none], [none, none]],
    ]  # fmt: skip
    assert microbatch.distill_logprobs_BTK.tolist() == [
        [[-0.25, low], [-0.5, -2.0]], [[low, low], [low, low]],
    ]  # fmt: skip


def test_reference_of_the_trainer_fills_in_what_groups_do_not_have():
    given = make_microbatch([row(1, 2, 3, ref_logprobs=[1.0, 1.0, -0.5])], pad_multiple=1)
    missing = make_microbatch([row(1, 2, 3)], pad_multiple=1)
    own = torch.tensor([[-0.25, -0.75]])

    assert given.with_reference(own).ref_logprobs_BT.tolist() == [[-0.25, -0.5]]
    assert missing.with_reference(own).ref_logprobs_BT.tolist() == [[-0.25, -0.75]]


def test_copy_on_a_device_has_every_tensor_there():
    moved = make_packed_microbatch([row(1, 2, 3, ref_logprobs=[1.0, 1.0, 1.0])]).to("meta")

    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 8
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.sequence_lengths == (2,)


def test_distinct_images_are_encoded_once_and_text_counts_its_columns():
    first, second = Image(1.0), Image(2.0)
    rows = [
        row(1, 2, 3, images=ImagesOfRow((first, second), 3)),
        row(4, 5, images=ImagesOfRow((second,), 2)),
        row(6, 7, 8),
    ]

    padded = make_microbatch(rows, columns=3)
    packed = make_packed_microbatch(rows)

    assert padded.pixels_PD.tolist() == packed.pixels_PD.tolist() == [[1.0], [1.0], [2.0], [2.0]]
    assert padded.image_grids_I3.tolist() == [[1, 1, 2], [1, 1, 2]]
    assert padded.image_places == packed.image_places == (0, 1, 1)
    assert padded.image_positions_3BT[2].tolist() == [[10, 11, 0], [10, 0, 0], [0, 1, 0]]
    assert packed.image_positions_3BT[0].tolist() == [[10, 11, 10, 0, 1]]


TWO = group([[5, 6], [7]], [1.0, 0.0], prompt=(1, 2), logprob=-0.5)


def test_summary_by_hand():
    batch = build(TWO, group([[5]], [3.0], prompt=(1,), surprise=1), pad_multiple=4)
    summary = batch.summary

    # scores 1, 0, 3; advantages 1 for two tokens, -1 for one, and the raw 3 of the single one
    assert (summary.score_mean, summary.score_std) == pytest.approx((4 / 3, math.sqrt(14) / 3))
    assert summary.advantage_mean == pytest.approx((1 + 1 - 1 + 3) / 4, abs=1e-6)
    assert summary.advantage_std == pytest.approx(math.sqrt((0 + 0 + 4 + 4) / 4), abs=1e-6)
    assert (summary.num_groups, summary.num_zero_gradient_groups) == (2, 0)
    assert (summary.num_input_tokens, summary.num_computed_tokens) == (3 + 2 + 1, 6)
    assert summary.padding_fraction == pytest.approx((12 - 6) / 12)
    assert (summary.num_rows_without_logprobs, summary.num_truncated_rows) == (1, 0)
    assert summary.unknown_fields == frozenset({"surprise"})
    assert (summary.bad_groups, summary.num_refused_before) == ({}, 0)
    assert (batch.totals.num_tokens, batch.totals.num_sequences) == (4, 3)
    assert (batch.totals.num_sft_tokens, batch.totals.num_distill_tokens) == (0, 0)


def test_demonstrations_are_counted_apart():
    batch = build(TWO | {"overrides": [{"sft": True}, {}]})

    assert (batch.totals.num_tokens, batch.totals.num_sequences) == (1, 1)
    assert batch.totals.num_sft_tokens == 2


def test_teachers_positions_are_counted_where_trained_and_given():
    teacher = {
        "distill_token_ids": [[[9], [9], [5], [6]], [[9], [9], []]],
        "distill_logprobs": [[[-1.0]] * 4, [[-1.0], [-1.0], []]],
    }
    batch = build(TWO | teacher, rules=RowRules(seq_len=64, uses_teacher=True))

    # of the first row both trained positions; the second has no choice at its only one
    assert batch.totals.num_distill_tokens == 2


@pytest.mark.parametrize(
    ("changes", "num_silent"),
    [
        ({"scores": [1.0, 1.0]}, 1),
        ({"scores": [1.0, 0.0]}, 0),
        ({"scores": [1.0, 1.0], "overrides": [{"sft": True}, {}]}, 0),
    ],
)
def test_groups_without_a_gradient_are_counted(changes, num_silent):
    assert build(TWO | changes).summary.num_zero_gradient_groups == num_silent


def test_group_with_a_teacher_has_a_gradient_although_its_scores_are_equal():
    teacher = {
        "scores": [1.0, 1.0],
        "distill_token_ids": [[[9]] * 4, [[9]] * 3],
        "distill_logprobs": [[[-1.0]] * 4, [[-1.0]] * 3],
    }

    batch = build(TWO | teacher, rules=RowRules(seq_len=64, uses_teacher=True))

    assert batch.summary.num_zero_gradient_groups == 0


def test_bad_groups_are_named_or_refused():
    bad = group([[5], [6]], [1.0, 0.0]) | {"scores": [1.0]}

    batch = build(bad, TWO, skips_bad_groups=True)

    assert list(batch.summary.bad_groups) == [0]
    assert batch.summary.bad_groups[0].startswith("group 0: ")
    assert batch.summary.num_groups == 1
    with pytest.raises(GroupError, match="group 1: "):
        build(TWO, bad)
    with pytest.raises(GroupError, match="group 1: "):
        build(bad, bad, skips_bad_groups=True)


@pytest.mark.parametrize(
    ("changes", "scores_reference", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"overrides": [{"sft": True}, {"sft": True}]}, True, False),
        ({"ref_logprobs": [[1.0, 1.0, -1.0, -1.0], [1.0, 1.0, -1.0]]}, True, False),
    ],
)
def test_reference_is_needed_where_a_group_has_none(changes, scores_reference, expected):
    rules = RowRules(seq_len=64, uses_reference=scores_reference, scores_reference=scores_reference)

    assert build(TWO | changes, rules=rules).needs_reference is expected


@pytest.mark.parametrize(
    ("num_inputs", "num_computed", "expected"), [(8, 8, 0.0), (8, 6, 0.25), (0, 0, 0.0)]
)
def test_share_of_common_prefixes(num_inputs, num_computed, expected):
    summary = BatchSummary(0.0, 0.0, 0.0, 0.0, 1, 0, 0, 0, 0, num_inputs, num_computed, 0.0)

    assert summary.shared_prefix_fraction == expected


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0.0), ([3.0], 0.0), ([1.0, 3.0, 5.0], 8 / 3)]
)
def test_deviation_is_that_of_the_population(values, expected):
    _, deviation = _mean_and_deviation([torch.tensor(values)])

    assert deviation == pytest.approx(math.sqrt(expected))
