"""`run-api`: serve the trajectory API."""

from __future__ import annotations

import argparse
import socket
import sys

__all__ = ["main"]

_APP = "atroposlib.api:app"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_S = 3


def main() -> None:
    """Serve until SIGINT or SIGTERM; a port that is taken ends it with code 1."""
    args = _parser().parse_args()
    try:
        _serve(args.host, args.port, reload=args.reload)
    except SystemExit as stop:
        if not stop.code:
            raise
        print(
            f"run-api: cannot serve on {args.host}:{args.port}; the line above says why. "
            "If another process uses the port, stop it or choose another with --port.",
            file=sys.stderr,
        )
        sys.exit(1)


def _serve(host: str, port: int, *, reload: bool) -> None:
    import uvicorn

    class AnnouncingServer(uvicorn.Server):
        """Says where it listens once it does, with the port it was given for port 0."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            bound_port = self.servers[0].sockets[0].getsockname()[1]
            print(_start_message(host, bound_port), flush=True)

    config = uvicorn.Config(
        _APP,
        host=host,
        port=port,
        reload=reload,
        # One line per request says nothing to an operator and fills a pipe nobody reads.
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    if config.should_reload:
        from uvicorn.supervisors import ChangeReload

        sock = config.bind_socket()
        print(_start_message(host, port), flush=True)
        ChangeReload(config, target=uvicorn.Server(config).run, sockets=[sock]).run()
    else:
        AnnouncingServer(config).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run-api",
        description="Serve the trajectory API between environments and a trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on")
    parser.add_argument(
        "--reload", action="store_true", help="restart, losing the run, when a source file changes"
    )
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port; expected a whole number from 0 to 65535 (0: any free port)"
        )
    return int(text)


def _start_message(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    message = f"trajectory API: http://{shown}:{port} (Ctrl-C stops it)"
    if host in _LOOPBACK:
        return message + "\nonly this machine can reach it; to serve others: --host 0.0.0.0"
    return message + "\nanybody who can reach this address can post data and reset the run"


if __name__ == "__main__":
    main()
