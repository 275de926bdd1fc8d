"""Addresses of servers: whether one can be listened on, and whether it is of this machine only."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from atroposlib.errors import ConfigError

__all__ = ["CannotListenError", "is_loopback", "require_free_port"]


class CannotListenError(ConfigError, OSError):
    """An address cannot be listened on; the message has the reason and the flags to change it."""


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name `localhost`, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_free_port(host: str, port: int) -> None:
    """Check that an address can be listened on; of the addresses of a name, one is sufficient.

    Raises:
        CannotListenError: the address cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        unusable = [error for family, *_, address in found if (error := _try(family, address))]
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    for reason in unusable:
        # Servers skip address families that the machine does not have.
        if reason.errno == errno.EADDRINUSE or len(unusable) == len(found):
            raise _cannot_listen(host, port, reason) from None


def _try(family: int, address: Any) -> OSError | None:
    """Return the error of binding an address; None without an error."""
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers have it
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListenError:
    if error.errno == errno.EADDRINUSE:
        return CannotListenError(f"port {port} is in use; choose another with --port")
    return CannotListenError(
        f"cannot listen on {host}, port {port} ({error.strerror}); choose others with --host "
        "and --port"
    )
