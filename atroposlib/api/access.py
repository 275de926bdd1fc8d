"""Who may call which route of the service: one rule per route, and none means admin only; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

__all__ = ["UNKNOWN_ROUTE", "Role", "Rule", "changes_on_get", "path_of", "rule_for"]


class Role(str, Enum):
    """What the holder of a token is."""

    ENVIRONMENT = "environment"
    """Registers environments, posts groups, asks how much to produce."""
    TRAINER = "trainer"
    """Registers the run, takes batches, reads every figure."""
    ADMIN = "admin"
    """May call everything, including what shows data or destroys it."""


class Rule(NamedTuple):
    """One route and who may call it."""

    route: str
    """The path with `{}` where a value stands; a bounded label for metrics."""
    roles: frozenset[Role]
    is_open: bool = False
    """Whether no token is needed."""
    changes_on_get: bool = False
    """Whether a GET changes the run, which browsers may not ask for."""


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
"""The last one counts as a heartbeat of the environment."""
_RULES = {
    **{route: Rule(route, _EVERY_ROLE, is_open=True) for route in _OPEN_ROUTES},
    **{
        route: Rule(route, roles, changes_on_get=route in _CHANGING_GETS)
        for route, roles in _ROLES_BY_ROUTE.items()
    },
}
UNKNOWN_ROUTE = Rule("unknown", _ADMIN)
"""What a path gets that no rule names."""
_PATTERNS = [
    (re.compile(route.replace("{}", "[^/]+")), rule)
    for route, rule in _RULES.items()
    if "{}" in route
]


def rule_for(path: str, method: str = "GET") -> Rule:
    """Return the rule of a request; `UNKNOWN_ROUTE` when none names its path.

    Whatever is deleted, only admins may.
    """
    rule = _rule_of_path(path)
    return rule._replace(roles=_ADMIN, is_open=False) if method == "DELETE" else rule


def _rule_of_path(path: str) -> Rule:
    rule = _RULES.get(path)
    if rule is not None:
        return rule
    for pattern, templated in _PATTERNS:
        if pattern.fullmatch(path):
            return templated
    return UNKNOWN_ROUTE


def changes_on_get(scope: Mapping[str, Any]) -> bool:
    """Whether a GET of this ASGI scope changes the run."""
    return rule_for(path_of(scope)).changes_on_get


def path_of(scope: Mapping[str, Any]) -> str:
    """Return the path that routing looks at: without the prefix a proxy was told to add."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and path.startswith(f"{prefix}/"):
        return path[len(prefix) :]
    return path
