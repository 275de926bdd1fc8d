"""Precedence of settings: defaults, what a command forces, YAML, flags; and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import BaseModel, Field

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.envs.settings import Defaults, Settings, layer_settings, shown_settings
from atroposlib.utils.cli import UsageError


class Nested(BaseModel):
    depth: int = 1
    width: int = 1


class SomeConfig(BaseEnvConfig):
    nested: Nested = Nested()
    table: dict[str, int] = Field(default_factory=dict)


def layered(
    command: str = "serve",
    *,
    yaml: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
    env_name: str | None = "some",
    **fields: Any,
) -> Settings:
    defaults = Defaults(SomeConfig, dict(SomeConfig(**fields)), [APIServerConfig(model_name="m")])
    return layer_settings(command, defaults, yaml or {}, flags or {}, env_name=env_name)


def test_layer_settings_later_layers_win() -> None:
    settings = layered(
        group_size=2,
        max_token_length=100,
        total_steps=5,
        yaml={"env": {"max_token_length": 200, "total_steps": 6}},
        flags={"env.total_steps": 7},
    )

    env = settings.env
    assert (env.group_size, env.max_token_length, env.total_steps) == (2, 200, 7)


def test_layer_settings_values_are_coerced_by_the_config_class() -> None:
    settings = layered(yaml={"env": {"worker_timeout": "1e-3"}}, flags={"env.group_size": "8"})

    assert (settings.env.worker_timeout, settings.env.group_size) == (1e-3, 8)
    assert isinstance(settings.env, SomeConfig)


def test_layer_settings_mappings_and_nested_models_are_merged() -> None:
    settings = layered(
        table={"a": 1},
        nested=Nested(depth=5),
        yaml={"env": {"table": {"b": 2}, "nested": {"width": 3}}},
        flags={"env.table": {"b": 4}},
    )

    assert settings.env.table == {"a": 1, "b": 4}
    assert settings.env.nested == Nested(depth=5, width=3)


def test_layer_settings_undeclared_keyword_of_config_init_survives_and_may_be_changed() -> None:
    assert layered(dataset_path="here").env.dataset_path == "here"
    changed = layered(dataset_path="here", yaml={"env": {"dataset_path": "there"}})
    assert changed.env.dataset_path == "there"


def test_layer_settings_none_replaces_a_value() -> None:
    settings = layered(min_batch_allocation=0.5, flags={"env.min_batch_allocation": None})

    assert settings.env.min_batch_allocation is None


@pytest.mark.parametrize(
    ("command", "forced"),
    [
        ("serve", {"wandb_name": "some"}),
        (
            "process",
            {
                "ensure_scores_are_not_same": False,
                "include_messages": True,
                "use_wandb": True,
                "data_path_to_save_groups": "data/some.jsonl",
            },
        ),
        ("evaluate", {"use_wandb": True}),
    ],
)
def test_layer_settings_command_forces_exactly_its_adjustments(
    command: str, forced: dict[str, Any]
) -> None:
    plain = SomeConfig(use_wandb=False).model_dump()

    settings = layered(command, use_wandb=False)

    assert settings.env.model_dump() == {**plain, **forced}


def test_layer_settings_process_without_a_name_writes_groups_jsonl() -> None:
    settings = layered("process", env_name=None)

    assert settings.env.data_path_to_save_groups == "data/groups.jsonl"


def test_layer_settings_process_keeps_config_init_values_and_an_output_path() -> None:
    settings = layered(
        "process", group_size=3, total_steps=11, data_path_to_save_groups="mine.jsonl"
    )

    env = settings.env
    assert (env.group_size, env.total_steps) == (3, 11)
    assert env.data_path_to_save_groups == "mine.jsonl"


def test_layer_settings_yaml_and_flags_override_what_a_command_forces() -> None:
    settings = layered(
        "process",
        yaml={"env": {"use_wandb": False, "include_messages": False}},
        flags={"env.include_messages": True},
    )

    assert (settings.env.use_wandb, settings.env.include_messages) == (False, True)


def test_layer_settings_serve_keeps_a_given_wandb_name() -> None:
    assert layered(wandb_name="mine").env.wandb_name == "mine"
    assert layered(flags={"env.wandb_name": None}).env.wandb_name is None


def test_layer_settings_manager_flags_override_yaml_and_default_to_false() -> None:
    defaults = layered().manager
    settings = layered(
        yaml={"slurm": True, "testing": True, "max_n_completions": 2, "proxy_url": "http://p"},
        flags={"slurm": False, "max_n_completions": 3},
    )

    assert (defaults.slurm, defaults.testing) == (False, False)
    manager = settings.manager
    assert (manager.slurm, manager.testing) == (False, True)
    assert (manager.max_n_completions, manager.proxy_url) == (3, "http://p")
    assert settings.manager_given == {"slurm", "testing", "max_n_completions", "proxy_url"}


@pytest.mark.parametrize("yaml", [{}, {"env": None, "openai": None, "slurm": None}, {"openai": []}])
def test_layer_settings_empty_sections_change_nothing(yaml: dict[str, Any]) -> None:
    assert layered(yaml=yaml) == layered()


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        (
            {"env": {"grup_size": 1, "total_stps": 2}},
            "did you mean env.group_size?\nenv.total_stps in the YAML file: no such setting",
        ),
        ({"env": {"grup_size": 1}}, "env.grup_size in the YAML file: no such setting; did you"),
        ({"env": {"grup_size": 1}}, "did you mean env.group_size?"),
        ({"openai": {"base_ulr": "x"}}, "did you mean openai.base_url?"),
        ({"openai": [{}, {"modle_name": "x"}]}, "did you mean openai.model_name?"),
        ({"openia": {}}, "unknown section openia: in the YAML file; did you mean openai?"),
        ({"env": [1]}, "env: expected settings by name"),
        ({"openai": "x"}, "openai: expected one server or a list of servers"),
        ({"openai": ["x"]}, "openai.0: expected the settings of a server"),
        ({"env": {"group_size": 0}}, "env.group_size: input should be greater than or equal to 1"),
        ({"env": {"eval_handling": "X"}}, "env.eval_handling: input should be 'STOP_TRAIN'"),
        ({"openai": {"server_type": "x"}}, "openai.server_type: input should be 'openai'"),
        ({"slurm": "perhaps"}, "slurm: input should be a valid boolean"),
        ({"env": {"max_reasoning_tokens": 1023}}, "env.max_reasoning_tokens"),
        ({"env": {"max_reasoning_tokens": 32001}}, "env.max_reasoning_tokens"),
    ],
)
def test_layer_settings_wrong_yaml_is_a_usage_error_that_names_the_place(
    yaml: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        layered(yaml=yaml)

    assert message in caught.value.message
    assert caught.value.exit_code == 2


def test_layer_settings_weight_under_a_server_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        settings = layered(yaml={"openai": {"model_name": "x", "weight": 1.0}})

    assert settings.servers[0].model_name == "x"  # type: ignore[index]
    assert "openai.weight has no effect" in caplog.text


def test_layer_settings_keys_that_earlier_environments_passed_cause_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    published = {"run_name": "r", "group_name": "g", "start_tok_length": 1, "debug_mode": True}

    with caplog.at_level(logging.WARNING):
        settings = layered(yaml={"env": {"group_size": 3, **published}})

    assert settings.env.group_size == 3
    assert settings.env.run_name == "r"
    assert "env.run_name in the YAML file is not a setting of this environment" in caplog.text


def test_layer_settings_another_programs_section_is_left_alone_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        settings = layered(yaml={"tinker": {"lr": 1}, "teacher": {"model_name": "t"}})

    assert settings == layered()
    assert "section tinker:" in caplog.text
    assert "teacher" not in caplog.text


def test_layer_settings_keys_that_resemble_no_setting_are_left_alone_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        settings = layered(yaml={"env": {"zzz": 3}, "openai": [{"zzz": 1, "model_name": "x"}]})

    assert settings.env.zzz == 3  # type: ignore[attr-defined]
    assert settings.servers[0].model_name == "x"  # type: ignore[index]
    assert "env.zzz in the YAML file is not a setting" in caplog.text
    assert "openai.zzz in the YAML file is not a setting" in caplog.text


def test_layer_settings_masked_secret_counts_as_not_given() -> None:
    defaults = Defaults(SomeConfig, {}, [APIServerConfig(api_key="real")])

    settings = layer_settings("evaluate", defaults, {"openai": [{"api_key": "***"}]}, {})

    assert settings.servers[0].api_key == "real"  # type: ignore[index]


def test_shown_settings_as_a_yaml_file_give_the_same_settings() -> None:
    flags = {"env.table": {"a": 1}, "openai.timeout": 3, "max_n_completions": 2, "testing": True}
    settings = layered(flags=flags, dataset_path="here")

    repeated = layered(yaml=shown_settings(settings), dataset_path="elsewhere")

    assert repeated[:3] == settings[:3]


def test_shown_settings_only_changed_leaves_defaults_and_empty_sections_out() -> None:
    server = APIServerConfig(base_url="http://me:pw@a/v1", api_key="k", model_name="default")
    settings = layer_settings("serve", Defaults(SomeConfig, {"group_size": 3}, [server]), {}, {})
    plain = layer_settings("serve", Defaults(SomeConfig, {}, []), {}, {})

    shown = shown_settings(settings, only_changed=True)

    assert shown == {
        "env": {"group_size": 3},
        "openai": [{"base_url": "http://***@a/v1", "api_key": "***"}],
    }
    assert shown_settings(plain, only_changed=True) == {}


def test_layer_settings_flags_of_a_baseline_are_used_under_every_command() -> None:
    defaults = Defaults(SomeConfig, {}, ServerBaseline(timeout=5))

    for command in ("serve", "process", "evaluate"):
        settings = layer_settings(command, defaults, {}, {"openai.base_url": "http://a/v1"})

        assert isinstance(settings.servers, APIServerConfig)
        assert (settings.servers.base_url, settings.servers.timeout) == ("http://a/v1", 5)


def test_layer_settings_flags_of_an_empty_server_list_are_used_under_every_command() -> None:
    defaults = Defaults(SomeConfig, {}, [])

    for command in ("serve", "process", "evaluate"):
        settings = layer_settings(command, defaults, {}, {"openai.base_url": "http://a/v1"})

        assert settings.servers == [APIServerConfig(base_url="http://a/v1")]
