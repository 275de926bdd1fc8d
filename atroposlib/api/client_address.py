"""What an address of the trajectory service looks like; pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from atroposlib.errors import ConfigError

__all__ = ["service_address"]


def service_address(text: str) -> str:
    """Return an address without slashes at its end, ready for paths to be put behind it.

    Raises:
        ConfigError: it does not begin with http:// or https://, or names no host or no valid port.
    """
    address = text.rstrip("/")
    if not _is_http(address):
        raise ConfigError(
            f"the address of the trajectory service is {text!r}; expected an address such as "
            "http://localhost:8000"
        )
    return address


def _is_http(address: str) -> bool:
    if not address.lower().startswith(("http://", "https://")):
        return False
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 host that is none
        return False
