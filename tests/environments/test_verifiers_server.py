"""`verifiers_server.py`: its settings, without the package; `tests/adapters` plays it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.envs.commands import load_yaml, serve_command
from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.errors import ConfigError
from environments.verifiers_server import VerifiersEnv, VfEnvConfig, rubric_metrics

CONFIG = Path(__file__).parents[2] / "environments" / "configs" / "verifiers.yaml"


def test_file_of_settings_is_read() -> None:
    settings = serve_command(VerifiersEnv)().layered(load_yaml(str(CONFIG)))

    assert settings.env.adapter == "verifiers:sophistry-bench-sprint"
    assert settings.env.adapter_args == {"env_args": {"n_items": 50}}


@pytest.mark.parametrize("given", ['{"n": 3}', {"n": 3}])
def test_arguments_are_json_or_a_mapping(given: Any) -> None:
    config = VfEnvConfig(
        vf_env_name="x", env_args=given, adapter_args={"shuffle": False, "env_args": {"m": 1}}
    )

    assert config.adapter == "verifiers:x"
    assert config.adapter_args == {"shuffle": False, "env_args": {"m": 1, "n": 3}}


@pytest.mark.parametrize("given", ["[1]", "{n: 3"])
def test_arguments_that_are_no_object_are_refused(given: str) -> None:
    with pytest.raises(ValidationError, match="env_args: expected a JSON object, got"):
        VfEnvConfig(vf_env_name="x", env_args=given)


def rollout(reward: float, turns: float) -> Rollout:
    return Rollout(
        sequences=[],
        rewards=[reward],
        reward_parts=[{"right": reward}],
        messages=[],
        outcome="done",
        metrics={"num_turns": turns},
    )


def test_missing_name_of_the_environment_is_refused_with_its_setting() -> None:
    config, _ = VerifiersEnv.config_init()

    with pytest.raises(ConfigError, match=r"set --env\.vf_env_name"):
        VerifiersEnv.check_inputs(config)


def test_metrics_are_means_over_rollouts() -> None:
    groups = [[rollout(1.0, 2), rollout(1.0, 4)], [rollout(0.0, 1), rollout(2.0, 1)]]

    metrics = rubric_metrics(groups, discount=1.0)

    assert metrics == {
        "metrics/mean_reward": 1.0,
        "metrics/reward_std": pytest.approx(math.sqrt(0.5)),
        "metrics/avg_num_turns": 2.0,
        "metrics/max_num_turns": 4,
        "metrics/groups_with_identical_scores": 1.0,
        "metrics/groups_total": 2.0,
        "metrics/identical_score_rate": 0.5,
        "metrics/right": 1.0,
        "metrics/num_turns": 2.0,
    }
    assert rubric_metrics([], discount=1.0) == {}
