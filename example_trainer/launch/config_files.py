"""YAML files of environments in a run: `--env.config FILE` becomes the flags that it stands for.

    --env.config FILE  ->  --env.NAME=VALUE ... for its section `env`

Flags have precedence over the file. What the run determines itself, such as the inference servers,
is left out with a note, so that a file written for `serve` needs no changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from atroposlib.errors import ConfigError
from atroposlib.utils.text import near_name
from atroposlib.utils.yaml_text import describe_yaml, has_at_most, read_with_repeats

__all__ = ["with_config_files"]

_PREFIX = "--env."
_FLAG = "--env.config"
_SECTIONS = ("env", "openai", "slurm", "testing", "max_n_completions", "proxy_url", "teacher")
"""Sections that a file for `serve` may have; only `env` is used here."""
_MAX_VALUES = 100_000
"""Of one setting, with aliases written out."""
_OF_THE_RUN = {"total_steps", "batch_size", "wandb_name", "data_dir_to_save_evals"}
"""Settings that a file has for a run of `serve` alone; `--env.NAME` still sets them."""


def with_config_files(
    flags: Mapping[str, Sequence[str]],
    *,
    fixed: Collection[str],
    known: Callable[[str], Collection[str]],
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Replace `--env.config FILE` among the flags of environments by the settings of the file.

    Args:
        flags: Words by name of the environment; "" for all of them.
        fixed: Settings that the run determines.
        known: Returns the settings that environments of a name have; called if there is a file.

    Returns:
        The flags, and notes on settings that are left out.

    Raises:
        ConfigError: a file cannot be read, a section is misspelled, or a setting is too large.
    """
    expanded, notes = {}, []
    for name, words in flags.items():
        path, others = _split(words)
        if path is None:
            expanded[name] = tuple(words)
            continue
        content, repeated = _read(Path(path))
        settings = content.get("env") or {}
        if not isinstance(settings, dict) or any(not isinstance(key, str) for key in settings):
            raise ConfigError(f"{_FLAG} {path}: section env must be a mapping of settings")
        # A list would be extended by the flag of the same name, not replaced.
        typed = {word.removeprefix(_PREFIX).partition("=")[0] for word in others}
        if repeated:
            notes.append(f"{path}: only the last value of {', '.join(repeated)} is used")
        left_out = [key for key in settings if key in fixed or key in _OF_THE_RUN]
        left_out += [section for section in _SECTIONS if section != "env" and content.get(section)]
        if left_out:
            notes.append(f"{path}: not used, since the run sets it: {', '.join(left_out)}")
        notes += [_unused(path, section) for section in content if section not in _SECTIONS]
        own = known(name)
        if unknown := [key for key in settings if key not in own and key not in left_out]:
            notes.append(
                f"{path}: not used, since the environment has no such setting: "
                f"{', '.join(f'{key}{near_name(key, own)}' for key in unknown)}"
            )
        kept = {
            k: v for k, v in settings.items() if k not in typed and k not in (*left_out, *unknown)
        }
        for key, value in kept.items():
            if not has_at_most(value, _MAX_VALUES):
                raise ConfigError(f"{_FLAG} {path}: env.{key} has over {_MAX_VALUES:,} values")
            if "\0" in _text(value):  # which words of a command cannot have
                raise ConfigError(f"{_FLAG} {path}: env.{key} has a NUL character")
        expanded[name] = (*(f"{_PREFIX}{key}={_text(kept[key])}" for key in kept), *others)
    return expanded, notes


def _unused(path: str, section: Any) -> str:
    hint = near_name(str(section), _SECTIONS)
    if hint:
        raise ConfigError(f"{_FLAG} {path}: unknown section {section}{hint}")
    return f"{path}: section {section} is not used; settings of the environment are in env"


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a file, and the keys that it has twice."""
    try:
        content, repeated = read_with_repeats(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{_FLAG} {path}: cannot be read as YAML{describe_yaml(error)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_FLAG} {path}: cannot be read as YAML: {error}") from error
    if content is None:
        return {}, []
    if not isinstance(content, dict):
        raise ConfigError(f"{_FLAG} {path}: expected a mapping with the section env")
    return content, repeated


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file that the last `--env.config` names, and the other words."""
    path, others, remaining = None, [], iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag != _FLAG:
            others.append(word)
            continue
        path = value if equals else next(remaining, None)
        if path is None or path.startswith("--"):
            raise ConfigError(f"{_FLAG} needs the path of a YAML file")
    return path, others


def _text(value: Any) -> str:
    if isinstance(value, (dict, list, bool)):
        return json.dumps(value, default=str)
    return str(value)
