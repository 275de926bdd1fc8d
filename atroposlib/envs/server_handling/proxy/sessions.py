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
from atroposlib.envs.server_handling.proxy.refusals import (
    ProxyRefusal,
    bad_request,
    session_not_found,
)
from atroposlib.envs.server_handling.proxy.request_models import SessionCreateRequest
from atroposlib.envs.server_handling.proxy.session import SessionState
from atroposlib.envs.server_handling.proxy.settings import ProxySettings

__all__ = ["SESSION_HEADER", "SessionStore"]

SESSION_HEADER = "X-Session-ID"
"""Names the part of a session that a request belongs to, for agents that share one key."""

_RETRY_S = 30
_LONGEST_PART_ID = 256
KEY_PREFIX = "sk-atropos-"
"""Some agents insist on keys that begin like OpenAI's."""


class SessionStore:
    """Sessions by name and by key. Only digests of keys are looked up.

    A session that nobody used for `session_idle_s` is gone the moment it is asked for; `expire`
    frees what nobody asks for.

    Args:
        settings: Limits.
        clock: Seconds since the epoch.
        open_backend: Returns what another session of the same kind stands on.
    """

    def __init__(
        self,
        settings: ProxySettings,
        clock: Callable[[], float] = time.time,
        open_backend: Callable[[SessionCreateRequest], Backend] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._open_backend = open_backend
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
        opened = [p for s in self._by_uuid.values() for p in (s, *s.parts.values())]
        faces: list[Any] = [session.managed_server.server for session in opened]
        return Counter(id(face.current) for face in faces)

    def check_room(self) -> None:
        """Raise the 429 when as many sessions are open as are allowed."""
        self.expire()
        num_open = sum(1 + len(session.parts) for session in self._by_uuid.values())
        if num_open >= self._settings.max_sessions:
            raise ProxyRefusal(
                f"{num_open} sessions are open, as many as are allowed; delete some, "
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
        session = self._new(backend, request, model_name=model_name)
        self._by_uuid[session.uuid] = session
        self._by_digest[_digest(session.api_key)] = session
        return session

    def part(self, session: SessionState, part_id: str, *, opens: bool) -> SessionState:
        """Return the part of a session that requests name, and note its use.

        A part records its own sequences. It is opened by the first request that names it, and ends
        with the session.

        Args:
            session: Whose key the request shows.
            part_id: Any name that tells rollouts apart; the session's own is the session.
            opens: Whether to open a part that is not there.

        Raises:
            ProxyRefusal: 404 for an unknown part, 429 without room, 400 for too long a name.
        """
        if part_id == session.uuid:
            return session
        part = session.parts.get(part_id)
        if part is None:
            if len(part_id) > _LONGEST_PART_ID:
                raise bad_request(
                    f"{SESSION_HEADER} has {len(part_id)} characters, at most "
                    f"{_LONGEST_PART_ID} are allowed"
                )
            if not opens or self._open_backend is None:
                raise session_not_found()
            self.check_room()
            backend = self._open_backend(session.wanted)
            part = self._new(backend, session.wanted, model_name=session.model_name)
            session.parts[part_id] = part
        part.last_accessed = self._clock()
        return part

    def delete_part(self, session: SessionState, part_id: str) -> None:
        """Forget a part of a session and end its requests; raises the 404 for an unknown one."""
        self.part(session, part_id, opens=False)
        session.parts.pop(part_id).close()

    def _new(
        self, backend: Backend, request: SessionCreateRequest, *, model_name: str
    ) -> SessionState:
        now = self._clock()
        return SessionState(
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
            wanted=request,
        )

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
        idle_s = self._clock() - session.last_used
        if session.num_in_flight or idle_s < self._settings.session_idle_s:
            return False
        self.delete(session)
        return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
