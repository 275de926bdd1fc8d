from __future__ import annotations

import logging
from typing import Any

import pytest

from atroposlib.envs.reward_fns import RewardFunction
from atroposlib.envs.reward_fns.reward_function import one_per_completion
from tests.reward_fns.helpers import LengthReward, RaisingReward, RecordingLogger


def test_reward_function_is_abstract() -> None:
    with pytest.raises(TypeError, match="compute"):
        RewardFunction()  # type: ignore[abstract]


def test_attributes_hold_what_was_given() -> None:
    reward = LengthReward(2.0, "size", colour="red")

    assert (reward.weight, reward.name, reward.config) == (2.0, "size", {"colour": "red"})
    assert reward.wandb_logger is None
    assert LengthReward().name == "lengthreward"


def test_call_multiplies_by_the_weight_and_compute_does_not() -> None:
    reward = LengthReward(weight=0.5)

    assert reward(["ab", "abcd", ""]) == [1.0, 2.0, 0.0]
    assert reward.compute(["ab", "abcd", ""]) == [2, 4, 0]
    assert reward([]) == []


def test_call_logs_mean_min_and_max() -> None:
    reward, metrics = LengthReward(weight=0.5), RecordingLogger()
    reward.set_wandb_logger(metrics)

    reward(["ab", "abcd"])
    reward([])

    assert metrics.logged == [
        {
            "reward/lengthreward/mean_raw": 3.0,
            "reward/lengthreward/mean_weighted": 1.5,
            "reward/lengthreward/min": 2.0,
            "reward/lengthreward/max": 4.0,
        }
    ]


def test_call_passes_an_exception_on_and_counts_it() -> None:
    reward, metrics = RaisingReward(), RecordingLogger()
    reward.set_wandb_logger(metrics)

    for _ in range(2):
        with pytest.raises(KeyError, match="solution"):
            reward(["a"])

    assert reward.num_errors == 2
    assert metrics.logged[-1] == {"reward/raisingreward/num_errors": 2}


def test_call_gives_the_error_reward_when_errors_are_tolerated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = RaisingReward(tolerate_errors=True)

    assert reward(["a", "b"]) == [0.0, 0.0]
    assert reward.num_errors == 1
    assert reward.config == {}
    assert "KeyError" in caplog.text


def test_call_refuses_another_number_of_rewards() -> None:
    class Short(RewardFunction):
        def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
            return [1.0]

    with pytest.raises(ValueError, match="returned 1 values for 2 completions"):
        Short()(["a", "b"])


ASSISTANT = {"role": "assistant", "content": "hi"}
USER = {"role": "user", "content": "question"}


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("hi", "hi"),
        (ASSISTANT, "hi"),
        (USER, ""),
        ({"content": "no role"}, ""),
        ({"message": ASSISTANT}, "hi"),
        ({"message": USER}, ""),
        ([USER, ASSISTANT, {"role": "assistant", "content": "later"}], "hi"),
        ((USER, ASSISTANT), "hi"),
        ([USER], ""),
        ([], ""),
        (None, ""),
        (4, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, "a"),
    ],
)
def test_get_content(completion: Any, text: str) -> None:
    assert RewardFunction.get_content(completion) == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [("4", ["4", "4"]), (None, [None, None]), (["4", "5"], ["4", "5"]), (("4", "5"), ["4", "5"])],
)
def test_one_per_completion(value: Any, expected: list[Any]) -> None:
    assert one_per_completion(value, 2) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(["4"], ["4", None]), (["1", "2", "3"], ["1", "2"]), ([], [None, None])]
)
def test_one_per_completion_reports_a_wrong_length(
    value: list[str], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert one_per_completion(value, 2) == expected

    assert f"{len(value)} gold answers for 2 completions" in caplog.text
