"""The defaults of the hooks an author may leave out."""

from __future__ import annotations

from typing import ClassVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, EnvHooks, ServerBaseline
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig


def test_config_init_without_a_word_of_the_author_is_that_of_the_config_class() -> None:
    config, servers = BaseEnv.config_init()

    assert config == EnvHooks.env_config_cls()
    assert servers == ServerBaseline()


def test_config_init_takes_model_and_settings_of_the_class() -> None:
    class Game(MultiTurnEnv):
        default_model = "some/model"
        default_settings: ClassVar[dict[str, object]] = {"group_size": 8, "max_turns": 3}

    config, server = Game.config_init()

    expected = MultiTurnEnvConfig(group_size=8, max_turns=3, tokenizer_name="some/model")
    assert config == expected
    assert server == APIServerConfig(
        model_name="some/model", base_url="http://localhost:9001/v1", server_type="vllm"
    )


def test_config_init_keeps_a_tokenizer_of_the_settings_and_discovery_without_a_model() -> None:
    class Own(MultiTurnEnv):
        default_model = "some/model"
        default_settings: ClassVar[dict[str, object]] = {"tokenizer_name": "other"}

    class Discovered(Own):
        default_model = None

    assert Own.config_init()[0].tokenizer_name == "other"
    config, servers = Discovered.config_init()
    assert (config.tokenizer_name, servers) == ("other", ServerBaseline())
