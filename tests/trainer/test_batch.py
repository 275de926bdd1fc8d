"""From groups to tensors: the one causal shift, padding, splitting, and what is honoured."""

from __future__ import annotations

import pytest
import torch

from atroposlib.errors import GroupError
from example_trainer.batch import build_batch, make_microbatch, padded_length
from example_trainer.data import pad_data_to_good_offset
from example_trainer.rows import RowRules, rows_from_group
from tests.trainer.tiny import group

RULES = RowRules(seq_len=128)


@pytest.mark.parametrize(
    ("longest", "columns"), [(1, 64), (2, 64), (64, 64), (65, 64), (66, 128), (129, 128)]
)
def test_padded_length_is_the_next_multiple_of_64_after_the_shift(longest, columns):
    assert padded_length(longest) == columns


def test_microbatch_aligns_every_field_with_the_token_it_predicts():
    # tokens 1 2 3 | 7 8, so inputs 1 2 3 7 predict 2 3 7 8, of which 7 and 8 are trained.
    row = rows_from_group(
        group([[7, 8]], [1.0], advantages=[[0.0, 0.0, 0.0, 0.7, 0.8]])
        | {"inference_logprobs": [[1.0, 1.0, 1.0, -0.7, -0.8]]},
        RULES,
    )

    microbatch = make_microbatch(row)

    assert microbatch.tokens_BT[0, :5].tolist() == [1, 2, 3, 7, 0]
    assert microbatch.labels_BT[0, :5].tolist() == [-100, -100, 7, 8, -100]
    assert microbatch.advantages_BT[0, :5].tolist() == pytest.approx([0.0, 0.0, 0.7, 0.8, 0.0])
    expected = pytest.approx([1.0, 1.0, -0.7, -0.8, 1.0])
    assert microbatch.inference_logprobs_BT[0, :5].tolist() == expected
    assert microbatch.tokens_BT.shape == (1, 64)
    assert microbatch.advantages_BT.dtype == torch.float32


def test_microbatch_input_at_each_trained_position_is_the_token_before_its_label():
    tokens = list(range(1, 21))
    rows = rows_from_group({"tokens": [tokens], "masks": [tokens], "scores": [1.0]}, RULES)

    microbatch = make_microbatch(rows)

    trained = microbatch.labels_BT != -100
    assert torch.equal(microbatch.labels_BT[trained], microbatch.tokens_BT[trained] + 1)
    assert trained.sum() == len(tokens) - 1


@pytest.mark.parametrize(("pad_multiple", "columns"), [(1, 4), (8, 8), (64, 64)])
def test_batch_rows_are_padded_to_the_multiple_asked_for(pad_multiple, columns):
    # Five tokens, so four inputs.
    batch = build_batch(
        [group([[7, 8]], [1.0])], RULES, microbatch_size=1, pad_multiple=pad_multiple
    )

    assert batch.microbatches[0].tokens_BT.shape == (1, columns)


def test_batch_keeps_the_last_partial_microbatch_and_counts_the_whole():
    groups = [group([[7], [8, 9]], [1.0, 0.0]), group([[4, 5, 6]], [0.5])]

    batch = build_batch(groups, RULES, microbatch_size=2)

    assert [len(mb.tokens_BT) for mb in batch.microbatches] == [2, 1]
    assert batch.totals == (6, 3, 0, 0)
    assert batch.summary.score_mean == pytest.approx(0.5)


def test_batch_of_rows_without_trained_tokens_has_zero_totals():
    masked = {"tokens": [[1, 2], [3]], "masks": [[-100, -100], [-100]], "scores": [1.0, 0.0]}

    batch = build_batch([masked], RULES, microbatch_size=2)

    assert batch.totals == (0, 0, 0, 0)


def test_scores_become_population_advantages_broadcast_over_tokens():
    rows = rows_from_group(group([[7], [8, 9]], [1.0, 0.0]), RULES)

    assert rows[0].advantages == pytest.approx([1.0] * 4)
    assert rows[1].advantages == pytest.approx([-1.0] * 5)


def test_token_level_advantages_replace_the_scores():
    given = [[0.0, 0.0, 0.0, 0.3], [0.0, 0.0, 0.0, -0.2]]

    rows = rows_from_group(group([[7], [8]], [5.0, 1.0], advantages=given), RULES)

    assert [list(row.advantages) for row in rows] == given


def test_one_advantage_per_trajectory_is_broadcast():
    rows = rows_from_group(group([[7], [8]], [5.0, 1.0], advantages=[0.5, -0.5]), RULES)

    assert list(rows[1].advantages) == [-0.5] * 4


def test_override_silences_one_trajectory_after_normalisation():
    overrides = [{}, {"set_advantage_to_zero": True}]

    rows = rows_from_group(group([[7], [8]], [1.0, 0.0], overrides=overrides), RULES)

    assert rows[0].advantages == pytest.approx([1.0] * 4)
    assert not any(rows[1].advantages)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, 1.0),
        ({"group_overrides": {"temperature": 0.5}}, 0.5),
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 0.6}}, 0.6),
        (
            {"generation_params": {"temperature": 0.6}, "overrides": [{"temperature": 0.7}, {}]},
            0.7,
        ),
        ({"generation_params": {"temperature": 0.0}}, 1.0),
        ({"generation_params": {"temperature": None}}, 1.0),
    ],
)
def test_temperature_of_a_row_follows_the_priority_of_the_contract(sources, expected):
    rows = rows_from_group(group([[7], [8]], [1.0, 0.0], **sources), RULES)

    assert rows[0].temperature == expected


@pytest.mark.parametrize("never_filled", [None, []])
def test_missing_logprobs_become_placeholders(never_filled):
    unfilled = group([[7], [8]], [1.0, 0.0], inference_logprobs=never_filled)

    batch = build_batch([unfilled], RULES, microbatch_size=2)

    assert torch.equal(batch.microbatches[0].inference_logprobs_BT, torch.ones(2, 64))
    assert batch.summary.num_rows_without_logprobs == 2


def test_row_longer_than_seq_len_is_cut_and_counted():
    long = group([[7] * 20, [8]], [1.0, 0.0], logprob=-0.1)

    batch = build_batch([long], RowRules(seq_len=10), microbatch_size=2)

    assert batch.summary.num_truncated_rows == 1
    assert batch.totals.num_tokens == 7 + 1  # 10 tokens, 3 of them prompt, then the short row's one


def test_group_with_equal_scores_counts_as_silent():
    groups = [group([[7], [8]], [1.0, 1.0]), group([[7], [8]], [1.0, 0.0])]

    summary = build_batch(groups, RULES, microbatch_size=2).summary

    assert (summary.num_groups, summary.num_zero_gradient_groups) == (2, 1)


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"distill_token_ids": [[[1]], [[1]]]}, "distill_token_ids"),
        ({"distill_logprobs": [[[-1.0]], [[-1.0]]]}, "distill_logprobs"),
        ({"images": ["data:image/png;base64,"]}, "images"),
        ({"ref_logprobs": [[-1.0] * 4] * 2}, "ref_logprobs"),
        ({"group_overrides": {"loss_scale": 2}}, r"group_overrides\.loss_scale"),
        ({"overrides": [{}, {"loss_scale": 2}]}, r"overrides\[1\]\.loss_scale"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(extra, path):
    with pytest.raises(GroupError, match=f"group 3: {path}"):
        rows_from_group(group([[7], [8]], [1.0, 0.0], **extra), RULES, name="group 3")


def test_what_cannot_be_honoured_is_passed_over_on_request():
    rules = RowRules(seq_len=128, unsupported_fields="ignore")

    rows = rows_from_group(group([[7]], [1.0], images=["x"]), rules)

    assert len(rows) == 1


def test_ragged_advantages_are_refused_with_their_path():
    with pytest.raises(GroupError, match=r"group: advantages\[0\]: 2 entries, tokens\[0\] has 4"):
        rows_from_group(group([[7]], [1.0], advantages=[[0.1, 0.2]]), RULES)


def test_contract_door_pads_the_whole_batch_alike_and_returns_five_lists():
    groups = [group([[7] * 70, [8]], [1.0, 0.0], logprob=-0.5), group([[9]], [1.0])]

    collated = pad_data_to_good_offset({"batch": groups}, 2)

    assert [list(t.shape) for t in collated.tokens] == [[2, 128], [1, 128]]
    assert [list(a.shape) for a in collated.advantages] == [[2, 1], [1, 1]]
    assert [list(t.shape) for t in collated.temperatures] == [[2, 1, 1], [1, 1, 1]]
    assert collated.inference_logprobs is not None
    assert torch.equal(collated.inference_logprobs[1], torch.ones(1, 128))


def test_earlier_collation_shifts_after_padding_so_that_short_rows_keep_their_last_token():
    collated = pad_data_to_good_offset({"batch": [group([[7] * 62, [8, 9]], [1.0, 0.0])]}, 1)

    assert collated.tokens[0].tolist() == [[1, 2, 3] + [7] * 61]
    assert collated.tokens[1].tolist() == [[1, 2, 3, 8, 9] + [0] * 59]
    assert collated.labels[1].tolist() == [[-100, -100, 8, 9] + [-100] * 60]


def test_contract_door_without_any_logprobs_returns_none_for_them():
    collated = pad_data_to_good_offset({"batch": [group([[7]], [1.0])]}, 2)

    assert collated.inference_logprobs is None
