"""Whether an address can be listened on, said before Gradio says it in its own words."""

from __future__ import annotations

import errno
import socket

__all__ = ["require_free_port"]


def require_free_port(host: str, port: int) -> None:
    """Return when the address can be listened on.

    Raises:
        OSError: it cannot; the message says why, and which flags choose another.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server has it
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} is in use; choose another with --port") from None
        raise OSError(
            f"cannot listen on {host}, port {port} ({error.strerror}); choose others with --host "
            "and --port"
        ) from None
