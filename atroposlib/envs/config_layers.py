"""Layer the settings of a run: defaults, then the YAML file, then flags. Pure.

config_init ──┐
forced ───────┼─► merge ─► validated by the environment's own config class
YAML env: ────┤
--env.* ──────┘            (servers: the same without `forced`, then `resolve_openai_configs`)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.server_handling.config import ServerBaseline, ServerManagerConfig
from atroposlib.envs.server_handling.resolve import (
    ServerConfigs,
    resolve_openai_configs,
    server_class_of,
    server_entries,
)
from atroposlib.utils.cli import (
    UsageError,
    extract_namespace,
    merge_dicts,
    near_name,
    refused_values,
)
from atroposlib.utils.secret_masking import is_masked

__all__ = [
    "COMMANDS",
    "ENV_PREFIX",
    "OPENAI_PREFIX",
    "Defaults",
    "Settings",
    "field_values",
    "forced_env_settings",
    "layer_settings",
    "server_layers",
    "single_server_settings",
    "yaml_layers",
]

logger = logging.getLogger(__name__)

COMMANDS = ("serve", "process", "evaluate", "check")

ENV_PREFIX = f"{ENV_NAMESPACE}{NAMESPACE_SEP}"
OPENAI_PREFIX = f"{OPENAI_NAMESPACE}{NAMESPACE_SEP}"

TOLERATED_SERVER_KEYS = frozenset({"weight"})
"""Keys that published YAML files have under a server although they mean nothing."""

EXTRA_SECTIONS = frozenset({"teacher"})
"""Top-level sections that only some commands read, so that one file serves all of them."""


class Defaults(NamedTuple):
    """What an environment brings along: the two results of its `config_init`."""

    config_class: type[BaseEnvConfig]
    env_settings: Mapping[str, Any]
    """Field values of the environment's config, undeclared extras included."""
    servers: ServerConfigs


class Settings(NamedTuple):
    """The effective settings of one run."""

    env: BaseEnvConfig
    servers: ServerConfigs
    manager: ServerManagerConfig
    manager_given: frozenset[str]
    """Fields of `manager` that the YAML file or a flag set, as opposed to its own defaults."""


def field_values(model: BaseModel) -> dict[str, Any]:
    """The values of a model by field name, nested models kept as they are."""
    return dict(model)


def forced_env_settings(
    command: str, env_settings: Mapping[str, Any], *, env_name: str | None
) -> dict[str, Any]:
    """What a command changes in the environment's own defaults; YAML and flags still win.

    Args:
        command: One of `COMMANDS`.
        env_settings: The environment's defaults.
        env_name: The class attribute `name`.
    """
    if command == "serve":
        unnamed = env_settings.get("wandb_name") is None and env_name is not None
        return {"wandb_name": env_name} if unnamed else {}
    if command == "evaluate":
        return {"use_wandb": True}
    if command == "check":
        # There is neither an account nor a teacher to ask.
        return {
            "use_wandb": False,
            **({"teacher_enabled": False} if "teacher_enabled" in env_settings else {}),
        }
    forced: dict[str, Any] = {
        "ensure_scores_are_not_same": False,
        "include_messages": True,
        "use_wandb": True,
    }
    if env_settings.get("data_path_to_save_groups") is None:
        forced["data_path_to_save_groups"] = f"data/{env_name or 'groups'}.jsonl"
    return forced


def layer_settings(
    command: str,
    defaults: Defaults,
    yaml_config: Mapping[str, Any],
    flags: Mapping[str, Any],
    *,
    env_name: str | None = None,
) -> Settings:
    """Merge the layers of one command into validated settings.

    Args:
        command: One of `COMMANDS`.
        defaults: What the environment brings along.
        yaml_config: The YAML file as parsed; empty when there is none.
        flags: Typed flags by full name (`env.group_size`), values as `read_flags` gives them.
        env_name: The environment's class attribute `name`.

    Raises:
        UsageError: an unknown key, a refused value, or settings that contradict each other.
    """
    sections = yaml_layers(yaml_config, defaults)
    env_settings = merge_dicts(
        _opened(defaults.env_settings, {**sections.env, **extract_namespace(flags, ENV_PREFIX)}),
        forced_env_settings(command, defaults.env_settings, env_name=env_name),
        sections.env,
        extract_namespace(flags, ENV_PREFIX),
    )
    server_settings = merge_dicts(
        single_server_settings(defaults.servers),
        sections.servers[0] if len(sections.servers) == 1 else {},
        extract_namespace(flags, OPENAI_PREFIX),
    )
    manager_flags = {key: flags[key] for key in ServerManagerConfig.model_fields if key in flags}
    manager_settings = merge_dicts(sections.manager, manager_flags)
    return Settings(
        env=_validated(defaults.config_class, env_settings, ENV_PREFIX),
        servers=resolve_openai_configs(
            default_server_configs=defaults.servers,
            openai_config_dict=server_settings,
            yaml_config={OPENAI_NAMESPACE: sections.servers},
            cli_passed_flags=flags,
            logger=logger,
        ),
        manager=_validated(ServerManagerConfig, manager_settings, ""),
        manager_given=frozenset(manager_settings),
    )


class YamlLayers(NamedTuple):
    """The parts of a YAML file, each checked for unknown keys."""

    env: dict[str, Any]
    servers: list[dict[str, Any]]
    manager: dict[str, Any]


def yaml_layers(yaml_config: Mapping[str, Any], defaults: Defaults) -> YamlLayers:
    """Split a parsed YAML file into its parts.

    A section without content is empty. Masked secrets, as `evaluate_config.yaml` has them, count
    as not given. A key that resembles no known one is another program's: it is left alone with a
    warning; under `env` it becomes an attribute of the config.

    Raises:
        UsageError: a section has the wrong shape, or a key looks misspelt.
    """
    manager_keys = set(ServerManagerConfig.model_fields)
    sections = {ENV_NAMESPACE, OPENAI_NAMESPACE, *manager_keys, *EXTRA_SECTIONS}
    for key in yaml_config.keys() - sections:
        hint = near_name(str(key), sections)
        if hint:
            raise UsageError(f"unknown section {key}: in the YAML file{hint}")
        logger.warning("section %s: of the YAML file is not used by this command", key)
    env = yaml_config.get(ENV_NAMESPACE) or {}
    if not isinstance(env, Mapping):
        raise UsageError(f"{ENV_NAMESPACE}: expected settings by name, got {env!r}")
    _unknown_keys(env, {*defaults.config_class.model_fields, *defaults.env_settings}, ENV_PREFIX)
    return YamlLayers(
        env=_without_masked(env),
        servers=server_layers(yaml_config.get(OPENAI_NAMESPACE), server_class_of(defaults.servers)),
        manager={key: yaml_config[key] for key in manager_keys if yaml_config.get(key) is not None},
    )


def server_layers(section: Any, server_class: type[BaseModel]) -> list[dict[str, Any]]:
    """The servers of a YAML section, without unknown keys and masked secrets.

    Args:
        section: One server, a list of servers, or nothing.
        server_class: Whose fields are known.

    Raises:
        UsageError: the section has the wrong shape, or a key looks misspelt.
    """
    servers = server_entries(section)
    known = set(server_class.model_fields)
    for entry in servers:
        for key in _unknown_keys(entry, known | TOLERATED_SERVER_KEYS, OPENAI_PREFIX):
            del entry[key]
        for key in TOLERATED_SERVER_KEYS & entry.keys() - known:
            logger.warning("openai.%s means nothing and is left out", key)
            del entry[key]
    return [_without_masked(entry) for entry in servers]


def single_server_settings(servers: ServerConfigs) -> dict[str, Any]:
    """The environment's own settings of its one server; empty when it lists none or several."""
    if isinstance(servers, list | tuple):
        return field_values(servers[0]) if len(servers) == 1 else {}
    return field_values(servers) if isinstance(servers, ServerBaseline) else {}


def _unknown_keys(given: Iterable[Any], known: set[str], prefix: str) -> list[Any]:
    """The keys that are no setting, each with a warning; one that resembles a setting is refused.

    A misspelt setting must not be overlooked; what resembles none is somebody else's.
    """
    full_names = sorted(prefix + name for name in known)
    unknown = [key for key in given if key not in known]
    hints = {key: near_name(f"{prefix}{key}", full_names) for key in unknown}
    misspelt = [
        f"{prefix}{key} in the YAML file: no such setting{hint}"
        for key, hint in hints.items()
        if hint
    ]
    if misspelt:
        raise UsageError("\n".join(misspelt))
    for key in unknown:
        logger.warning("%s%s in the YAML file is no setting of this environment", prefix, key)
    return unknown


def _without_masked(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if not is_masked(value)}


def _opened(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested models that a mapping will change, as mappings, so that merging reaches inside."""
    return {
        key: dict(value)
        if isinstance(value, BaseModel) and isinstance(changes.get(key), Mapping)
        else value
        for key, value in settings.items()
    }


def _validated(model_class: type[Any], settings: Mapping[str, Any], prefix: str) -> Any:
    try:
        return model_class(**settings)
    except ValidationError as error:
        raise refused_values(error, prefix) from error
