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

from atroposlib.envs.command_classes import ViewedCommand
from atroposlib.envs.command_factory import (
    CHECK_FLAGS,
    check_command,
    evaluate_command,
    process_command,
    serve_command,
)
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.config_layers import COMMANDS, ENV_PREFIX, OPENAI_PREFIX
from atroposlib.envs.flag_help import help_text, short_help_text
from atroposlib.envs.flags import HELP_WORDS, Flag, flags_of, read_flags
from atroposlib.envs.server_handling.config import APIServerConfig, ServerManagerConfig
from atroposlib.envs.settings_text import shown_default
from atroposlib.errors import (
    ConfigError,
    InferenceError,
    MissingExtraError,
    NoDataError,
    TrajectoryApiError,
)
from atroposlib.utils.cli import UsageError, near_name, refused_values
from atroposlib.utils.command_parser import exit_code_of

__all__ = ["check_command", "evaluate_command", "process_command", "run_cli", "serve_command"]

_INTERRUPTED = 130


def run_cli(env_cls: type[Any]) -> NoReturn:
    """Run the command that this process's command line asks for; never returns.

    Raises:
        SystemExit: 0 when the command ended, 1 when it got no data or no completions or the
            service went away, 2 with a message on a usage error or a setting that cannot be used,
            128 + the signal number after a signal. Other exceptions of the command pass through.
    """
    program = Path(sys.argv[0]).name
    try:
        _run_words(env_cls, sys.argv[1:], program)
    except FailedExecutionException as error:
        sys.stderr.write(f"{program}: error: {error.message}\n")
        sys.exit(error.exit_code)
    except (
        ConfigError,
        MissingExtraError,
        InferenceError,
        NoDataError,
        TrajectoryApiError,
    ) as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    sys.exit(0)


def _run_words(env_cls: type[Any], words: Sequence[str], program: str) -> None:
    if words and _is_help(words[0]):
        sys.stdout.write(_overview(env_cls, program, is_full=_wants_all(words)))
        return
    if not words or words[0].startswith("-"):
        usage = f"usage: {program} {{{','.join(COMMANDS)}}} [--name value ...]"
        raise UsageError(f"no command given; {usage}; --help explains them")
    name, flag_words = words[0], words[1:]
    if name not in COMMANDS:
        hint = near_name(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}{hint} (see {program} --help)")
    command_class = _command_class(env_cls, name)
    flags = flags_of(command_class)
    if any(map(_is_help, flag_words)):
        intro = (command_class.__doc__ or "").strip()
        usage = f"{program} {name} [--name value ...]"
        sys.stdout.write(_help(flags, usage, intro, is_full=_wants_all(flag_words)))
        return
    try:
        command = command_class(**read_flags(flag_words, flags))
    except ValidationError as error:
        raise refused_values(error) from error
    _show_progress_messages()
    command.run()


def _is_help(word: str) -> bool:
    return word.partition("=")[0] in HELP_WORDS


def _wants_all(words: Sequence[str]) -> bool:
    """Whether `--help` is followed by `all`."""
    position = next(i for i, word in enumerate(words) if _is_help(word))
    return words[position].endswith("=all") or list(words[position + 1 : position + 2]) == ["all"]


def _help(flags: Sequence[Flag], usage: str, intro: str, *, is_full: bool) -> str:
    if is_full:
        return help_text(flags, usage=usage, intro=intro)
    shared = {
        *(f"{ENV_PREFIX}{name}" for name in BaseEnvConfig.model_fields),
        *(
            f"{prefix}{name}"
            for prefix in (OPENAI_PREFIX, "teacher.")
            for name in APIServerConfig.model_fields
        ),
        *ServerManagerConfig.model_fields,
        *ViewedCommand.model_fields,
        *CHECK_FLAGS,
    }
    return short_help_text(flags, shared=shared, usage=usage, intro=intro)


def _command_class(env_cls: type[Any], name: str) -> Any:
    """The class an environment uses for a command; environments may override these hooks."""
    hooks = {
        "serve": env_cls.get_cli_serve_config_cls,
        "process": env_cls.get_cli_process_config_cls,
        "evaluate": env_cls.get_cli_evaluate_config_cls,
        "check": lambda: check_command(env_cls),
    }
    return hooks[name]()


def _overview(env_cls: type[Any], program: str, *, is_full: bool) -> str:
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
    return _help(flags["serve"], usage, "\n".join(lines), is_full=is_full)


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
