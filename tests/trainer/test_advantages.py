"""Group advantages against the numbers the peers' own functions produced."""

from __future__ import annotations

import pytest

from example_trainer.rows import group_advantages

REWARDS = [1.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("std", "eps", "expected"),
    [
        ("sample", 1e-6, [1.3055796924, -0.7833478154, -0.7833478154, 0.2611159385]),
        ("sample", 1e-4, [1.3053097494, -0.7831858496, -0.7831858496, 0.2610619499]),
        ("population", 0.0, [1.5075567229, -0.9045340337, -0.9045340337, 0.3015113446]),
        ("none", 0.0, [0.625, -0.375, -0.375, 0.125]),
    ],
    ids=["verl", "trl", "earlier-trainer", "dr-grpo"],
)
def test_group_advantages_of_the_oracle_equal_the_peers(std, eps, expected):
    assert group_advantages(REWARDS, std=std, eps=eps) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_group_advantages_of_equal_scores_are_zero_even_without_eps(std):
    assert group_advantages([0.1, 0.1, 0.1], std=std, eps=0.0) == [0.0, 0.0, 0.0]


def test_group_advantages_of_one_trajectory_keep_the_raw_score():
    assert group_advantages([0.7], std="sample", eps=1e-6) == [0.7]


def test_group_advantages_of_an_unknown_deviation_raise():
    with pytest.raises(AssertionError, match="auto"):
        group_advantages(REWARDS, std="auto", eps=0.0)
