"""Describe the environment of a script and its settings, without running it.

    python -m atroposlib.envs.describe_script SCRIPT [--env.group_size 8 ...] ─► one line of JSON
    python -m atroposlib.envs.describe_script -m MODULE ARGUMENT [...]        ─► the same

Programs that start environments, such as `atropos-train`, run this in a separate process. The
script is executed as by `python SCRIPT`, up to its call of `cli()`; flags are read and checked as
by `serve`.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.commands import load_yaml
from atroposlib.envs.running import missing_methods
from atroposlib.envs.settings import flags_of, read_flags
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.cli import refused_values

__all__ = ["describe_script", "main"]

_WITHOUT_ITEMS = ("atroposlib.envs.single_turn_env", "atroposlib.envs.multi_turn_env")
"""Modules whose `evaluate` calls `eval_items`, and whose `eval_items` returns no items."""


_LIMIT_CONVERSATIONS = ("atroposlib.envs.multi_turn_env", "atroposlib.adapters.env")
"""Modules whose `collect_trajectory` limits prompt and completions to `max_token_length`."""


class _Found(BaseException):
    """Ends a script at its call of `cli()`; no `except Exception` of the script stops it."""

    def __init__(self, env_cls: type[Any]) -> None:
        super().__init__(env_cls)
        self.env_cls = env_cls


def describe_script(
    script: Path, words: Sequence[str] = (), *, argument: str | None = None
) -> dict[str, Any]:
    """Return a description of the environment of a script.

    Args:
        script: The environment's file; with `argument`, a module.
        words: Flags of `serve`, as split by the shell.
        argument: Word between the module and the name of the command.

    Returns:
        `class_name`, `name`, `group_size`, `max_token_length`, `num_servers` (inference servers in
        its defaults), `limits_conversation` (whether `max_token_length` includes the prompt),
        `is_evaluated` (whether `evaluate` measures anything) and `settings` (names of its config).

    Raises:
        ConfigError: the script runs no environment, is not complete, or rejects a setting.
        Exception: an exception of the script itself.
    """
    env_cls = _environment_of(script, words, argument)
    missing = missing_methods(env_cls)
    if missing:
        lines = " and ".join(f"`{line}`" for line in missing.values())
        raise ConfigError(f"{env_cls.__name__} is not complete: write {lines}")
    command_class = env_cls.get_cli_serve_config_cls()
    try:
        command = command_class(**read_flags(words, flags_of(command_class)))
        settings = command.layered(load_yaml(command.config) if command.config else {})
    except ValidationError as error:
        raise refused_values(error) from error
    servers = command.defaults.servers
    return {
        "class_name": env_cls.__name__,
        "name": settings.env.wandb_name or env_cls.name or env_cls.__name__,
        "group_size": settings.env.group_size,
        "max_token_length": settings.env.max_token_length,
        "num_servers": len(servers) if isinstance(servers, list | tuple) else 1,
        "limits_conversation": _defining_module(env_cls, "_budget") == _WITHOUT_ITEMS[0]
        or _defining_module(env_cls, "collect_trajectory") in _LIMIT_CONVERSATIONS,
        "is_evaluated": not (
            _defining_module(env_cls, "evaluate") in _WITHOUT_ITEMS
            and _defining_module(env_cls, "eval_items") in _WITHOUT_ITEMS
        ),
        "settings": list(type(settings.env).model_fields),
    }


def main() -> NoReturn:
    """Describe the script that the command line names; exit with 2 and one line on an error."""
    words, argument = sys.argv[1:], None
    if words[0] == "-m":
        _, module, argument, *words = words
        words = [module, *words]
    script, words = Path(words[0]), words[1:]
    try:
        # Output of the script must not mix with the description.
        with contextlib.redirect_stdout(sys.stderr):
            facts = describe_script(script, words, argument=argument)
    except AtroposError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.exit(0)


def _environment_of(script: Path, words: Sequence[str], argument: str | None) -> type[Any]:
    """Execute a script up to its call of `cli()` and return the class."""

    def found(env_cls: type[Any]) -> NoReturn:
        raise _Found(env_cls)

    sys.argv = [str(script), *([] if argument is None else [argument]), "serve", *words]
    original = vars(BaseEnv)["cli"]
    BaseEnv.cli = classmethod(found)  # type: ignore[method-assign,assignment]
    try:
        if argument is not None:
            names = runpy.run_module(str(script), run_name="__main__")
        else:
            sys.path[0] = str(script.resolve().parent)
            names = runpy.run_path(str(script), run_name="__main__")
    except _Found as call:
        return call.env_cls
    finally:
        BaseEnv.cli = original  # type: ignore[method-assign]
    classes = sorted(
        name
        for name, value in names.items()
        if isinstance(value, type)
        and BaseEnv in value.__mro__  # before 3.11, `list[int]` is a type without subclasses
        and value.__module__ == "__main__"
        and not missing_methods(value)
    )
    if not classes:
        raise ConfigError(
            f"{script} holds no environment: expected a subclass of BaseEnv, and at the end "
            "`if __name__ == '__main__': MyEnv.cli()`; atropos-new-env writes one"
        )
    called = classes[0] if len(classes) == 1 else f"ONE_OF({', '.join(classes)})"
    raise ConfigError(
        f"{script} starts no environment; end it with `if __name__ == '__main__': {called}.cli()`"
    )


def _defining_module(env_cls: type[Any], method: str) -> str | None:
    owner = next((base for base in env_cls.__mro__ if method in vars(base)), None)
    return None if owner is None else owner.__module__


if __name__ == "__main__":
    main()
