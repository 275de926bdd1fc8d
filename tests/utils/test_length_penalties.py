from __future__ import annotations

from typing import Any

import pytest

from helpers.length_penalties import ThresholdLengthPenaltyCalculator, ThresholdLengthPenaltyConfig


def penalize(group: dict[str, Any], threshold: float = 0.5) -> Any:
    config = ThresholdLengthPenaltyConfig(10, threshold)
    return ThresholdLengthPenaltyCalculator(config).apply_length_penalties(group)


def group_of(*lengths: int, score: float = 1.0) -> dict[str, Any]:
    return {"tokens": [[1] * n for n in lengths], "scores": [score] * len(lengths), "other": 1}


def test_a_right_group_is_ranked_by_length_in_place() -> None:
    group = group_of(3, 5, 8, 10, 12)

    # free up to 5; 8 is 3/5 of the way from 5 to 10
    assert penalize(group) is group
    assert group["scores"] == pytest.approx([1.0, 1.0, 0.4, 0.0, 0.0])
    assert group["other"] == 1


def test_a_group_with_a_wrong_answer_is_unchanged() -> None:
    group = group_of(3, 12)
    group["scores"] = [1.0, -1.0]

    assert penalize(group) is group
    assert group["scores"] == [1.0, -1.0]


@pytest.mark.parametrize(
    "group",
    [{}, {"scores": [1.0]}, {"tokens": [[1]]}, {"scores": [1.0, 1.0], "tokens": [[], []]}],
)
def test_a_group_without_tokens_or_scores_gives_none(group: dict[str, Any]) -> None:
    assert penalize(group) is None


def test_a_threshold_at_the_limit_is_a_step() -> None:
    assert penalize(group_of(10, 11), threshold=1.0)["scores"] == [1.0, 0.0]


def test_the_default_threshold_is_half() -> None:
    assert ThresholdLengthPenaltyConfig(100).threshold_percentage == 0.5
