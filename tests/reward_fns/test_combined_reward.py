from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.reward_fns import CombinedReward, registry
from atroposlib.errors import ConfigError
from tests.reward_fns.helpers import ConstantReward, LengthReward, RaisingReward, RecordingLogger


@pytest.fixture(autouse=True)
def _registered(own_registrations: None) -> None:
    for cls in (ConstantReward, LengthReward, RaisingReward):
        registry.register(cls)


TWO_AND_THREE = [{"type": "constant", "weight": 2.0}, {"type": "constant", "weight": 3.0}]


@pytest.mark.parametrize(
    ("rewards", "normalization", "expected"),
    [
        (TWO_AND_THREE, "none", [5.0, 5.0]),  # 2 x 1 + 3 x 1
        (TWO_AND_THREE, "sum", [1.0, 1.0]),  # 5 / (2 + 3)
        (TWO_AND_THREE, "minmax", [5.0, 5.0]),  # all equal: nothing to stretch
        (["length"], "minmax", [0.0, 1.0]),  # 1 and 3 characters
        (["length", {"type": "constant", "weight": -1.0}], "none", [0.0, 2.0]),
        (
            [{"type": "constant", "weight": -1.0}],
            "sum",
            [-1.0, -1.0],
        ),  # sum of weights not positive
        ([], "none", [0.0, 0.0]),
    ],
)
def test_compute(rewards: list[Any], normalization: Any, expected: list[float]) -> None:
    reward = CombinedReward(rewards, normalization=normalization)

    assert reward.compute(["a", "abc"]) == expected
    assert reward.compute([]) == []


def test_weight_applies_to_the_sum() -> None:
    assert CombinedReward(TWO_AND_THREE, weight=0.5)(["a"]) == [2.5]


def test_name_joins_the_names_of_the_parts() -> None:
    assert CombinedReward(["accuracy", "r1"]).name == "combined(accuracyreward,r1reward)"


def test_keywords_reach_every_part() -> None:
    reward = registry.create({"type": "combined", "rewards": ["accuracy", "accuracyx"]})

    assert reward(["\\boxed{4}", "4", "5"], solution="4", item=object()) == [2.0, 1.0, 0.0]


def test_set_wandb_logger_reaches_the_parts() -> None:
    reward, metrics = CombinedReward(TWO_AND_THREE), RecordingLogger()
    reward.set_wandb_logger(metrics)

    reward(["a"])

    assert all(part.wandb_logger is metrics for part in reward.reward_functions)
    assert [m for logged in metrics.logged for m in logged if m.endswith("mean_weighted")] == [
        "reward/constantreward/mean_weighted",
        "reward/constantreward/mean_weighted",
        "reward/combined(constantreward,constantreward)/mean_weighted",
    ]


def test_a_part_that_raises_stops_the_call() -> None:
    reward = CombinedReward(["constant", "raising"])

    with pytest.raises(KeyError):
        reward(["a"])

    assert (reward.num_errors, reward.reward_functions[1].num_errors) == (1, 1)


@pytest.mark.parametrize(
    "reward",
    [
        lambda: CombinedReward(["constant", "raising"], tolerate_errors=True),
        lambda: CombinedReward(["constant", {"type": "raising", "tolerate_errors": True}]),
    ],
)
def test_a_part_whose_errors_are_tolerated_is_left_out(
    reward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    combined = reward()

    assert combined(["a", "b"]) == [1.0, 1.0]
    assert combined.reward_functions[1].num_errors == 1
    assert "KeyError" in caplog.text


def test_an_unknown_normalization_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of none, sum, minmax"):
        CombinedReward([], normalization="mean")  # type: ignore[arg-type]


def test_parts_add_up_to_the_reward() -> None:
    combined = CombinedReward(
        ["accuracy", {"type": "accuracy", "weight": 3.0}], normalization="sum", weight=2.0
    )

    parts = combined.parts(["\\boxed{4}", "5"], solution="4")

    assert parts[0] == {"accuracyreward": 0.5, "accuracyreward_2": 1.5}
    assert [sum(each.values()) for each in parts] == combined(["\\boxed{4}", "5"], solution="4")
    with pytest.raises(ConfigError, match="minmax"):
        CombinedReward(["accuracy"], normalization="minmax").parts(["4"], solution="4")
