"""Make the command classes of one environment: a field per flag, named `env.group_size`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model

from atroposlib.envs.command_classes import (
    DATASET_PATH_FLAG,
    JSON_FLAG,
    CheckCommand,
    EnvCommand,
    EvaluateCommand,
    ProcessCommand,
    ServeCommand,
)
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.config_layers import (
    ENV_PREFIX,
    OPENAI_PREFIX,
    Defaults,
    field_values,
    forced_env_settings,
    single_server_settings,
)
from atroposlib.envs.flags import is_structured
from atroposlib.envs.server_handling.config import ServerBaseline, ServerManagerConfig
from atroposlib.envs.server_handling.resolve import server_class_of
from atroposlib.utils.cli import refused_values

__all__ = [
    "check_command",
    "environment_defaults",
    "evaluate_command",
    "flag_fields",
    "process_command",
    "serve_command",
]

Command = TypeVar("Command", bound=EnvCommand)

CHECK_FLAGS: dict[str, Any] = {
    DATASET_PATH_FLAG: (
        str | None,
        Field(None, description="Small local data set, handed on as env.dataset_path."),
    ),
    JSON_FLAG: (str | None, Field(None, description="File for the report as JSON.")),
}


def serve_command(env_cls: type[Any]) -> type[ServeCommand]:
    """The `serve` command of an environment class."""
    return _made_for(env_cls, ServeCommand)


def process_command(env_cls: type[Any]) -> type[ProcessCommand]:
    """The `process` command of an environment class."""
    return _made_for(env_cls, ProcessCommand)


def evaluate_command(env_cls: type[Any]) -> type[EvaluateCommand]:
    """The `evaluate` command of an environment class."""
    return _made_for(env_cls, EvaluateCommand)


def check_command(env_cls: type[Any]) -> type[CheckCommand]:
    """The `check` command of an environment class; its `check_settings` go before the defaults."""
    with warnings.catch_warnings():
        # The flag is --json; pydantic has a deprecated method of that name.
        warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)
        # What only looks like an environment may have no settings of its own for a check.
        own_settings = getattr(env_cls, "check_settings", {})
        return _made_for(env_cls, CheckCommand, CHECK_FLAGS, own_settings)


def environment_defaults(env_cls: type[Any]) -> Defaults:
    """Call `config_init` of an environment.

    An environment whose config has required fields and no `config_init` of its own starts from
    the class defaults: the YAML file or flags must then bring the rest.

    Raises:
        UsageError: `config_init` itself uses values that the config class refuses.
    """
    try:
        config, servers = env_cls.config_init()
    except ValidationError as error:
        config_class: type[BaseEnvConfig] = env_cls.env_config_cls
        incomplete = all(detail["type"] == "missing" for detail in error.errors())
        if not incomplete or error.title != config_class.__name__:
            raise refused_values(error, "config_init: ") from error
        optional = {
            name: field.get_default(call_default_factory=True)
            for name, field in config_class.model_fields.items()
            if not field.is_required()
        }
        return Defaults(config_class, optional, ServerBaseline())
    return Defaults(type(config), field_values(config), servers)


def flag_fields(
    model_class: type[BaseModel], prefix: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Field definitions of the flags for one settings class, as `create_model` takes them.

    Args:
        model_class: The settings class.
        prefix: Before each name, separator included: `env.`.
        values: Effective defaults; missing ones are the class's. A required setting becomes a flag
            that may be left out, because the YAML file may bring it.
    """
    definitions: dict[str, Any] = {}
    for name, field in model_class.model_fields.items():
        annotation: Any = field.annotation
        if is_structured(annotation):
            annotation = dict[str, Any] | annotation
        description = field.description or ""
        if name in values:
            default = values[name]
        elif field.is_required():
            default, description = None, f"{description} Must be set here or in the YAML file."
        else:
            default = field.get_default(call_default_factory=True)
        flag = Field(default, description=description.strip())
        definitions[f"{prefix}{name}"] = (annotation, flag)
    return definitions


def _made_for(
    env_cls: type[Any],
    kind: type[Command],
    own_flags: Mapping[str, Any] = MappingProxyType({}),
    own_settings: Mapping[str, Any] = MappingProxyType({}),
) -> type[Command]:
    defaults = environment_defaults(env_cls)
    defaults = defaults._replace(env_settings={**defaults.env_settings, **own_settings})
    forced = forced_env_settings(kind.command, defaults.env_settings, env_name=env_cls.name)
    fields = {
        **flag_fields(defaults.config_class, ENV_PREFIX, {**defaults.env_settings, **forced}),
        **flag_fields(
            server_class_of(defaults.servers),
            OPENAI_PREFIX,
            single_server_settings(defaults.servers),
        ),
        **flag_fields(ServerManagerConfig, "", {}),
        **own_flags,
    }
    made: type[Command] = create_model(
        f"{env_cls.__name__}{kind.__name__}", __base__=kind, __doc__=kind.__doc__, **fields
    )
    made.env_cls, made.defaults = env_cls, defaults
    return made
