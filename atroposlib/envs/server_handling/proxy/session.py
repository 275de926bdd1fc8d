"""One agent's conversation space: its key, its recorded sequences, its requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from atroposlib.envs.server_handling.managed_server import (
    DummyManagedServer,
    ManagedServer,
    SequenceNode,
)
from atroposlib.envs.server_handling.proxy.refusals import session_not_found
from atroposlib.envs.server_handling.proxy.request_models import SessionCreateRequest
from atroposlib.envs.server_handling.proxy.session_server import SAMPLES, Sample

__all__ = ["SessionState"]

T = TypeVar("T")


@dataclass
class SessionState:
    """A session. Everything recorded in it dies with it.

    Several requests may run at the same time; each continues the recorded sequence its prompt
    starts with, or begins one.
    """

    uuid: str
    """Name of the session in addresses."""
    api_key: str = field(repr=False)
    """Key that identifies the session; never logged."""
    managed_server: ManagedServer | DummyManagedServer
    """Records the tokens."""
    model_name: str
    """Model name in answers."""
    tool_parser: str
    """Name of the tool-call format."""
    base_url: str | None
    """Address of the inference server chosen at creation."""
    max_choices: int
    """Largest `n` of one request."""
    created_at: float
    """Seconds since the epoch."""
    last_accessed: float
    """Seconds since the epoch: the last time a request began or ended."""
    clock: Callable[[], float] = field(repr=False)
    """Seconds since the epoch."""
    dialect_state: dict[str, Any] = field(default_factory=dict, repr=False)
    """What a dialect keeps for this session under its own name, as earlier responses by id."""
    wanted: SessionCreateRequest = field(default_factory=SessionCreateRequest)
    """What it was opened with."""
    parts: dict[str, SessionState] = field(default_factory=dict, repr=False)
    """Sessions of their own beside its key, by the id that their requests name."""
    is_closed: bool = False
    """Whether it was deleted or expired."""
    _in_flight: set[asyncio.Future[Any]] = field(default_factory=set, repr=False)

    @property
    def nodes(self) -> list[SequenceNode]:
        """The recorded sequences, oldest first; its own, then those of each part."""
        state = self.managed_server.get_state()
        nodes = state["sequences"].values() if "sequences" in state else state["nodes"]
        return [*nodes, *(node for part in self.parts.values() for node in part.nodes)]

    @property
    def num_in_flight(self) -> int:
        """Requests that wait for the engine, those of its parts included."""
        return len(self._in_flight) + sum(part.num_in_flight for part in self.parts.values())

    @property
    def last_used(self) -> float:
        """When it or one of its parts was used last, in seconds since the epoch."""
        return max([self.last_accessed, *(part.last_accessed for part in self.parts.values())])

    async def run(self, call: Callable[[Any], Awaitable[T]]) -> tuple[T, list[Sample]]:
        """Make one request of the managed server; return its answer and what was sampled for it.

        Cancelling gives the engine's slot back, and nothing is recorded.

        Raises:
            ProxyRefusal: the session was deleted before or during the request.
        """
        if self.is_closed:
            raise session_not_found()
        samples: list[Sample] = []
        token = SAMPLES.set(samples)
        task = asyncio.ensure_future(call(self.managed_server))
        SAMPLES.reset(token)
        self._in_flight.add(task)
        self.last_accessed = self.clock()
        try:
            return await task, samples
        except asyncio.CancelledError:
            if self.is_closed:
                raise session_not_found() from None
            raise
        finally:
            self._in_flight.discard(task)
            self.last_accessed = self.clock()

    def close(self) -> None:
        """Cancel what is in flight and forget every sequence."""
        self.is_closed = True
        for task in self._in_flight:
            task.cancel()
        self.managed_server.reset()
        self.dialect_state.clear()
        for part in self.parts.values():
            part.close()
        self.parts.clear()
