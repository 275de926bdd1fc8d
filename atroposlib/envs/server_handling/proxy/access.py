"""Who asks: the key of a request, and the session or the administrator it stands for.

/{uuid}/...   the session of that name; its own key, or none while keys are not required
/v1/...       the session of the key; that of X-Session-ID for the administrator's
the rest      the administrator's key, when there is one

X-Session-ID beside a session's key names a part of it, which records sequences of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from starlette.requests import Request

from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, wrong_key
from atroposlib.envs.server_handling.proxy.session import SessionState
from atroposlib.envs.server_handling.proxy.sessions import SESSION_HEADER, SessionStore
from atroposlib.envs.server_handling.proxy.settings import ProxySettings

__all__ = ["check_admin", "check_anyone", "key_of", "part_of", "session_of"]


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request, from either header the clients use, None without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def part_of(
    request: Request, sessions: SessionStore, settings: ProxySettings, *, opens: bool
) -> SessionState:
    """Return the session of a request, or the part of it that `X-Session-ID` names.

    Args:
        request: Of an agent.
        sessions: The open ones.
        settings: Who must show a key.
        opens: Whether to open a part that is not there.

    Raises:
        ProxyRefusal: as in `session_of`; 404 for an unknown part.
    """
    session = session_of(request, sessions, settings)
    part_id = request.headers.get(SESSION_HEADER, "").strip()
    return sessions.part(session, part_id, opens=opens) if part_id else session


def session_of(request: Request, sessions: SessionStore, settings: ProxySettings) -> SessionState:
    """Return the session a request belongs to and note its use.

    Raises:
        ProxyRefusal: 404 for an unknown name; 401 without a valid key where one is needed, and
            always for the key of another session.
    """
    key = key_of(request.headers)
    name = request.path_params.get("uuid")
    if name is None and key is not None and _is_admin(key, settings):
        name = request.headers.get(SESSION_HEADER, "").strip() or None
    if name is None:
        session = sessions.of_key(key) if key else None
        if session is None:
            raise wrong_key()
        return session
    if name == "v1":  # of /v1/v1/messages
        raise ProxyRefusal(
            "the URL has /v1 twice; Anthropic's clients add it to the base URL themselves",
            status=404,
            code="unknown_url",
        )
    session = sessions.find(name)
    if key is not None and (_is_equal(key, session.api_key) or _is_admin(key, settings)):
        return session
    if settings.require_keys or (key is not None and sessions.of_key(key) is not None):
        raise wrong_key()
    return session


def check_admin(request: Request, settings: ProxySettings) -> None:
    """Raise the 401 unless the request may manage sessions and servers."""
    key = key_of(request.headers)
    if settings.admin_key is not None and not (key and _is_admin(key, settings)):
        raise wrong_key()


def check_anyone(request: Request, sessions: SessionStore, settings: ProxySettings) -> None:
    """Raise the 401 where keys are required and the request has none that is valid."""
    key = key_of(request.headers)
    if settings.require_keys and not (
        key and (_is_admin(key, settings) or sessions.of_key(key) is not None)
    ):
        raise wrong_key()


def _is_admin(key: str, settings: ProxySettings) -> bool:
    return settings.admin_key is not None and _is_equal(key, settings.admin_key)


def _is_equal(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(), second.encode())
