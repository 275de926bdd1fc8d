"""Keeping the network out of reach while a check runs, and telling who reached for it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from atroposlib.envs.checks.call_site import awaiting_site, stack_site
from atroposlib.errors import AtroposError

__all__ = ["NetworkAttempt", "NetworkBlockedError", "block_network"]


class NetworkBlockedError(AtroposError, RuntimeError):
    """Something reached for the network during a check.

    No `OSError`: the clients of hubs would take it for a moment's trouble and retry for a minute.
    """


class NetworkAttempt(NamedTuple):
    """One attempt to reach another process over the network."""

    host: str
    is_blocked: bool
    """False on this machine, where connections are let through."""
    where: str | None
    """The author's line that led to it."""


@contextmanager
def block_network() -> Iterator[list[NetworkAttempt]]:
    """Refuse connections and look-ups of names other than this machine's; yield the attempts.

    Connections to this machine are let through; those of the author's code are noted too.
    """
    attempts: list[NetworkAttempt] = []

    def refuse(host: Any) -> None:
        if not _is_local(host):
            where = stack_site(sys._getframe(2)) or awaiting_site()
            attempts.append(NetworkAttempt(str(host), True, where))
            raise NetworkBlockedError(f"the check keeps the network out of reach, {host} included")

    def note_local(address: Any) -> None:
        where = stack_site(sys._getframe(2)) or awaiting_site()
        if where is not None:
            attempts.append(NetworkAttempt(f"{address[0]}:{address[1]}", False, where))

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(host)
        return originals["look_up"](host, *args, **kwargs)

    async def look_up_on_loop(loop: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(host)
        return await originals["look_up_on_loop"](loop, host, *args, **kwargs)

    def connect(connection: Any, address: Any) -> Any:
        if connection.family != getattr(socket, "AF_UNIX", None):
            refuse(address[0])
            note_local(address)
        return originals["connect"](connection, address)

    loop_class = asyncio.BaseEventLoop
    originals: dict[str, Any] = {
        "look_up": socket.getaddrinfo,
        "look_up_on_loop": loop_class.getaddrinfo,
        "connect": socket.socket.connect,
    }
    _put(look_up, look_up_on_loop, connect)
    try:
        yield attempts
    finally:
        _put(originals["look_up"], originals["look_up_on_loop"], originals["connect"])


def _put(look_up: Any, look_up_on_loop: Any, connect: Any) -> None:
    socket.getaddrinfo = look_up
    asyncio.BaseEventLoop.getaddrinfo = look_up_on_loop  # type: ignore[method-assign]
    socket.socket.connect = connect  # type: ignore[method-assign]


def _is_local(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False
