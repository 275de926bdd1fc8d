"""Bearer tokens: the roles that may call each route, the token file, and the check of each request.

    Authorization: Bearer TOKEN ──► TokenTable.find ──► rule_for(path) ──► route, 401 or 403

There is one rule per route; a path without a rule requires the role admin. Without a token file
requests are not checked. Tokens are kept as keyed hashes, so that neither a message nor a dump of
the object shows one.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)


class Role(str, Enum):
    """The role of the holder of a token."""

    ENVIRONMENT = "environment"
    """Registers environments, posts groups, reads the queue size."""
    TRAINER = "trainer"
    """Registers the run, takes batches, reads all metrics."""
    ADMIN = "admin"
    """May call every route, including those that show or delete data."""


class AccessRule(NamedTuple):
    """One route and the roles that may call it."""

    route: str
    """The path, with `{}` in place of values; also the label of metrics."""
    roles: frozenset[Role]
    is_open: bool = False
    """Whether the route needs no token."""
    changes_on_get: bool = False
    """Whether a GET changes the run; such requests from browsers are rejected."""


_EVERY_ROLE = frozenset(Role)
_ENVIRONMENT = frozenset({Role.ENVIRONMENT, Role.ADMIN})
_TRAINER = frozenset({Role.TRAINER, Role.ADMIN})
_ADMIN = frozenset({Role.ADMIN})

_OPEN_ROUTES = ("/", "/health/live", "/health/ready")
_ROLES_BY_ROUTE: Mapping[str, frozenset[Role]] = {
    "/info": _EVERY_ROLE,
    "/wandb_info": _EVERY_ROLE,
    "/status": _EVERY_ROLE,
    "/status-env": _EVERY_ROLE,
    "/metrics": _EVERY_ROLE,
    "/docs": _EVERY_ROLE,
    "/docs/oauth2-redirect": _EVERY_ROLE,
    "/redoc": _EVERY_ROLE,
    "/openapi.json": _EVERY_ROLE,
    "/register-env": _ENVIRONMENT,
    "/disconnect-env": _ENVIRONMENT,
    "/scored_data": _ENVIRONMENT,
    "/scored_data_list": _ENVIRONMENT,
    "/register": _TRAINER,
    "/batch": _TRAINER,
    "/batch/{}/ack": _TRAINER,
    "/batch/{}/nack": _TRAINER,
    "/policy": _TRAINER,
    "/envs": _TRAINER,
    "/groups": _TRAINER,
    "/groups/{}": _TRAINER,
    "/groups/{}/payload": _ADMIN,
    "/latest_example": _ADMIN,
    "/reset_data": _ADMIN,
}
_CHANGING_GETS = frozenset({"/batch", "/reset_data", "/status-env"})
"""The last one records a heartbeat of the environment."""
_RULES = {
    **{route: AccessRule(route, _EVERY_ROLE, is_open=True) for route in _OPEN_ROUTES},
    **{
        route: AccessRule(route, roles, changes_on_get=route in _CHANGING_GETS)
        for route, roles in _ROLES_BY_ROUTE.items()
    },
}
UNKNOWN_ROUTE = AccessRule("unknown", _ADMIN)
_PATTERNS = [
    (re.compile(route.replace("{}", "[^/]+")), rule)
    for route, rule in _RULES.items()
    if "{}" in route
]


def rule_for(path: str, method: str = "GET") -> AccessRule:
    """Return the rule of a request. DELETE requires the role admin, except to unregister."""
    rule = _RULES.get(path) or next(
        (templated for pattern, templated in _PATTERNS if pattern.fullmatch(path)), UNKNOWN_ROUTE
    )
    if method == "DELETE" and path != "/register":
        return rule._replace(roles=_ADMIN, is_open=False)
    return rule


def changes_on_get(scope: Mapping[str, Any]) -> bool:
    """Whether a GET of this ASGI scope changes the run."""
    return rule_for(path_of(scope)).changes_on_get


def path_of(scope: Mapping[str, Any]) -> str:
    """Return the path without the prefix that a proxy adds (`root_path`)."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and path.startswith(f"{prefix}/"):
        return path[len(prefix) :]
    return path


_MIN_TOKEN_CHARS = 16
_MAX_LOGGED_REFUSALS = 256
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
_NO_TOKEN = "Bearer"
_UNKNOWN_TOKEN = 'Bearer error="invalid_token"'
_OTHER_ROLE = 'Bearer error="insufficient_scope"'


class Holder(NamedTuple):
    """The holder of a token."""

    role: Role
    name: str
    """Name of the holder in logs; role and line number if the file has no name."""


class TokenTable:
    """The holders of tokens; the time of a lookup reveals nothing about the known tokens."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._holders: dict[bytes, Holder] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, token: str, holder: Holder) -> None:
        """Add a token; ConfigError if another holder has the same one."""
        digest = self._digest(token.encode())
        if digest in self._holders:
            other = self._holders[digest].name
            raise ConfigError(f"this is also the token of {other!r}; each holder needs its own")
        self._holders[digest] = holder

    def find(self, token: bytes) -> Holder | None:
        # Digests are made with a secret key, so their comparison reveals nothing about tokens.
        return self._holders.get(self._digest(token))

    def _digest(self, token: bytes) -> bytes:
        return hmac.digest(self._key, token, "sha256")


def read_token_file(path: Path) -> TokenTable:
    """Read a token file: one `role token [name]` per line; `#` starts a comment line.

        # role        token                             name
        environment   c2f6b1d0e0f24e0c9a7f5a2b6d3e8f10  math-cluster
        trainer       7d1d4f6c0b9e4a63a1f0c8e2b5a79341
        admin         e83b7a56d2c94f1f8f0e6a1c3b9d5d72  alice

    A file that other users can read is accepted with a warning.

    Raises:
        ConfigError: the file cannot be read or is malformed; the message names the line and never
            shows a token.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {path}: {error}") from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("%s holds tokens and other users can read it; run: chmod 600 %s", path, path)
    table = TokenTable()
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            table.add(words[1] if len(words) > 1 else "", _holder_of(words, number))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    if not table:
        raise ConfigError(f"{path} holds no token; expected lines of: role token [name]")
    return table


def _holder_of(words: list[str], number: int) -> Holder:
    """Check the words of one line; messages never contain a token."""
    roles = [role.value for role in Role]
    if words[0] not in roles:
        # Not quoted: the word may be a token on a line without a role.
        raise ConfigError(f"the first word is not a role; expected one of {', '.join(roles)}")
    if not 2 <= len(words) <= 3:
        raise ConfigError(f"{len(words)} words; expected: role token [name]")
    if len(words[1]) < _MIN_TOKEN_CHARS or not _TOKEN.fullmatch(words[1]):
        raise ConfigError(
            f"the token must be at least {_MIN_TOKEN_CHARS} of the characters "
            "A-Z a-z 0-9 - . _ ~ + / =; make one with: openssl rand -hex 32"
        )
    return Holder(Role(words[0]), words[2] if len(words) == 3 else f"{words[0]}, line {number}")


class BearerAuthMiddleware:
    """Rejects requests without a known token (401) or with a wrong role for their route (403).

    Requests are rejected before their body is read. OPTIONS is accepted without a token, because
    browsers send preflight requests without one.
    """

    def __init__(self, app: ASGIApp, *, tokens: TokenTable) -> None:
        self.app = app
        self._tokens = tokens
        self._logged: set[tuple[str, str, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = None if scope.get("method") == "OPTIONS" else self._refusal_of(scope)
        await (self.app if refusal is None else refusal)(scope, receive, send)

    def _refusal_of(self, scope: Scope) -> Response | None:
        rule = rule_for(path_of(scope), scope.get("method", "GET"))
        if rule.is_open:
            return None
        token = _bearer_token(scope)
        if token is None:
            return self._refuse(401, rule, "a client", "this route needs a token", _NO_TOKEN)
        holder = self._tokens.find(token)
        if holder is None:
            return self._refuse(401, rule, "a client", "the token is unknown", _UNKNOWN_TOKEN)
        if holder.role in rule.roles:
            return None
        needed = " or ".join(sorted(role.value for role in rule.roles))
        message = f"this route needs the role {needed}; the token has {holder.role.value}"
        return self._refuse(403, rule, holder.name, message, _OTHER_ROLE)

    def _refuse(
        self, status: int, rule: AccessRule, name: str, text: str, challenge: str
    ) -> Response:
        """Return the response of a refusal; each kind is logged once."""
        kind = (name, rule.route, text)
        if kind not in self._logged and len(self._logged) < _MAX_LOGGED_REFUSALS:
            self._logged.add(kind)
            logger.warning("refused %s on %s: %s", name, rule.route, text)
        return JSONResponse({"detail": text}, status, {"WWW-Authenticate": challenge})


def _bearer_token(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else None
    return None
