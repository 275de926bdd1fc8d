"""Protection of local servers against requests of web pages, for service, agent proxy and viewer.

A browser lets any page send requests to any reachable address, this machine included. The page
cannot read the responses, but it needs none to erase a run.

    request ─► WebPageMiddleware ─► WebPageRule.refusal_of ─► the application, or 403 or 415

A page cannot change these headers of the browser:

    Sec-Fetch-Site    relation of the page to the server; sent to HTTPS and to this machine only
    Origin            origin of the page; sent with POST, WebSockets and CORS requests
    Host              name used by the page; a foreign name after DNS rebinding
    User-Agent        starts with "Mozilla/" in every browser; the only sign of a plain GET

Clients other than browsers send neither of the first two headers and are always served.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = [
    "WebPageMiddleware",
    "WebPageRefusal",
    "WebPageRule",
    "check_allowed_host",
    "names_of_address",
]

logger = logging.getLogger(__name__)

JSON_TYPES = frozenset({"application/json", "text/json"})

_WATCHED = frozenset(
    {
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"sec-fetch-dest",
        b"user-agent",
        b"content-type",
        b"content-length",
        b"transfer-encoding",
    }
)
_READS = frozenset({"GET", "HEAD"})
_FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
_FRAMES = frozenset({b"document", b"iframe", b"frame", b"embed", b"object"})
_BROWSER = b"Mozilla/"
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_PRIVATE_ENDINGS = (".internal", ".local", ".lan", ".localdomain", ".home.arpa")
"""Suffixes of names that local networks assign and public DNS does not."""
_HOST_NAME = re.compile(r"[a-z0-9._-]+")
_ALLOWED_HOST = re.compile(r"\*|(\*\.)?[a-z0-9]([a-z0-9._-]*[a-z0-9])?(:[0-9]{1,5})?")
_MAX_HOST_CHARACTERS = 260
_MAX_TYPE_CHARACTERS = 200
_MAX_LOGGED = 256
_MAX_REMEMBERED = 256
_MAX_REMEMBERED_BYTES = 1024
_SHOWN_CHARACTERS = 100


def check_allowed_host(name: str) -> str:
    """Return a name for `WebPageRule.allowed_hosts` in lower case.

    Raises:
        ValueError: it is not a host name.
    """
    lowered = name.strip().lower()
    if len(lowered) > _MAX_HOST_CHARACTERS or not _ALLOWED_HOST.fullmatch(lowered):
        raise ValueError(
            f"{name[:_SHOWN_CHARACTERS]!r} is not a host name; expected one such as "
            "viewer.example.org, with :PORT where only that port is meant; *.example.org for "
            "every name below, * for any"
        )
    return lowered


def names_of_address(host: str) -> frozenset[str]:
    """Return the host name a server listens on, for `allowed_hosts`; empty for an IP address."""
    name = host.lower()
    return frozenset() if _is_address(name) or not _HOST_NAME.fullmatch(name) else frozenset({name})


class WebPageRefusal(NamedTuple):
    """A refused request."""

    status: int
    code: str
    """Machine-readable kind of the refusal."""
    text: str
    """Reason and remedy."""


@dataclass(frozen=True)
class WebPageRule:
    """The requests of browsers that one application accepts; pure except for a cache.

    Example: `WebPageRule(allowed_hosts=frozenset({"runs.example.org"}))` accepts programs, its own
    pages under this name or a local one, and links of other pages to read-only pages.
    """

    allowed_hosts: frozenset[str] = frozenset()
    """Further names of this machine, as returned by `check_allowed_host`."""
    allowed_origins: frozenset[str] = frozenset()
    """Origins whose pages may send any request, such as `https://runs.example.org`; `*` is all."""
    machine_name: str = ""
    """Name of this machine, with or without its domain."""
    media_types: frozenset[str] = JSON_TYPES
    """Media types that the application reads, in addition to types ending in `+json`."""
    changes: Callable[[Mapping[str, Any]], bool] = field(default=lambda scope: False)
    """Whether a GET of this ASGI scope changes state."""
    checks_host: bool = True
    """Whether host names are checked; unnecessary if every request is authenticated."""
    has_pages: bool = False
    """Whether the application has pages of its own, which send requests that change state."""
    may_be_framed: bool = False
    """Whether pages of other sites may embed the pages of the application."""
    host_remedy: str = ""
    """Hint how to allow the name `{}`; may be empty."""
    origin_remedy: str = ""
    """Hint how to allow the origin `{}`; may be empty."""
    _passed: set[tuple[Any, ...]] = field(
        default_factory=set, init=False, repr=False, compare=False
    )
    """Cache: (method, address, host, content type) of accepted requests from programs."""

    def refusal_of(self, scope: Mapping[str, Any]) -> WebPageRefusal | None:
        """Return the refusal of an ASGI request; None if it is accepted."""
        sent = {name: value for name, value in scope["headers"] if name in _WATCHED}
        method: str = scope.get("method", "GET")
        origin, site = sent.get(b"origin"), sent.get(b"sec-fetch-site")
        is_browser = (
            origin is not None
            or site is not None
            or sent.get(b"user-agent", b"").startswith(_BROWSER)
        )
        server = scope.get("server")
        address = server[0] if server else None
        known = (method, address, sent.get(b"host"), sent.get(b"content-type"))
        if not is_browser and known in self._passed:
            return None
        refusal = self._of_host(scope, sent, is_browser=is_browser)
        if refusal is None and (origin is not None or site is not None):
            refusal = self._of_page(scope, method, sent)
        if refusal is None and method in _READS:
            return self._of_changing_get(scope, method, origin) if is_browser else None
        refusal = refusal or self._of_type(sent, is_browser=is_browser)
        if refusal is None and not is_browser and self._is_read(sent):
            self._remember(known, sent)
        return refusal

    def _remember(self, known: tuple[Any, ...], sent: Mapping[bytes, bytes]) -> None:
        if (
            len(self._passed) < _MAX_REMEMBERED
            and sum(map(len, sent.values())) <= _MAX_REMEMBERED_BYTES
        ):
            self._passed.add(known)

    def _of_host(
        self, scope: Mapping[str, Any], sent: Mapping[bytes, bytes], *, is_browser: bool
    ) -> WebPageRefusal | None:
        """Refuse unknown host names; from other machines, only in requests of web pages."""
        host = sent.get(b"host")
        if host is None or not self.checks_host:
            return None
        server = scope.get("server")
        origin = sent.get(b"origin")
        from_page = not self.has_pages and origin and not self._is_allowed_origin(_text(origin))
        if not from_page and not (server and _is_loopback(server[0])):
            return None
        # Bounds the size of cached headers.
        if len(host) <= _MAX_HOST_CHARACTERS and _is_own_name(
            host, self.machine_name, not is_browser
        ):
            return None
        if self.allowed_hosts and self._allows(_text(host)):
            return None
        name = _shown(_name_and_port(_text(host))[0])
        remedy = self.host_remedy.format(name)
        return WebPageRefusal(
            403,
            "foreign_host",
            f"the request was sent to the name {name}, which is not known to be this machine's; "
            f"use localhost or 127.0.0.1{', or ' if remedy else ''}{remedy}",
        )

    def _of_page(
        self, scope: Mapping[str, Any], method: str, sent: Mapping[bytes, bytes]
    ) -> WebPageRefusal | None:
        """Refuse requests of pages of other sites, except links to read-only pages."""
        origin, site = sent.get(b"origin"), sent.get(b"sec-fetch-site")
        if origin is not None and self._is_allowed_origin(_text(origin)):
            return None
        if site in _FOREIGN_SITES:
            may_pass = origin is None and self._is_link(method, sent)
        elif site == b"same-origin" or origin is None:
            may_pass = True  # compared by the browser, before any proxy that changes names
        else:
            may_pass = _is_same_origin(_text(origin), _text(sent.get(b"host", b"")))
        if may_pass:
            return None
        whose = "another site" if origin is None else _shown(_text(origin))
        remedy = "" if origin is None else self.origin_remedy.format(_shown(_text(origin)))
        return WebPageRefusal(
            403,
            "foreign_page",
            f"the request comes from a web page of {whose}, and pages of other addresses may only "
            f"link here; send it from a program{', or ' if remedy else ''}{remedy}",
        )

    def _is_allowed_origin(self, origin: str) -> bool:
        if origin in self.allowed_origins or "*" in self.allowed_origins:
            return True
        scheme, _, authority = origin.partition("://")
        own = f":{_DEFAULT_PORTS.get(scheme, '')}"
        # An origin includes the port: another port is another program.
        return any(
            "*" not in allowed and authority.removesuffix(own) == allowed.removesuffix(own)
            for allowed in self.allowed_hosts
        )

    def _is_link(self, method: str, sent: Mapping[bytes, bytes]) -> bool:
        frame = sent.get(b"sec-fetch-dest", b"")
        return (
            method in _READS
            and sent.get(b"sec-fetch-mode") == b"navigate"
            and (frame == b"document" or (self.may_be_framed and frame in _FRAMES))
        )

    def _of_changing_get(
        self, scope: Mapping[str, Any], method: str, origin: bytes | None
    ) -> WebPageRefusal | None:
        """Refuse GETs of browsers that change state; links and previews send them."""
        if not self.changes(scope):
            return None
        if origin is not None and self._is_allowed_origin(_text(origin)):
            return None
        path = _shown(scope["path"])
        return WebPageRefusal(
            403,
            "browser_changes",
            f"{method} {path} changes something, and browsers may not ask for it; send it from a "
            "program, such as curl",
        )

    def _of_type(self, sent: Mapping[bytes, bytes], *, is_browser: bool) -> WebPageRefusal | None:
        """Refuse bodies of other media types; from programs, a body without a type is JSON."""
        if self._is_read(sent):
            return None
        media_type = _media_type(sent.get(b"content-type", b"")[:_MAX_TYPE_CHARACTERS])
        length = sent.get(b"content-length")
        has_body = b"transfer-encoding" in sent or (length is not None and length.strip(b"0"))
        if not has_body:
            return None
        if not media_type and not is_browser:
            return None
        found = f"the body is {_shown(media_type)}" if media_type else "the body has no type"
        return WebPageRefusal(
            415, "unsupported_media_type", f"{found}; send it as Content-Type: application/json"
        )

    def _is_read(self, sent: Mapping[bytes, bytes]) -> bool:
        media_type = _media_type(sent.get(b"content-type", b"")[:_MAX_TYPE_CHARACTERS])
        return media_type in self.media_types or media_type.endswith("+json")

    def _allows(self, host: str) -> bool:
        name, port = _name_and_port(host)
        return any(
            allowed in ("*", name, f"{name}:{port}")
            or (allowed.startswith("*.") and name.endswith(allowed[1:]))
            for allowed in self.allowed_hosts
        )


class WebPageMiddleware:
    """Refuses requests by a rule, before the body is read.

    Args:
        app: The wrapped application.
        rule: The rule.
        answer: Returns the response to a refusal; the default is `{"detail": text}`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        rule: WebPageRule,
        answer: Callable[[Scope, WebPageRefusal], ASGIApp] | None = None,
    ) -> None:
        self.app = app
        self._rule = rule
        self._answer = answer or _detail
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        refusal = None if kind == "lifespan" else self._rule.refusal_of(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        # Pages can send any number of requests, so each text is logged once.
        if refusal.text not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(refusal.text)
            logger.warning("refused %s: %s", scope.get("method", kind), refusal.text)
        if kind == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.code})
            return
        await self._answer(scope, refusal)(scope, receive, send)


def _detail(scope: Scope, refusal: WebPageRefusal) -> ASGIApp:
    from starlette.responses import JSONResponse  # not needed by settings, which import this page

    return JSONResponse({"detail": refusal.text}, refusal.status)


@lru_cache(maxsize=1024)
def _is_loopback(address: str) -> bool:
    """Whether a connection to this address comes from this machine."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_loopback or (mapped is not None and bool(mapped.is_loopback))


@lru_cache(maxsize=1024)
def _is_own_name(host: bytes, machine_name: str, is_program: bool) -> bool:
    """Whether a `Host` header names this machine.

    Programs may use names that public DNS does not assign, since they do not load pages.
    """
    name, _ = _name_and_port(_text(host))
    own = machine_name.lower()
    if name in ("localhost", own) or name.endswith(".localhost") or _is_address(name):
        return True
    short = own.partition(".")[0]
    if name == short and short:
        return True
    is_private = "." not in name or name.endswith(_PRIVATE_ENDINGS)
    is_alias = is_private or name.partition(".")[0] == short
    return is_program and is_alias and _HOST_NAME.fullmatch(name) is not None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_origin(origin: str, host: str) -> bool:
    scheme, _, authority = origin.partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    if port is None:
        return False
    name, own = _name_and_port(authority)
    target, target_port = _name_and_port(host)
    return name == target and (own or port) == (target_port or port)


def _name_and_port(authority: str) -> tuple[str, str]:
    """Split `name:port`; removes the brackets of IPv6 addresses and a final dot of names."""
    if authority.startswith("["):
        name, _, rest = authority[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, port = authority.partition(":")
    return name.removesuffix("."), port


@lru_cache(maxsize=256)
def _media_type(content_type: bytes) -> str:
    return _text(content_type.partition(b";")[0])


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip().lower()


def _shown(text: str) -> str:
    """Return untrusted text as one short line of ASCII without control characters."""
    cut = text[:_SHOWN_CHARACTERS]
    return cut if re.fullmatch(r"[!-~]+", cut) else json.dumps(cut)
