"""The command `atropos-env KIND:NAME serve|process|evaluate|check`: other libraries' environments.

    atropos-env gymnasium:FrozenLake-v1 process --args map_name=4x4 --env.total_steps 4

`--args` has the arguments of the adapter: `name=value` pairs, whose values are YAML, a JSON object,
or the path of a YAML file. Further flags are those of every environment. `atropos-env list` shows
the kinds, `atropos-env KIND` the arguments of one.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from atroposlib.adapters.env import environment_class
from atroposlib.adapters.registry import KINDS, Kind, adapter_class, read_args, split_spec
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.cli import UsageError
from atroposlib.utils.command_parser import end_command, prepare_command, reader_may_leave
from atroposlib.utils.yaml_text import read_yaml

__all__ = ["main", "read_arguments", "split_arguments"]

WIDTH = 100
ARGS_FLAG = "--args"
ARGS_SETTING = "--env.adapter_args"
USAGE = "usage: atropos-env KIND:NAME serve|process|evaluate|check [--args ...] [--name value ...]"


def main() -> None:
    """Run the command line of this process; exit codes are those of environment scripts."""
    prepare_command()
    program = "atropos-env"
    words = sys.argv[1:]
    try:
        if not words or words[0] in ("list", "--help", "-h"):
            with reader_may_leave():
                sys.stdout.write(f"{USAGE}\n\n{_list_of_kinds()}")
            sys.exit(0 if words else 2)
        if words[0] in KINDS and len(words) == 1:
            with reader_may_leave():
                sys.stdout.write(_page_of_kind(words[0]))
            sys.exit(0)
        env_cls = environment_class(words[0])
        kept, arguments = split_arguments(words[1:])
        read_args(adapter_class(split_spec(words[0])[0]).args_cls, arguments)
        given = [ARGS_SETTING, json.dumps(arguments)] if arguments else []
        # Commands print the last part of a path as the name of the program.
        name = program if "/" in words[0] else f"{program} {words[0]}"
        sys.argv = [name, *kept, *given]
    except (ConfigError, MissingExtraError, UsageError) as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        sys.exit(2)
    except OSError as error:  # such as standard output on a full disk
        end_command(program, f"error: {error}", code=1)
    env_cls.cli()


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Convert the words after `--args` to a mapping.

    Args:
        words: `name=value` pairs, JSON objects and paths of YAML files; later ones override.

    Raises:
        UsageError: a word has another form, or a value has a type that JSON lacks.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.lstrip().startswith("{"):
            arguments.update(_mapping(word, f"{ARGS_FLAG} {word}"))
        elif equals and name.isidentifier():
            try:
                arguments[name] = read_yaml(value)
            except yaml.YAMLError as error:
                raise UsageError(f"{ARGS_FLAG} {name}: {value!r} is not a YAML value") from error
        else:
            try:
                text = Path(word).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"{ARGS_FLAG} {word!r}: expected name=value, a JSON object or a YAML file"
                ) from error
            arguments.update(_mapping(text, f"{ARGS_FLAG} {word}"))
    for name, argument in arguments.items():
        try:
            json.dumps(argument)
        except TypeError as error:  # YAML has more types
            raise UsageError(
                f"{ARGS_FLAG} {name}: {error}; text such as 2024-01-31 needs quotes in YAML"
            ) from error
    return arguments


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: not JSON or YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"{where}: expected arguments by name")
    return content


def split_arguments(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate `--args` and the words after it, up to the next flag, from the other words."""
    kept: list[str] = []
    given: list[str] = []
    is_in_args = False
    for word in words:
        if word == ARGS_FLAG or word.startswith(f"{ARGS_FLAG}="):
            is_in_args = True
            given += [word.partition("=")[2]] if "=" in word else []
        elif is_in_args and not word.startswith("--"):
            given.append(word)
        else:
            is_in_args = False
            kept.append(word)
    return kept, read_arguments(given)


def _list_of_kinds() -> str:
    rows = [f"  {name:15}{kind.summary} ({_state_of(kind)})" for name, kind in KINDS.items()]
    return "\n".join(["Kinds; `atropos-env KIND` shows the arguments of one:", *rows]) + "\n"


def _state_of(kind: Kind) -> str:
    if kind.package is None:
        return "no further package"
    try:
        return f"{kind.package} {importlib.metadata.version(kind.package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"needs pip install '.[{kind.extra}]'"


def _page_of_kind(name: str) -> str:
    kind = KINDS[name]
    lines = [f"{name}: {kind.summary}", f"NAME is {kind.names}.", f"Package: {_state_of(kind)}"]
    fields = adapter_class(name, needs_package=False).args_cls.model_fields
    lines += ["", "Arguments (--args name=value):"] if fields else ["", "No arguments."]
    for argument, field in fields.items():
        default = field.get_default(call_default_factory=True)
        note = "required" if field.is_required() else f"default {default!r}"
        text = f"{field.description or ''} ({note})"
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"  {argument:23} ",
            subsequent_indent=" " * 26,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
