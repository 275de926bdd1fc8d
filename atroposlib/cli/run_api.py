"""`run-api`: serve the trajectory API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import shlex
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from atroposlib.api.settings import ApiSettings
from atroposlib.api.store.open import (
    fresh_run_name,
    known_runs,
    run_file,
    similar_run,
)
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.io import keepalive_options
from atroposlib.utils.listening import require_free_port
from atroposlib.utils.text import without_secrets
from atroposlib.utils.web_pages import names_of_address

if TYPE_CHECKING:
    from types import FrameType

    from atroposlib.api.run import Run

__all__ = ["main"]

_APP = "atroposlib.api:app"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_S = 3
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that none is closed during a request."""
_SWITCH_INTERVAL_S = 0.001
"""Switch interval of threads, so that one that decodes a large body delays requests less."""
_DEFAULTS: Mapping[str, Any] = {"store": "sqlite"}
"""Defaults that differ from `ApiSettings`: the run of this command is stored."""
_INTERRUPTED = 130
_NAMED_FIRST = ("run_name", "store", "data_dir", "token_file")
"""Settings at the beginning of the command that continues a run."""
_FLAG_NAMES = {
    "run_name": "--run",
    "cors_origins": "--cors-origin",
    "allowed_hosts": "--allowed-host",
    "engines": "--engine",
}


def main() -> None:
    """Serve until SIGINT or SIGTERM; invalid settings end the process with code 2."""
    prepare_command()
    parser = _parser()
    args = parser.parse_args()
    settings = _settings(parser, args)
    try:
        require_free_port(args.host, args.port)
        if args.run_name is not None and not args.new_run:
            _check_known(settings, again=_again(settings, args.host, args.port))
        _serve(settings, args.host, args.port, reload=args.reload)
    except (ConfigError, MissingExtraError) as error:
        end_command(parser.prog, error, code=2)
    except KeyboardInterrupt:  # the server has printed how to continue
        sys.exit(_INTERRUPTED)
    except SystemExit as stop:
        if not stop.code:
            raise
        reason = f"cannot serve on {args.host}:{args.port}; the reason is above"
        end_command(parser.prog, reason, code=1)


def _serve(settings: ApiSettings, host: str, port: int, *, reload: bool) -> None:
    if not reload:
        server = _server(settings, host, port)
        server.run()
        # If the parent process ignores SIGINT, Python does not raise this exception itself.
        if server.was_interrupted:
            raise KeyboardInterrupt
        return
    import uvicorn
    from uvicorn.supervisors import ChangeReload

    # The supervisor restarts processes; each of them builds its own service.
    watched = uvicorn.Config(_APP, host=host, port=port, reload=True, log_level="warning")
    sock = watched.bind_socket()
    _announce(_start_message(settings, host, sock.getsockname()[1]))
    ChangeReload(watched, target=partial(_serve_again, settings), sockets=[sock]).run()
    _announce(_stop_message(settings, host, port))


def _announce(message: str) -> None:
    # The service also runs if a full disk takes no message.
    with contextlib.suppress(OSError), reader_may_leave():
        print(message)


def _serve_again(settings: ApiSettings, sockets: list[socket.socket] | None = None) -> None:
    """Serve on sockets that the supervisor of `--reload` has bound."""
    _server(settings, "", 0, is_announced=False).run(sockets=sockets)


def _server(
    settings: ApiSettings, host: str, port: int, *, is_announced: bool = True
) -> Any:  # a `uvicorn.Server`, with `was_interrupted`
    import uvicorn

    from atroposlib.api.logs import log_config
    from atroposlib.api.responses import ObservedHttpProtocol
    from atroposlib.api.server import create_app

    application = create_app(settings)
    run: Run = application.state.run

    class AnnouncingServer(uvicorn.Server):
        """Prints its address once it listens; releases waiting clients when it stops."""

        was_interrupted = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.was_interrupted = self.was_interrupted or sig == signal.SIGINT
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # Before the server does, so that an error of the store is reported in one line.
            await run.open()
            await super().startup(sockets=sockets)
            for server in self.servers:
                for listener in server.sockets:  # accepted connections inherit the options
                    for option in keepalive_options():
                        listener.setsockopt(*option)
            # A full collection of the imported objects takes 40 ms and frees nothing.
            gc.freeze()
            if is_announced and self.started:
                bound_port = self.servers[0].sockets[0].getsockname()[1]
                _announce(_start_message(settings, host, bound_port, run))

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Requests that wait for a batch would delay the shutdown until they are cancelled.
            run.stop_waiting()
            await super().shutdown(sockets=sockets)
            if is_announced:
                _announce(_stop_message(settings, host, port))

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    logging = log_config(settings.log_format)
    logging["loggers"]["uvicorn"]["level"] = "WARNING"
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        http=ObservedHttpProtocol,
        ws="none",
        # One line per request does not help an operator, and can fill a pipe without a reader.
        access_log=False,
        log_config=logging,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    return AnnouncingServer(config)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="run-api",
        description="Serve the trajectory API between environments and a trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on")
    parser.add_argument(
        "--reload", action="store_true", help="restart when a source file changes, for development"
    )
    parser.add_argument(
        "--new-run",
        action="store_true",
        help="create the run of --run without asking, even if its name resembles another run's",
    )
    for name, field in ApiSettings.model_fields.items():
        _add_setting(parser, name, field)
    return parser


def _add_setting(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """Add the flag of one field of `ApiSettings`, which validates the value."""
    flag = _FLAG_NAMES.get(name, "--" + name.replace("_", "-"))
    default = _DEFAULTS.get(name, field.get_default())
    text = (field.description or "").replace("%", "%%")
    common: dict[str, Any] = {"dest": name, "default": default, "help": text}
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif isinstance(default, tuple):
        several = {**common, "default": [], "help": f"{text} May be given several times."}
        parser.add_argument(flag, action="append", metavar=_metavar(flag), **several)
    else:
        parser.add_argument(flag, metavar=_metavar(flag), **common)


def _metavar(flag: str) -> str:
    return flag.removeprefix("--").rpartition("-")[2].upper()


def _settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> ApiSettings:
    values = {name: getattr(args, name) for name in ApiSettings.model_fields}
    if values["run_name"] is None and values["store"] != "memory":
        values["run_name"] = fresh_run_name()
    values["allowed_hosts"] = [*values["allowed_hosts"], *names_of_address(args.host)]
    try:
        return ApiSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        flag = _FLAG_NAMES.get(name, "--" + name.replace("_", "-"))
        reason = first.get("ctx", {}).get("error")  # from our validators, which name the value
        if reason is None:
            reason = f"{first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"
        parser.exit(2, f"{parser.prog}: error: argument {flag}: {reason}\n")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"expected a port from 0 to 65535 (0: any free port), got {text!r}"
        )
    return int(text)


def _check_known(settings: ApiSettings, *, again: str) -> None:
    """Ask before a run is created whose name resembles that of another run.

    Raises:
        ConfigError: there is no terminal, or the answer is no.
    """
    name = settings.run_name
    assert name is not None  # only called with --run
    known = asyncio.run(known_runs(settings.store, settings.data_dir))
    meant = None if name in known else similar_run(name, known)
    if meant is None:
        return
    is_sqlite = settings.store == "sqlite"
    place = str(settings.data_dir) if is_sqlite else without_secrets(settings.store)
    found = f"{place} has the run {meant}, but not {name}"
    if sys.stdin is not None and sys.stdin.isatty():
        try:
            answer = input(f"{found}. Create a new run {name}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() in ("y", "yes"):
            return
    raise ConfigError(
        f"{found}; continue it with --run {meant}, or create a new one with: {again} --new-run"
    )


def _again(settings: ApiSettings, host: str, port: int) -> str:
    flags = ["run-api", "--run", str(settings.run_name)]
    if settings.store != _DEFAULTS["store"]:
        flags += ["--store", without_secrets(settings.store)]
    elif settings.data_dir != ApiSettings.model_fields["data_dir"].default:
        flags += ["--data-dir", str(settings.data_dir)]
    defaults = _parser()
    if host != defaults.get_default("host"):
        flags += ["--host", host]
    if port != defaults.get_default("port"):
        flags += ["--port", str(port)]
    if settings.token_file is not None:
        flags += ["--token-file", str(settings.token_file)]
    for name, field in ApiSettings.model_fields.items():
        value = getattr(settings, name)
        if name == "allowed_hosts":
            value = tuple(each for each in value if each not in names_of_address(host))
        if name not in _NAMED_FIRST and value != field.get_default():
            flags += _words_of(name, value)
    return shlex.join(flags)


def _words_of(name: str, value: Any) -> list[str]:
    """Return the flag of a field with its value, without secrets."""
    flag = _FLAG_NAMES.get(name, "--" + name.replace("_", "-"))
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    values = value if isinstance(value, tuple) else (value,)
    return [word for each in values for word in (flag, without_secrets(str(each)))]


def _stop_message(settings: ApiSettings, host: str, port: int) -> str:
    if settings.store == "memory":
        return "stopped; the run was in memory and is lost"
    return f"stopped; continue with: {_again(settings, host, port)}"


def _start_message(settings: ApiSettings, host: str, port: int, run: Run | None = None) -> str:
    shown = f"[{host}]" if ":" in host else host
    lines = [f"trajectory API: http://{shown}:{port} (Ctrl-C stops it)"]
    lines.append(_whereabouts(settings, run, again=_again(settings, host, port)))
    if host in _LOOPBACK:
        lines.append(
            "only this machine can reach it; to serve others: --host 0.0.0.0 --token-file FILE"
        )
    elif settings.token_file is None:
        lines.append(
            "every client that reaches this address can post data and reset the run; "
            "to require tokens: --token-file FILE"
        )
    else:
        lines.append(f"clients need a token of {settings.token_file}")
    return "\n".join(lines)


def _whereabouts(settings: ApiSettings, run: Run | None, *, again: str) -> str:
    if settings.store == "memory":
        kept = "the run is in memory: it is lost when this process ends"
        is_named = settings.run_name is not None
        return f"{kept}, and --run {settings.run_name} cannot continue it" if is_named else kept
    assert settings.run_name is not None  # set by `_settings`
    name = settings.run_name
    place = run_file(settings.data_dir, name) if settings.store == "sqlite" else "Redis"
    if run is not None and not run.is_new:
        return f"resuming {name}: {_progress(run)}; run {name} in {place}"
    kind = "run" if run is None else "new run"
    return f"{kind} {name} in {place}; continue it after a stop with: {again}"


def _progress(run: Run) -> str:
    state = run.state
    returned = sum(len(batch.groups) for batch in state.delivery.returned.values())
    num_waiting = len(state.queue) + returned
    groups = f"{num_waiting} group{'' if num_waiting == 1 else 's'} waiting"
    return f"step {state.step}, {groups}" if state.registration else f"no trainer yet, {groups}"


if __name__ == "__main__":
    main()
