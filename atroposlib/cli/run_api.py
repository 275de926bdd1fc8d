"""`run-api`: serve the trajectory API."""

from __future__ import annotations

import argparse
import gc
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from atroposlib.api.settings import ApiSettings
from atroposlib.api.store.open import fresh_run_name, run_file
from atroposlib.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import uvicorn

__all__ = ["main"]

_APP = "atroposlib.api:app"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_S = 3
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that none is closed under a request."""
_SWITCH_INTERVAL_S = 0.001
"""Longest turn of a thread that works on a large body while requests wait."""
_DEFAULTS: Mapping[str, Any] = {"store": "sqlite"}
"""Where the command differs from `ApiSettings`: what is served outlives the process."""
_FLAG_NAMES = {"run_name": "--run", "cors_origins": "--cors-origin"}


def main() -> None:
    """Serve until SIGINT or SIGTERM; a port that is taken ends it with code 1."""
    parser = _parser()
    args = parser.parse_args()
    settings = _settings(parser, args)
    try:
        _serve(settings, args.host, args.port, reload=args.reload)
    except (ConfigError, MissingExtraError) as error:
        sys.exit(f"run-api: {error}")
    except SystemExit as stop:
        if not stop.code:
            raise
        print(
            f"run-api: cannot serve on {args.host}:{args.port}; the lines above say why. "
            "If another process uses the port, stop it or choose another with --port.",
            file=sys.stderr,
        )
        sys.exit(1)


def _serve(settings: ApiSettings, host: str, port: int, *, reload: bool) -> None:
    if not reload:
        _server(settings, host, port).run()
        return
    import uvicorn
    from uvicorn.supervisors import ChangeReload

    # The supervisor watches and restarts; each process it starts builds the service anew.
    watched = uvicorn.Config(_APP, host=host, port=port, reload=True, log_level="warning")
    sock = watched.bind_socket()
    print(_start_message(settings, host, sock.getsockname()[1]), flush=True)
    ChangeReload(watched, target=partial(_serve_again, settings), sockets=[sock]).run()


def _serve_again(settings: ApiSettings, sockets: list[socket.socket] | None = None) -> None:
    """Serve on sockets that the supervisor of `--reload` has bound."""
    _server(settings, "", 0, is_announced=False).run(sockets=sockets)


def _server(
    settings: ApiSettings, host: str, port: int, *, is_announced: bool = True
) -> uvicorn.Server:
    import uvicorn

    from atroposlib.api.http_protocol import ObservedHttpProtocol
    from atroposlib.api.logs import log_config
    from atroposlib.api.server import create_app

    application = create_app(settings)

    class AnnouncingServer(uvicorn.Server):
        """Says where it listens once it does; lets nobody wait any longer once it is to stop."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # Before the server does, so that what is wrong with the store is said in one line.
            await application.state.run.open()
            await super().startup(sockets=sockets)
            # What was imported stays: a full collection need not walk it, which takes 40 ms.
            gc.freeze()
            if is_announced and self.started:
                bound_port = self.servers[0].sockets[0].getsockname()[1]
                print(_start_message(settings, host, bound_port), flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Requests that wait for a batch would keep the process until they are cancelled.
            application.state.run.stop_waiting()
            await super().shutdown(sockets=sockets)

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    logging = log_config(settings.log_format)
    logging["loggers"]["uvicorn"]["level"] = "WARNING"
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        http=ObservedHttpProtocol,
        ws="none",
        # One line per request says nothing to an operator and fills a pipe nobody reads.
        access_log=False,
        log_config=logging,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    return AnnouncingServer(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run-api",
        description="Serve the trajectory API between environments and a trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on")
    parser.add_argument(
        "--reload", action="store_true", help="restart when a source file changes, for development"
    )
    for name, field in ApiSettings.model_fields.items():
        _add_setting(parser, name, field)
    return parser


def _add_setting(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """Add the flag of one field of `ApiSettings`; what it takes is checked by the model."""
    flag = _FLAG_NAMES.get(name, "--" + name.replace("_", "-"))
    default = _DEFAULTS.get(name, field.get_default())
    text = (field.description or "").replace("%", "%%")
    common: dict[str, Any] = {"dest": name, "default": default, "help": text}
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif isinstance(default, tuple):
        several = {**common, "default": [], "help": f"{text} May be given several times."}
        parser.add_argument(flag, action="append", metavar="ORIGIN", **several)
    else:
        parser.add_argument(flag, metavar=_metavar(flag), **common)


def _metavar(flag: str) -> str:
    return flag.removeprefix("--").rpartition("-")[2].upper()


def _settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> ApiSettings:
    values = {name: getattr(args, name) for name in ApiSettings.model_fields}
    if values["run_name"] is None and values["store"] != "memory":
        values["run_name"] = fresh_run_name()
    try:
        return ApiSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        flag = _FLAG_NAMES.get(name, "--" + name.replace("_", "-"))
        reason = first.get("ctx", {}).get("error")  # of our own checks, which name the value
        if reason is None:
            reason = f"{first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"
        parser.exit(2, f"{parser.prog}: error: argument {flag}: {reason}\n")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port; expected a whole number from 0 to 65535 (0: any free port)"
        )
    return int(text)


def _start_message(settings: ApiSettings, host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    lines = [f"trajectory API: http://{shown}:{port} (Ctrl-C stops it)", _whereabouts(settings)]
    if host in _LOOPBACK:
        lines.append(
            "only this machine can reach it; to serve others: --host 0.0.0.0 --token-file FILE"
        )
    elif settings.token_file is None:
        lines.append(
            "anybody who can reach this address can post data and reset the run; "
            "to ask for tokens: --token-file FILE"
        )
    else:
        lines.append(f"callers need a token of {settings.token_file}")
    return "\n".join(lines)


def _whereabouts(settings: ApiSettings) -> str:
    """Say where the run is, and how to go on with it."""
    if settings.store == "memory":
        return "the run is in memory: it is gone when this process ends"
    assert settings.run_name is not None  # given or made up by `_settings`
    again = f"to go on with it after a stop: --run {settings.run_name}"
    if settings.store == "sqlite":
        return (
            f"run {settings.run_name} in {run_file(settings.data_dir, settings.run_name)}; {again}"
        )
    return f"run {settings.run_name} in Redis; {again}"


if __name__ == "__main__":
    main()
