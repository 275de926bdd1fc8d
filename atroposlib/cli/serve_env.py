"""`atropos-serve-env ENV --as openenv|ors|verifiers`: serve an environment to other trainers.

    atropos-serve-env environments/number_guessing.py --as openenv --port 8010

ENV is the path of a script, `PATH.py:Class`, `module:Class`, or `KIND:NAME` of an adapter, whose
arguments follow `--args`. Flags such as `--env.seed 3` are settings of the environment; an
inference server is only asked if the environment needs one, such as a judge.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import ValidationError

from atroposlib.adapters.env import environment_class
from atroposlib.adapters.registry import KINDS, adapter_class, read_args, split_spec
from atroposlib.cli.env import ARGS_FLAG, ARGS_SETTING, split_arguments
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.commands import EnvCommand, load_yaml, make_command
from atroposlib.envs.running import build_environment, missing_methods, run_foreground
from atroposlib.envs.settings import Settings, read_command
from atroposlib.errors import AtroposError, ConfigError, MissingExtraError
from atroposlib.serving.sessions import (
    EpisodeHost,
    ServingSettings,
    difference_from_training,
    protect,
    require_servable,
)
from atroposlib.utils.cli import refused_values
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.command_parser import integer_between as integer
from atroposlib.utils.imports import import_script
from atroposlib.utils.listening import require_free_port
from atroposlib.utils.text import InertFormatter, near_name

__all__ = ["PROTOCOLS", "find_environment", "listening", "main", "make_host"]

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
STOP_S = 5
"""Seconds that open requests have to end."""
OTHER_CONNECTIONS = 64
"""Connections in addition to two for each episode."""
POLL_S = 0.02
ENVIRONMENT_FLAGS = (ARGS_FLAG, "--config")
"""Flags of the environment without a dot in their name."""


class ServedProtocol(NamedTuple):
    """One protocol and what it needs."""

    summary: str
    page: str
    """Module with the application."""
    function: str
    """Function of the host that returns the application."""
    package: str | None
    """Package that must be installed; its name is also that of the extra."""
    offers_tools: bool
    """Whether the protocol has tools of its own."""
    has_websockets: bool = False


PAGES = "atroposlib.serving"
PROTOCOLS: dict[str, ServedProtocol] = {
    "openenv": ServedProtocol(
        "OpenEnv 0.10: TRL, SkyRL and other clients",
        f"{PAGES}.openenv",
        "create_openenv_app",
        "openenv",
        offers_tools=True,
        has_websockets=True,
    ),
    "ors": ServedProtocol(
        "Open Reward Standard: tasks, prompts and tools over HTTP",
        f"{PAGES}.ors",
        "create_ors_app",
        "openreward",
        offers_tools=True,
    ),
    "verifiers": ServedProtocol(
        "a package for verifiers 0.4 and prime-rl, and the server it asks",
        f"{PAGES}.verifiers",
        "create_episode_app",
        None,
        offers_tools=False,
    ),
}
"""Values of `--as`."""
EXTRAS = {"openreward": "ors"}


class RemoteCommand(EnvCommand):
    """The settings of an environment that remote clients play."""

    command = "serve"


class _TokenizerOnUse:
    """The configured tokenizer, loaded when the environment uses it; most do not here."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self._tokenizer(), attribute)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer()(*args, **options)

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            from atroposlib.envs.base import _load_tokenizer

            self._loaded = _load_tokenizer(self._name)
        return self._loaded


def main() -> NoReturn:
    """Serve until SIGINT or SIGTERM; invalid settings end the process with code 2."""
    prepare_command()
    parser = _parser()
    # Before argparse, which would report a missing argument first.
    parser.refuse_unknown(word for word in sys.argv[1:] if not _is_for_environment(word))
    args, words = parser.parse_known_args()
    try:
        _run(args, words)
    except AtroposError as error:
        end_command(parser.prog, error, code=exit_code_of(error))
    sys.exit(0)


def _run(args: argparse.Namespace, words: Sequence[str]) -> None:
    protocol = PROTOCOLS[args.protocol]
    if args.package is not None and args.protocol != "verifiers":
        raise ConfigError("--package: only --as verifiers writes a package")
    settings = _serving_settings(args)
    create = _load_page(protocol)
    require_free_port(args.host, args.port)
    handler = logging.StreamHandler()
    handler.setFormatter(InertFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for library in ("httpx", "mcp", "fastmcp"):
        logging.getLogger(library).setLevel(logging.WARNING)
    host = make_host(args.env, words, settings, offers_tools=protocol.offers_tools)
    run_foreground(lambda: _serve(host, create, protocol, args))


def make_host(
    target: str, words: Sequence[str], settings: ServingSettings, *, offers_tools: bool
) -> EpisodeHost:
    """Build an environment and the host of its episodes, which is not open yet.

    Args:
        target: see `find_environment`.
        words: flags of the environment, such as `--env.seed 3`.
        settings: limits.
        offers_tools: Whether the protocol has tools of its own.

    Raises:
        ConfigError: the environment is unknown, cannot be served, or rejects a setting.
    """
    env_cls = find_environment(target)
    require_servable(env_cls)
    env_settings = _environment_settings(env_cls, target, words)
    tokenizer = _TokenizerOnUse(env_settings.env.tokenizer_name)
    env = build_environment(env_cls, env_settings, {"_stand_in_tokenizer": tokenizer})
    return EpisodeHost(env, settings, offers_tools=offers_tools)


def _load_page(protocol: ServedProtocol) -> Callable[[EpisodeHost], Any]:
    if protocol.package is not None and importlib.util.find_spec(protocol.package) is None:
        raise MissingExtraError(
            protocol.package, extra=EXTRAS.get(protocol.package, protocol.package)
        )
    os.environ.setdefault("OPENREWARD_LOG_LEVEL", "WARNING")  # it logs every request otherwise
    create: Callable[[EpisodeHost], Any] = getattr(
        importlib.import_module(protocol.page), protocol.function
    )
    return create


async def _serve(
    host: EpisodeHost,
    create: Callable[[EpisodeHost], Any],
    protocol: ServedProtocol,
    args: argparse.Namespace,
) -> None:
    try:
        await host.open()
        app = protect(create(host), host.settings, address=args.host)
        async with listening(
            app, host, address=args.host, port=args.port, has_websockets=protocol.has_websockets
        ) as port:
            with reader_may_leave():
                sys.stdout.write(_start_message(host, args, port))
            try:
                await asyncio.Event().wait()
            finally:
                await host.close_episodes()  # before the server waits for their requests
    finally:
        await host.close()
        with reader_may_leave():
            sys.stdout.write("stopped; all episodes are closed\n")


@contextlib.asynccontextmanager
async def listening(
    app: Any, host: EpisodeHost, *, address: str, port: int, has_websockets: bool
) -> AsyncIterator[int]:
    """Serve an application in the running event loop and yield its port; 0 selects a free one.

    Raises:
        ConfigError: the server does not start.
    """
    import uvicorn

    class UnsignalledServer(uvicorn.Server):
        """Leaves signals to the program."""

        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    config = uvicorn.Config(
        app,
        host=address,
        port=port,
        access_log=False,
        lifespan="on",
        log_config=None,
        ws="auto" if has_websockets else "none",
        ws_max_size=4 * host.settings.max_text_chars + 1024 * 1024,
        limit_concurrency=2 * host.max_sessions + OTHER_CONNECTIONS,
        timeout_graceful_shutdown=STOP_S,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = UnsignalledServer(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(POLL_S)
        if task.done():
            raise ConfigError(f"cannot serve on {address}:{port}; the reason is above")
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task


def _start_message(host: EpisodeHost, args: argparse.Namespace, port: int) -> str:
    shown = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{shown}:{port}"
    tools = f", tools {', '.join(tool.name for tool in host.tools)}" if host.tools else ""
    lines = [
        f"{host.name} as {args.protocol}: {url} (Ctrl-C stops it)",
        f"splits {', '.join(f'{s} ({host.num_tasks(s)})' for s in host.splits())}, "
        f"at most {host.max_turns} turns, {host.max_sessions} episodes at a time{tools}",
    ]
    difference = difference_from_training(type(host.env))
    if difference is not None:
        lines.append(difference)
    if args.package is not None:
        from atroposlib.serving.verifiers import write_package

        name = write_package(args.package, host, url)
        lines.append(f"package {name}: pip install {args.package}, then vf-eval {name}")
    if args.host in LOOPBACK:
        lines.append(
            "only this machine can reach it; to serve others: --host 0.0.0.0 --token-file FILE"
        )
    elif host.settings.token_file is None:
        lines.append(
            "every client that reaches this address can play; to require tokens: --token-file FILE"
        )
    return "\n".join(lines) + "\n"


def _environment_settings(env_cls: type[Any], target: str, words: Sequence[str]) -> Settings:
    """Return the settings of the environment from the words that are not ours."""
    kept, arguments = split_arguments(words)
    if arguments:
        if target.partition(":")[0] not in KINDS:
            raise ConfigError(f"{ARGS_FLAG} has the arguments of an adapter; {target} is not one")
        read_args(adapter_class(split_spec(target)[0]).args_cls, arguments)
        kept = [*kept, ARGS_SETTING, json.dumps(arguments)]
    made = make_command(env_cls, RemoteCommand, own_settings={"use_wandb": False})
    command = read_command(made, kept)
    settings = command.layered(load_yaml(command.config) if command.config else {})
    env_cls.check_inputs(settings.env)
    return settings


def _is_for_environment(word: str) -> bool:
    """Whether a word is a flag of the environment: `--env.*`, `--openai.*`, `--config`."""
    flag = word.partition("=")[0]
    return "." in flag or flag in ENVIRONMENT_FLAGS


def _serving_settings(args: argparse.Namespace) -> ServingSettings:
    try:
        return ServingSettings(
            **{name: getattr(args, name) for name in ServingSettings.model_fields}
        )
    except ValidationError as error:
        text = str(refused_values(error, "--"))
        for name in ServingSettings.model_fields:
            text = text.replace(f"--{name}:", f"{_flag_of(name)}:")
        raise ConfigError(text) from error


def _flag_of(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="atropos-serve-env",
        description="Serve an environment to trainers of other libraries. Other flags, such as "
        "--env.seed 3, are settings of the environment; its own --help lists them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("env", metavar="ENV", help="script, module:Class, or KIND:NAME")
    kinds = "; ".join(f"{name}: {protocol.summary}" for name, protocol in PROTOCOLS.items())
    parser.add_argument("--as", dest="protocol", choices=list(PROTOCOLS), required=True, help=kinds)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=integer(0, 65535), default=8010, help="port to listen on; 0: any free port"
    )
    parser.add_argument(
        "--package", type=Path, help="folder to write the package to, with --as verifiers"
    )
    for name, field in ServingSettings.model_fields.items():
        parser.add_argument(
            _flag_of(name),
            dest=name,
            default=field.get_default(),
            help=field.description,
            metavar=name.rpartition("_")[2].upper(),
        )
    return parser


def find_environment(target: str) -> type[Any]:
    """Return the class of an environment.

    Args:
        target: `KIND:NAME` of an adapter, the path of a script, `PATH.py:Class`, or `module:Class`.

    Raises:
        ConfigError: there is none, or several.
        MissingExtraError: the package of the adapter is not installed.
    """
    start, _, name = target.rpartition(":")
    if target.partition(":")[0] in KINDS:
        return environment_class(target)
    if target.endswith(".py"):
        return _class_of_script(Path(target))
    if not start or not name:
        raise ConfigError(
            f"{target!r}: expected the path of a script, module:Class, or KIND:NAME with a KIND of "
            f"{', '.join(KINDS)}"
        )
    if start.endswith(".py"):
        module = import_script(Path(start))
    else:
        try:
            module = importlib.import_module(start)
        except ModuleNotFoundError as error:
            hint = near_name(start, KINDS) or f"; kinds of adapters are {', '.join(KINDS)}"
            raise ConfigError(f"{target!r}: {error}{hint}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{start} has no class {name!r}{near_name(name, vars(module))}")
    return found


def _class_of_script(path: Path) -> type[Any]:
    """Return the class whose `cli()` a script calls, or its only environment."""
    module = import_script(path)
    called = {
        node.func.value.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "cli"
        and isinstance(node.func.value, ast.Name)
    }
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and BaseEnv in value.__mro__  # before 3.11, `list[int]` is a type without subclasses
        and (name in called if called else value.__module__ == module.__name__)
        and not missing_methods(value)
    }
    if not found:
        raise ConfigError(f"{path} holds no complete environment; expected a subclass of BaseEnv")
    if len(found) > 1:
        choices = ", ".join(f"{path}:{name}" for name in found)
        raise ConfigError(f"{path} holds several environments; write one of {choices}")
    return next(iter(found.values()))


if __name__ == "__main__":
    main()
