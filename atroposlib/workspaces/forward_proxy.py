"""The forward proxy of a workspace: CONNECT and plain HTTP, to allowed hosts only.

    request ─► host and port ─► HostRules.allow_name ─► resolve ─► allow_address ─► connect ─► copy

Names are resolved here and the connection goes to the address that was checked, so a name cannot
lead elsewhere in between. An address must be public, or be named by an entry of the allowlist.

Source: RFC 9110, section 9.3.6; RFC 9112, section 3.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from atroposlib.errors import ConfigError

__all__ = ["HostRules", "Refusal", "Request", "Target", "dial", "parse_request", "resolve"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Range = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a name, or raises OSError."""

PORTS = frozenset({80, 443})
"""Ports of every allowed host; an entry `host:port` adds another one."""
MAX_NAME_CHARACTERS = 253
MAX_TRIED = 4
MAX_LOOKUPS = 8
RESOLVE_S = 10.0
CONNECT_S = 10.0
LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*", re.IGNORECASE)
AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:/?#@\s]+))(?::([0-9]{1,5}))?", re.IGNORECASE)
HOST_SERVICES = (ipaddress.ip_network("168.63.129.16/32"),)
"""Public addresses that clouds answer from within the machine; others are link-local."""
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
UNICAST = ipaddress.ip_network("2000::/3")
"""The only IPv6 addresses that are assigned to machines of the internet."""
EXAMPLES = ipaddress.ip_network("3fff::/20")
ISATAP = (0x00005EFE, 0x02005EFE)
"""Start of the last 64 bits of an address that ends with the IPv4 address of a tunnel."""


class Refusal(Exception):
    """A request that is not forwarded; becomes a response with this status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Target(NamedTuple):
    """A host, in lower case and without brackets, and a port."""

    host: str
    port: int


def parse_target(text: str, *, default_port: int | None) -> Target | None:
    """Parse `host:port`; None if it is malformed, or has no port and there is no default."""
    found = AUTHORITY.fullmatch(text)
    if found is None:
        return None
    host = (found[1] or found[2]).lower().removesuffix(".")
    port = int(found[3]) if found[3] else default_port
    if port is None or not 1 <= port <= 65_535:
        return None
    if address_of(host) is None and not (
        found[2] and len(host) <= MAX_NAME_CHARACTERS and NAME.fullmatch(host)
    ):
        return None
    return Target(host, port)


def address_of(host: str) -> Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


class AllowedHost(NamedTuple):
    """One entry of an allowlist: a name, the end of names, or a range of addresses."""

    name: str | None
    is_wildcard: bool
    range: Range | None
    ports: frozenset[int]


@dataclass(frozen=True)
class HostRules:
    """The hosts and addresses that programs reach.

    Args:
        entries: the allowlist; None allows every public host.
    """

    entries: tuple[AllowedHost, ...] | None

    @classmethod
    def public(cls) -> HostRules:
        return cls(None)

    @classmethod
    def allowlist(cls, hosts: Sequence[str]) -> HostRules:
        """Parse `name`, `*.name`, addresses and CIDR ranges, each optionally with `:port`.

        Raises:
            ConfigError: an entry is malformed.
        """
        return cls(tuple(_entry(host) for host in hosts))

    def allow_name(self, target: Target) -> bool:
        """Whether a host may be resolved; for an address, whether it may be connected to."""
        address = address_of(target.host)
        if address is not None:
            return self.allow_address(address, target.port)
        if self.entries is None:
            return target.port in PORTS
        return any(
            target.port in entry.ports and _matches(entry, target.host) for entry in self.entries
        )

    def allow_address(self, address: Address, port: int, *, is_resolved: bool = False) -> bool:
        """Whether an address may be connected to.

        Args:
            address: the address.
            port: its port.
            is_resolved: whether it is the address of a name that is allowed.
        """
        if any(
            entry.range is not None and address in entry.range and port in entry.ports
            for entry in self.entries or ()
        ):
            return True
        if self.entries is None and port not in PORTS:
            return False
        return (is_resolved or self.entries is None) and is_public(address)


def _entry(text: str) -> AllowedHost:
    host, ports = text.strip().lower(), PORTS
    for kind in (host, host.removeprefix("[").removesuffix("]")):
        with contextlib.suppress(ValueError):
            return AllowedHost(None, False, ipaddress.ip_network(kind, strict=False), ports)
    found = re.fullmatch(r"(.+):([0-9]{1,5})", host)
    if found is not None and 1 <= int(found[2]) <= 65_535:
        host, ports = found[1], frozenset({int(found[2])})
        with contextlib.suppress(ValueError):
            bare = host.removeprefix("[").removesuffix("]")
            return AllowedHost(None, False, ipaddress.ip_network(bare, strict=False), ports)
    is_wildcard = host.startswith("*.")
    name = host.removeprefix("*.").removesuffix(".")
    if len(name) > MAX_NAME_CHARACTERS or NAME.fullmatch(name) is None:
        raise ConfigError(
            f"allowed hosts: {text!r} is malformed; expected a host name, *.name, an IP address or "
            "a CIDR range, optionally with :port"
        )
    return AllowedHost(name, is_wildcard, None, ports)


def _matches(entry: AllowedHost, host: str) -> bool:
    if entry.name is None:
        return False
    return host.endswith(f".{entry.name}") if entry.is_wildcard else host == entry.name


def is_public(address: Address) -> bool:
    """Whether an address is a public one; for one that contains an IPv4 address, whether both are.

    Loopback, private, link-local, shared, reserved and multicast addresses are not, nor are
    those of cloud services for the machine itself.
    """
    inner = _inner(address)
    if inner is not None and not is_public(inner):
        return False
    if any(address.version == each.version and address in each for each in HOST_SERVICES):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None or address in TRANSLATED:
            return True  # as the IPv4 address that it contains
        if address not in UNICAST or address in EXAMPLES:
            return False
    return address.is_global and not address.is_multicast


def _inner(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which an IPv6 address may be translated."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo is not None:
        return address.teredo[1]
    if (int(address) >> 32) & 0xFFFFFFFF in ISATAP:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def is_own(address: Address) -> bool:
    """Whether an address belongs to this machine: a socket can be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((str(address), 0))
        return True
    return False


async def resolve(name: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, as the system resolves it."""
    loop = asyncio.get_running_loop()
    look_up = functools.partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
    found = await loop.run_in_executor(_lookup_threads(), look_up)
    return [str(address[0]) for *_, address in found]


@functools.cache
def _lookup_threads() -> ThreadPoolExecutor:
    """Return threads of their own, since a name server that does not answer blocks them."""
    return ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="atropos-lookup")


async def dial(
    target: Target, rules: HostRules, resolve: Resolve
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a host that the rules allow, at an address that they allow.

    Raises:
        Refusal: 403 if the rules do not allow it, 502 or 504 if it cannot be reached.
    """
    shown = f"{target.host}:{target.port}"
    if not rules.allow_name(target):
        raise Refusal(403, f"the network policy of this workspace does not allow {shown}")
    addresses = await _addresses(target, resolve)
    is_name = address_of(target.host) is None
    for address in addresses:
        if not rules.allow_address(address, target.port, is_resolved=is_name):
            raise Refusal(403, f"{shown} has the address {address}, which is not public")
        if is_public(address) and is_own(address):
            raise Refusal(403, f"{shown} has the address {address} of the machine itself")
    for address in addresses[:MAX_TRIED]:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            connecting = asyncio.open_connection(str(address), target.port)
            return await asyncio.wait_for(connecting, CONNECT_S)
    raise Refusal(502, f"no connection to {shown}")


async def _addresses(target: Target, resolve: Resolve) -> list[Address]:
    address = address_of(target.host)
    if address is not None:
        return [address]
    try:
        found = await asyncio.wait_for(resolve(target.host, target.port), RESOLVE_S)
        addresses = [ipaddress.ip_address(each) for each in dict.fromkeys(found)]
    except asyncio.TimeoutError as error:
        raise Refusal(504, f"{target.host} was not resolved within {RESOLVE_S:g} s") from error
    except (OSError, ValueError) as error:
        raise Refusal(502, f"{target.host} cannot be resolved") from error
    if not addresses:
        raise Refusal(502, f"{target.host} has no address")
    return addresses


REQUEST_LINE = re.compile(r"([A-Z]{1,16}) ([\x21-\x7e]+) HTTP/1\.([01])")
FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
PLAIN = re.compile(r"http://([^/?#]+)(/[^#]*|\?[^#]*)?", re.IGNORECASE)
MAX_FIELDS = 100
DROPPED = frozenset(
    {"host", "connection", "keep-alive", "te", "trailer", "upgrade"}
    | {"proxy-connection", "proxy-authorization", "proxy-authenticate"}
)
"""Header fields that concern the proxy, or that it writes itself."""


@dataclass(frozen=True)
class Request:
    """A request to the proxy."""

    target: Target
    head: bytes | None
    """Head to send to the target; None for CONNECT, which sends nothing."""


def parse_request(head: bytes) -> Request:
    """Parse the head of a request, up to the empty line.

    Raises:
        Refusal: 400, the head is malformed or neither CONNECT nor an absolute http URL.
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    line = REQUEST_LINE.fullmatch(lines[0])
    fields = [FIELD.fullmatch(each) for each in lines[1:]]
    if line is None or len(fields) > MAX_FIELDS or None in fields:
        raise Refusal(400, "the request is malformed")
    method, path = line[1], line[2]
    if method == "CONNECT":
        target = parse_target(path, default_port=None)
        if target is None:
            raise Refusal(400, "CONNECT takes host:port")
        return Request(target, None)
    found = PLAIN.fullmatch(path)
    target = parse_target(found[1], default_port=80) if found else None
    if found is None or target is None:
        raise Refusal(400, "expected CONNECT host:port or a URL http://host[:port]/path")
    pairs = [(each[1], each[2]) for each in fields if each is not None]
    named = _options(pairs)
    kept = [f"{name}: {value}" for name, value in pairs if name.lower() not in DROPPED | named]
    origin = found[2] or "/"
    origin = origin if origin.startswith("/") else f"/{origin}"
    words = [f"{method} {origin} HTTP/1.{line[3]}", f"Host: {found[1]}", *kept, "Connection: close"]
    return Request(target, "\r\n".join([*words, "", ""]).encode("latin-1"))


def _options(pairs: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Return the fields that `Connection` names; those that frame the body are kept."""
    values = ",".join(value for name, value in pairs if name.lower() == "connection")
    named = {each.strip().lower() for each in values.split(",")}
    return frozenset(named - {"content-length", "transfer-encoding"})
