"""Constructor conventions of existing environments: each gets what it accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.running import accepted_arguments, build_environment, missing_methods
from atroposlib.envs.server_handling.config import APIServerConfig, ServerManagerConfig
from atroposlib.envs.settings import Settings
from atroposlib.envs.single_turn_env import SingleTurnEnv
from atroposlib.errors import ConfigError

STANDARD = {"config": "c", "server_configs": "s", "slurm": True, "testing": False}


def usual(config, server_configs, slurm=False, testing=False): ...
def renamed(config, server_configs, slurm_job_id=None, testing=False): ...
def with_teacher(
    config, server_configs, teacher_server_configs=None, slurm=False, testing=False
): ...
def all_keywords(**kwargs): ...
def all_words(*args, **kwargs): ...
def some_keywords(config, server_configs, **kwargs): ...
def own_third(config, server_configs, dataset=None): ...
def own_third_and_keywords(config, server_configs, dataset=None, **kwargs): ...
def required_names(env_config, servers, cluster, dry): ...
def only_two(config, server_configs): ...


@pytest.mark.parametrize(
    ("constructor", "arguments"),
    [
        (usual, STANDARD),
        (
            renamed,
            {"config": "c", "server_configs": "s", "slurm_job_id": True, "testing": False},
        ),
        (with_teacher, {**STANDARD, "teacher_server_configs": "t"}),
        (all_keywords, {**STANDARD, "teacher_server_configs": "t"}),
        (all_words, {**STANDARD, "teacher_server_configs": "t"}),
        (some_keywords, {**STANDARD, "teacher_server_configs": "t"}),
        (own_third, {"config": "c", "server_configs": "s"}),
        (own_third_and_keywords, {**STANDARD, "teacher_server_configs": "t"}),
        (required_names, {"env_config": "c", "servers": "s", "cluster": True, "dry": False}),
        (only_two, {"config": "c", "server_configs": "s"}),
    ],
)
def test_accepted_arguments_match_the_constructor(
    constructor: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    parameters = inspect.signature(constructor).parameters

    accepted = accepted_arguments(parameters, STANDARD, {"teacher_server_configs": "t"})

    assert accepted == arguments
    constructor(**accepted)


class OnlyWords:
    def __init__(self, *args: Any) -> None:
        self.args = args


class ConfigAndWords(OnlyWords):
    def __init__(self, config: Any, *args: Any) -> None:
        super().__init__(config, *args)


class NamelessParameters(OnlyWords):
    def __init__(self, config: Any, servers: Any, slurm: bool, testing: bool, /) -> None:
        super().__init__(config, servers, slurm, testing)


@pytest.mark.parametrize("env_cls", [OnlyWords, ConfigAndWords, NamelessParameters])
def test_build_environment_constructor_without_names_gets_all_four_by_position(
    env_cls: type[OnlyWords],
) -> None:
    config, server = BaseEnvConfig(), APIServerConfig()
    manager = ServerManagerConfig(slurm=True)

    env = build_environment(env_cls, Settings(config, [server], manager, frozenset()))

    assert env.args == (config, [server], True, False)


class WithoutEvaluation(BaseEnv):
    async def get_next_item(self) -> Any:
        return 1


def test_missing_methods_give_the_lines_to_write() -> None:
    assert missing_methods(OnlyWords) == {}
    assert missing_methods(BaseEnv) == {
        "evaluate": "async def evaluate(self, *args, **kwargs)",
        "get_next_item": "async def get_next_item(self)",
    }
    assert missing_methods(SingleTurnEnv)["prompt"] == "def prompt(self, item)"


def test_build_environment_incomplete_class_names_class_file_and_methods() -> None:
    settings = Settings(BaseEnvConfig(), [], ServerManagerConfig(), frozenset())

    with pytest.raises(ConfigError) as caught:
        build_environment(WithoutEvaluation, settings)

    assert str(caught.value) == (
        f"WithoutEvaluation in {__file__} is not complete: "
        "write `async def evaluate(self, *args, **kwargs)`"
    )
