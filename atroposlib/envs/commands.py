"""The command line of an environment script: pick the command, read its flags, run it."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_cli import FailedExecutionException

from atroposlib.envs.command_factory import (
    check_command,
    evaluate_command,
    process_command,
    serve_command,
)
from atroposlib.envs.config_layers import COMMANDS
from atroposlib.envs.flag_help import help_text
from atroposlib.envs.flags import HELP_WORDS, Flag, flags_of, read_flags
from atroposlib.envs.settings_text import shown_default
from atroposlib.errors import ConfigError, InferenceError, MissingExtraError, NoDataError
from atroposlib.utils.cli import UsageError, near_name, refused_values

__all__ = ["check_command", "evaluate_command", "process_command", "run_cli", "serve_command"]

_INTERRUPTED = 130


def run_cli(env_cls: type[Any]) -> NoReturn:
    """Run the command that this process's command line asks for; never returns.

    Raises:
        SystemExit: 0 when the command ended, 1 when it got no data or no completions, 2 with a
            message on a usage error or a setting that cannot be used, 128 + the signal number after
            a signal. Other exceptions of the command pass through.
    """
    program = Path(sys.argv[0]).name
    try:
        _run_words(env_cls, sys.argv[1:], program)
    except FailedExecutionException as error:
        sys.stderr.write(f"{program}: error: {error.message}\n")
        sys.exit(error.exit_code)
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        sys.exit(2)
    except (InferenceError, NoDataError) as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    sys.exit(0)


def _run_words(env_cls: type[Any], words: Sequence[str], program: str) -> None:
    if words and words[0] in HELP_WORDS:
        sys.stdout.write(_overview(env_cls, program))
        return
    usage = f"usage: {program} {{{','.join(COMMANDS)}}} [--name value ...]; --help lists all names"
    if not words:
        raise UsageError(f"no command given\n{usage}")
    name, flag_words = words[0], words[1:]
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}{near_name(name, COMMANDS)}\n{usage}")
    command_class = _command_class(env_cls, name)
    flags = flags_of(command_class)
    if any(word in HELP_WORDS for word in flag_words):
        intro = (command_class.__doc__ or "").strip()
        sys.stdout.write(
            help_text(flags, usage=f"{program} {name} [--name value ...]", intro=intro)
        )
        return
    try:
        command = command_class(**read_flags(flag_words, flags))
    except ValidationError as error:
        raise refused_values(error) from error
    _show_progress_messages()
    command.run()


def _command_class(env_cls: type[Any], name: str) -> Any:
    """The class an environment uses for a command; environments may override these hooks."""
    hooks = {
        "serve": env_cls.get_cli_serve_config_cls,
        "process": env_cls.get_cli_process_config_cls,
        "evaluate": env_cls.get_cli_evaluate_config_cls,
        "check": lambda: check_command(env_cls),
    }
    return hooks[name]()


def _overview(env_cls: type[Any], program: str) -> str:
    """Help of all commands: the flags with the defaults of `serve`, and where others differ."""
    classes = {name: _command_class(env_cls, name) for name in COMMANDS}
    flags = {name: flags_of(command_class) for name, command_class in classes.items()}
    lines = ["Commands:"]
    for name, command_class in classes.items():
        lines.append(f"  {name:10}{(command_class.__doc__ or '').strip()}")
    lines += ["", "The defaults below are those of serve."]
    for name in COMMANDS[1:]:
        changed = ", ".join(_differences(flags["serve"], flags[name]))
        lines += [f"Under {name} others hold: {changed}."] if changed else []
    usage = f"{program} {{{','.join(COMMANDS)}}} [--name value ...]"
    return help_text(flags["serve"], usage=usage, intro="\n".join(lines))


def _differences(serve: Sequence[Flag], other: Sequence[Flag]) -> list[str]:
    known = {flag.name: shown_default(flag.name, flag.default) for flag in serve}
    defaults = {flag.name: shown_default(flag.name, flag.default) for flag in other}
    return [
        f"{name} {default}"
        for name, default in defaults.items()
        if name in known and known[name] != default
    ]


def _show_progress_messages() -> None:
    """Let INFO messages through, except one per HTTP request, and warnings without their code."""
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for http_client in ("httpx", "httpx2"):  # the OpenAI client uses one or the other
        logging.getLogger(http_client).setLevel(logging.WARNING)
