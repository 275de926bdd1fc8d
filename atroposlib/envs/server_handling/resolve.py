"""Decide which inference servers an environment uses: one, several, or the discovered ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.utils.cli import UsageError, refused_values

__all__ = ["ServerConfigs", "resolve_openai_configs", "server_class_of", "server_entries"]

ServerConfigs = ServerBaseline | APIServerConfig | Sequence[ServerBaseline | APIServerConfig]
"""What `config_init` returns second: a baseline, one server, or a list of servers."""

_SECTION = "openai"
_PREFIX = f"{_SECTION}."


def server_entries(section: Any) -> list[dict[str, Any]]:
    """The servers of a YAML section: a mapping is one server, a list is one server per entry.

    Args:
        section: Parsed YAML; None and empty containers hold no server.

    Raises:
        UsageError: the section or one of its entries is neither.
    """
    if not section:
        return []
    entries = [section] if isinstance(section, Mapping) else section
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise UsageError(f"{_SECTION}: expected one server or a list of servers, got {section!r}")
    for position, entry in enumerate(entries):
        if entry is not None and not isinstance(entry, Mapping):
            raise UsageError(f"{_SECTION}.{position}: expected the settings of a server")
    return [dict(entry or {}) for entry in entries]


def resolve_openai_configs(
    default_server_configs: ServerConfigs,
    openai_config_dict: Mapping[str, Any],
    yaml_config: Mapping[str, Any],
    cli_passed_flags: Mapping[str, Any],
    logger: logging.Logger,
) -> ServerConfigs:
    """Pick the servers from what the environment, the YAML file and the command line say.

    Several servers, whether from the YAML file or from `config_init`, are taken as they are: a
    flag has no way to say which of them it means. One server, or none, is merged with the YAML
    entry and the flags. A `ServerBaseline` (URLs are discovered) stays one as long as only fields
    it has are overridden; a URL or a key makes it one server.

    Args:
        default_server_configs: What `config_init` returned.
        openai_config_dict: Settings of the single server, all layers merged.
        yaml_config: The parsed YAML file; its `openai` entry is read.
        cli_passed_flags: What was typed; names that begin with `openai.` count.
        logger: Told about a default of an unexpected type.

    Returns:
        A list of configs, one bare config where the default was bare, or a baseline.

    Raises:
        UsageError: flags or a YAML mapping meet several servers, or a value is refused.
    """
    entries = server_entries(yaml_config.get(_SECTION))
    flags = [name for name in cli_passed_flags if name.startswith(_PREFIX)]
    defaults = default_server_configs
    server_class = server_class_of(defaults)
    if len(entries) >= 2 or _is_list(defaults, at_least=2):
        _refuse_overrides_of_several(entries, flags)
        return _several(entries, server_class) if len(entries) >= 2 else defaults
    overridden = {key for entry in entries for key in entry}
    overridden |= {name[len(_PREFIX) :] for name in flags}
    if isinstance(defaults, ServerBaseline) and not isinstance(defaults, APIServerConfig):
        if not overridden:
            return defaults
        if overridden <= set(type(defaults).model_fields):
            changes = {
                key: openai_config_dict[key] for key in overridden & openai_config_dict.keys()
            }
            return _build(type(defaults), {**defaults.model_dump(), **changes}, _PREFIX)
        return _build(server_class, openai_config_dict, _PREFIX)
    server = _build(server_class, openai_config_dict, _PREFIX)
    if isinstance(defaults, APIServerConfig):
        return server
    if not _is_list(defaults):
        logger.warning(
            "config_init returned %s where server settings were expected; using one server",
            type(defaults).__name__,
        )
    return [server]


def _is_list(configs: Any, *, at_least: int = 0) -> bool:
    return isinstance(configs, list | tuple) and len(configs) >= at_least


def server_class_of(configs: ServerConfigs) -> type[APIServerConfig]:
    """The class of the environment's own server settings, so that added fields survive."""
    first = next(iter(configs), None) if isinstance(configs, list | tuple) else configs
    return type(first) if isinstance(first, APIServerConfig) else APIServerConfig


def _refuse_overrides_of_several(entries: list[dict[str, Any]], flags: list[str]) -> None:
    if flags:
        raise UsageError(
            f"--{flags[0]} does not say which of several servers it means; "
            "list every server with its settings under openai: in the YAML file"
        )
    if len(entries) == 1 and entries[0]:
        raise UsageError(
            "openai: holds one server, but this environment uses several; list all of them"
        )


def _several(entries: list[dict[str, Any]], server_class: type[APIServerConfig]) -> ServerConfigs:
    return [
        _build(server_class, entry, f"{_PREFIX}{position}.")
        for position, entry in enumerate(entries)
    ]


def _build(
    server_class: type[ServerBaseline], settings: Mapping[str, Any], prefix: str
) -> ServerBaseline:
    try:
        return server_class(**settings)
    except ValidationError as error:
        raise refused_values(error, prefix) from error
