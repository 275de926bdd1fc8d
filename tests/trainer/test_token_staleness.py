"""Tokens of old policy versions: counted by age, and masked as if the group had masked them."""

from __future__ import annotations

import pytest
import torch

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError, GroupError
from atroposlib.scored_data import IGNORE_INDEX
from example_trainer.api import TrajectoryFeed
from example_trainer.batch import build_batch
from example_trainer.metrics import group_metrics, token_staleness_metrics
from example_trainer.rows import RowRules, mask_old_tokens, rows_from_group, version_runs_of
from example_trainer.training import row_rules
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group, tiny_config, tiny_llama

STEP = 10
RUNS = [[[None, 3], [7, 1], [8, 1], [10, 2]], [[None, 3], [9, 4]], None]
"""Three trajectories: four tokens of the versions 7, 8, 10 and 10, of 9, and of unknown ones."""


def aged_group(**extra):
    completions = [[7, 8, 9, 4], [5, 6, 7, 8], [9, 9, 8, 8]]
    return group(
        completions, [1.0, 0.0, 0.5], logprob=-3.0, token_versions=RUNS, policy_version=7, **extra
    )


def test_labels_of_earlier_versions_are_masked():
    labels = [IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 7, 8, 9, 4]

    assert mask_old_tokens(labels, RUNS[0], 8) == [*[IGNORE_INDEX] * 4, 8, 9, 4]
    assert mask_old_tokens(labels, RUNS[0], 9) == [*[IGNORE_INDEX] * 5, 9, 4]
    assert mask_old_tokens(labels, RUNS[0], 0) == labels
    assert mask_old_tokens(labels[:5], RUNS[0], 8) == [*[IGNORE_INDEX] * 4, 8]  # truncated
    assert mask_old_tokens(labels, [(None, 7)], 99) == labels


def test_group_without_runs_was_sampled_with_its_version():
    plain = group([[7], [8, 9]], [1.0, 0.0], policy_version=4)

    assert version_runs_of(plain, 1) == [(4, 5)]
    assert version_runs_of(aged_group(), 2) == [(None, 7)]


def test_trajectories_of_unknown_versions_are_kept_whatever_the_version_of_their_group():
    unknown = aged_group() | {"token_versions": [None, None, None]}
    rules = RowRules(seq_len=64, oldest_version=8)

    rows = rows_from_group(unknown, rules)

    assert [row.labels for row in rows] == unknown["masks"]


def test_runs_of_other_lengths_are_refused_with_their_place():
    broken = aged_group() | {"token_versions": [RUNS[0], [[7, 3]], None]}

    with pytest.raises(GroupError, match=r"token_versions\[1\]: runs of 3 tokens, tokens\[1\]"):
        rows_from_group(broken, RowRules(seq_len=64, oldest_version=8))


def gradient_of(tmp_path, given, *, max_token_staleness=None, packing="on", **settings):
    """Return the gradient and the metrics of one step after `STEP` completed ones."""
    model = tiny_llama(dtype=torch.float64)
    trainer = make_trainer(
        tmp_path,
        model=model,
        groups=[given],
        logprobs_mode="processed",
        packing=packing,
        max_token_staleness=max_token_staleness,
        **settings,
    )
    trainer.steps_done = STEP
    found = []
    trainer._optimizer.step = lambda: found.extend(p.grad.clone() for p in model.parameters())
    metrics = trainer.train_on(trainer._build(LeasedBatch([given], "1-1")))
    return torch.cat([g.flatten() for g in found]), metrics


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
def test_masking_by_age_equals_masking_by_hand(tmp_path, packing, algorithm):
    by_hand = aged_group()
    by_hand["masks"][0][3:5] = [IGNORE_INDEX] * 2  # versions 7 and 8, older than 10 - 1

    masked, metrics = gradient_of(
        tmp_path, aged_group(), max_token_staleness=1, packing=packing, algorithm=algorithm
    )
    expected, by_hand_metrics = gradient_of(tmp_path, by_hand, packing=packing, algorithm=algorithm)
    unmasked, _ = gradient_of(tmp_path, aged_group(), packing=packing, algorithm=algorithm)

    assert torch.allclose(masked, expected, rtol=0.0, atol=1e-12)
    assert (masked - unmasked).abs().max() > 1e-6
    assert metrics["train/loss"] == pytest.approx(by_hand_metrics["train/loss"], abs=1e-12)
    assert metrics["train/trained_tokens"] == by_hand_metrics["train/trained_tokens"] == 10.0


def test_advantages_and_the_length_penalty_are_those_of_the_whole_group():
    rules = RowRules(seq_len=64, overlong_max_tokens=4, overlong_buffer_tokens=2)
    whole = rows_from_group(aged_group(), rules)
    masked = rows_from_group(aged_group(), RowRules(**{**vars(rules), "oldest_version": 11}))

    assert [row.advantages for row in masked] == [row.advantages for row in whole]
    assert all(label == IGNORE_INDEX for label in masked[1].labels)
    assert masked[2].labels == whole[2].labels  # of unknown versions


def test_demonstrations_are_never_too_old():
    given = aged_group(overrides=[{"sft": True}, {}, {}])

    rows = rows_from_group(given, RowRules(seq_len=64, oldest_version=11))

    assert [label != IGNORE_INDEX for label in rows[0].labels] == [False] * 3 + [True] * 4


def test_staleness_is_measured_per_token():
    metrics = token_staleness_metrics([aged_group()], step=STEP, seq_len=64, max_staleness=1)

    assert metrics == {
        "train/stale_tokens_masked": 2.0,
        "train/token_staleness_mean": (3 + 2 + 0 + 0 + 4 * 1) / 8,
        "train/token_staleness_max": 3.0,
        "train/token_staleness_unknown_fraction": pytest.approx(4 / 12),
        "train/token_staleness_0_fraction": pytest.approx(2 / 12),
        "train/token_staleness_1_fraction": pytest.approx(4 / 12),
        "train/token_staleness_2_to_3_fraction": pytest.approx(2 / 12),
        "train/token_staleness_4_or_more_fraction": 0.0,
    }


def test_tokens_beyond_the_row_and_of_versions_to_come_do_not_count():
    given = aged_group() | {"token_versions": [RUNS[0], [[None, 3], [11, 4]], None]}

    metrics = token_staleness_metrics([given], step=STEP, seq_len=5, max_staleness=None)

    assert metrics["train/token_staleness_mean"] == (3 + 2) / 2
    assert metrics["train/token_staleness_unknown_fraction"] == pytest.approx(4 / 6)
    unknown = group([[7]], [1.0], policy_version=STEP + 1)
    assert not token_staleness_metrics([unknown], step=STEP, seq_len=5, max_staleness=None)


def test_step_metrics_contain_those_of_tokens():
    metrics = group_metrics([aged_group()], step=STEP, seq_len=64, max_token_staleness=2)

    assert metrics["train/stale_tokens_masked"] == 1.0
    assert metrics["train/staleness_max"] == 3.0


def test_without_the_setting_nothing_is_masked(tmp_path):
    rules = row_rules(tiny_config(tmp_path))
    batch = build_batch([aged_group()], rules, microbatch_size=4)

    assert rules.oldest_version is None
    assert batch.totals.num_tokens == 12


def test_setting_below_zero_is_refused(tmp_path):
    with pytest.raises((ConfigError, ValueError), match="max_token_staleness"):
        tiny_config(tmp_path, max_token_staleness=-1)


def test_opaque_columns_are_left_out_on_arrival(tmp_path):
    class Client:
        def batch(self, **_):
            return LeasedBatch([aged_group(columns={"routed_experts": [[1] * 7] * 3})], "1-1")

    feed = TrajectoryFeed(Client(), tiny_config(tmp_path))

    (received,) = feed.next_batch(0).groups

    assert "columns" not in received
    assert received["token_versions"] == RUNS
