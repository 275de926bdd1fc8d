"""An MCP server for tests: `python mcp_servers.py PIDS [--http PORT] [--deaf] [--noisy]`.

Each process writes a file named by its id to the folder PIDS. `--deaf` goes on after the end of
stdin, `--noisy` fills stderr.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from starlette.requests import Request
from starlette.responses import JSONResponse

server = MCPServer("tests")
notes: dict[str, list[str]] = {}


def session_of(ctx: Context) -> str:
    """Return the id of an HTTP session; a process on stdio has one session."""
    headers = ctx.headers or {}
    return str(headers.get("mcp-session-id", "stdio"))


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool()
def remember(text: str, ctx: Context) -> str:
    """Keep a note; returns all notes of this session."""
    kept = notes.setdefault(session_of(ctx), [])
    kept.append(text)
    return " ".join(kept)


@server.tool()
def fail() -> str:
    """Raise an exception."""
    raise ValueError("this tool always fails")


@server.tool()
async def hang() -> str:
    """Take an hour."""
    await asyncio.sleep(3600)
    return "late"


@server.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def long_text(length: int) -> str:
    """Return many letters."""
    return "x" * length


@server.custom_route("/sessions", methods=["GET"])
async def sessions(request: Request) -> JSONResponse:
    return JSONResponse(len(server.session_manager._server_instances))


def main() -> None:
    pids = Path(sys.argv[1])
    (pids / str(os.getpid())).touch()
    if "--noisy" in sys.argv:
        for _ in range(20_000):
            print("x" * 100, file=sys.stderr)
        print("the last line", file=sys.stderr, flush=True)
    if "--http" in sys.argv:
        port = int(sys.argv[sys.argv.index("--http") + 1])
        server.run("streamable-http", port=port)
    else:
        server.run("stdio")
    if "--deaf" in sys.argv:
        time.sleep(3600)


if __name__ == "__main__":
    main()
