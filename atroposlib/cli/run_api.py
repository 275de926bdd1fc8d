"""`run-api`: serve the trajectory API."""

from __future__ import annotations

import argparse
import sys

__all__ = ["main"]

_APP = "atroposlib.api:app"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_S = 3


def main() -> None:
    """Serve until SIGINT or SIGTERM; a port that is taken ends it with code 1."""
    args = _parser().parse_args()
    import uvicorn

    print(_start_message(args.host, args.port), flush=True)
    try:
        uvicorn.run(
            _APP,
            host=args.host,
            port=args.port,
            reload=args.reload,
            # One line per request says nothing to an operator and fills a pipe nobody reads.
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    except SystemExit as stop:
        if stop.code:
            print(
                f"run-api: cannot serve on {args.host}:{args.port}; the line above says why. "
                "If another process uses the port, stop it or choose another with --port.",
                file=sys.stderr,
            )
            sys.exit(1)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run-api",
        description="Serve the trajectory API between environments and a trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument(
        "--reload", action="store_true", help="restart, losing the run, when a source file changes"
    )
    return parser


def _start_message(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    message = f"trajectory API: http://{shown}:{port} (Ctrl-C stops it)"
    if host in _LOOPBACK:
        return message + "\nonly this machine can reach it; to serve others: --host 0.0.0.0"
    return message + "\nanybody who can reach this address can post data and reset the run"


if __name__ == "__main__":
    main()
