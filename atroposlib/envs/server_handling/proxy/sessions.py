"""The open sessions: created within a limit, found by name or key, forgotten when idle."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from atroposlib.envs.server_handling.proxy.backends import Backend
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, session_not_found
from atroposlib.envs.server_handling.proxy.request_models import SessionCreateRequest
from atroposlib.envs.server_handling.proxy.session import SessionState
from atroposlib.envs.server_handling.proxy.settings import ProxySettings

__all__ = ["SessionStore"]

_RETRY_S = 30
KEY_PREFIX = "sk-atropos-"
"""Some agents insist on keys that begin like OpenAI's."""


class SessionStore:
    """Sessions by name and by key. Only digests of keys are looked up.

    A session that nobody used for `session_idle_s` is gone the moment it is asked for; `expire`
    frees what nobody asks for.

    Args:
        settings: Limits.
        clock: Seconds since the epoch.
    """

    def __init__(self, settings: ProxySettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._by_uuid: dict[str, SessionState] = {}
        self._by_digest: dict[bytes, SessionState] = {}

    def __len__(self) -> int:
        return len(self._by_uuid)

    def __iter__(self) -> Iterator[SessionState]:
        """Iterate over the open sessions, oldest first."""
        self.expire()
        return iter(list(self._by_uuid.values()))

    @property
    def sessions_per_server(self) -> Counter[int]:
        """Open sessions per `id` of the server they use now."""
        faces: list[Any] = [s.managed_server.server for s in self._by_uuid.values()]
        return Counter(id(face.current) for face in faces)

    def check_room(self) -> None:
        """Raise the 429 when as many sessions are open as are allowed."""
        self.expire()
        if len(self._by_uuid) >= self._settings.max_sessions:
            raise ProxyRefusal(
                f"{len(self._by_uuid)} sessions are open, as many as are allowed; delete some, "
                "or wait until idle ones expire",
                status=429,
                kind="rate_limit_error",
                code="too_many_sessions",
                retry_after_s=_RETRY_S,
            )

    def add(
        self, backend: Backend, request: SessionCreateRequest, *, model_name: str
    ) -> SessionState:
        """Open a session under a new name and key; raises the 429 when there is no room."""
        self.check_room()
        now = self._clock()
        session = SessionState(
            uuid=str(uuid.uuid4()),
            api_key=KEY_PREFIX + secrets.token_urlsafe(32),
            managed_server=backend.managed_server,
            model_name=model_name,
            tool_parser=request.tool_parser,
            base_url=backend.base_url,
            max_choices=self._settings.max_choices,
            created_at=now,
            last_accessed=now,
            clock=self._clock,
        )
        self._by_uuid[session.uuid] = session
        self._by_digest[_digest(session.api_key)] = session
        return session

    def find(self, name: str) -> SessionState:
        """Return the session of a name and note its use; raises the 404 when it is not open."""
        session = self._by_uuid.get(name)
        if session is None or self._end_if_idle(session):
            raise session_not_found()
        session.last_accessed = self._clock()
        return session

    def of_key(self, key: str) -> SessionState | None:
        """Return the open session of a key and note its use, None when there is none."""
        session = self._by_digest.get(_digest(key))
        if session is None or self._end_if_idle(session):
            return None
        session.last_accessed = self._clock()
        return session

    def delete(self, session: SessionState) -> None:
        """Forget a session and end its requests."""
        self._by_uuid.pop(session.uuid, None)
        self._by_digest.pop(_digest(session.api_key), None)
        session.close()

    def expire(self) -> int:
        """Delete every idle session; return how many."""
        return sum(self._end_if_idle(session) for session in list(self._by_uuid.values()))

    def close(self) -> None:
        """Delete every session."""
        for session in list(self._by_uuid.values()):
            self.delete(session)

    def _end_if_idle(self, session: SessionState) -> bool:
        idle_s = self._clock() - session.last_accessed
        if session.num_in_flight or idle_s < self._settings.session_idle_s:
            return False
        self.delete(session)
        return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
