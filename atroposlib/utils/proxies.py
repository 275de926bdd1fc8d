"""Proxies of the environment variables `http_proxy` and its like, which cannot reach this machine.

An engine or a service on this machine is addressed as `localhost` or `127.0.0.1`. A client that
reads the variables sends these requests to the proxy, for which `localhost` is another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from atroposlib.utils.listening import is_loopback

__all__ = ["exempt_hosts", "exempt_this_machine", "may_use_proxy"]

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_ALL = "*"


def may_use_proxy(url: str) -> bool:
    """Return whether a proxy is set and the host of the URL is not this machine."""
    from urllib.request import getproxies  # slow, and commands import this module early

    return bool(getproxies()) and not is_loopback(urlsplit(url).hostname or "")


def exempt_this_machine() -> None:
    """Add this machine to `no_proxy` and `NO_PROXY`, if the variables name a proxy.

    It is for commands, whose process and children also use the clients of other libraries.
    """
    exempt_hosts(_THIS_MACHINE)


def exempt_hosts(names: Iterable[str]) -> None:
    """Add hosts to `no_proxy` and `NO_PROXY`, if the variables name a proxy."""
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    listed = [host.strip() for host in excepted.split(",") if host.strip()]
    proxies = {name.lower() for name, value in os.environ.items() if value} - {"no_proxy"}
    if _ALL in listed or not any(name.endswith("_proxy") for name in proxies):
        return
    hosts = [*listed, *(host for host in names if host not in listed)]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)
