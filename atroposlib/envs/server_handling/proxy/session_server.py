"""The inference server of one session: what each request sampled, and where it waits for one.

ManagedServer --> SampledServer --> the session's server --down--> another healthy one, or wait
                      |
                      +-- Sample of the request that is running
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.retry import ServerDownError
from atroposlib.envs.server_handling.routing import SessionServer, least_loaded
from atroposlib.envs.server_handling.server_baseline import TokensAndLogprobs

__all__ = ["SAMPLES", "Sample", "SampledServer"]

_POLL_S = 0.1


@dataclass(frozen=True)
class Sample:
    """What the engine read and wrote for one request."""

    prompt_ids: list[int]
    """[P] ids the engine read."""
    completion_ids: list[list[int]]
    """[n][C] ids it sampled."""
    completion_logprobs: list[list[float]]
    """[n][C] their logprobs."""


SAMPLES: ContextVar[list[Sample] | None] = ContextVar("SAMPLES", default=None)
"""Where the running request collects its samples, in the order they were answered."""


class SampledServer(SessionServer):
    """The face of a server towards one session.

    Requests stay at one server, whose cache holds the conversation. When it is down they move to
    another healthy one, or wait up to `wait_s` for any; then `ServerDownError` is raised.

    Args:
        server: The server chosen for the session.
        others: Servers it may move to; empty keeps it where it is.
        wait_s: Longest wait for a server, in seconds.
    """

    def __init__(self, server: Any, others: Sequence[Any] = (), *, wait_s: float) -> None:
        super().__init__(server, self._choose_healthy)
        self._others = list(others)
        self._wait_s = wait_s

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return ids and logprobs, and keep them as a sample of the running request."""
        answer: TokensAndLogprobs = await super().tokens_and_logprobs_completion(**kwargs)
        samples = SAMPLES.get()
        if samples is not None:
            samples.append(Sample(answer[0], answer[1], answer[2]))
        return answer

    async def _choose_healthy(self, current: Any, is_training: bool) -> Any:
        deadline = time.monotonic() + self._wait_s
        while not current.server_healthy:
            healthy = [other for other in self._others if other.server_healthy]
            if healthy:
                return least_loaded(healthy, is_training=is_training)
            if time.monotonic() >= deadline:
                raise ServerDownError(
                    f"every server of the session has been down for {self._wait_s:g} s"
                )
            await asyncio.sleep(_POLL_S)
        return current
