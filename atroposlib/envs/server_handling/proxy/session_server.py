"""The inference server of one session: remembers what each request sampled, outlives an outage.

ManagedServer ──► SessionServer ──► the session's server ──down──► another healthy one, or wait
                      └─ Sample of the request that is running
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.retry import ServerDownError
from atroposlib.envs.server_handling.routing import least_loaded
from atroposlib.envs.server_handling.server_baseline import RAISE_WHEN_DOWN, TokensAndLogprobs

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["SAMPLES", "Sample", "SessionServer"]

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


class SessionServer:
    """The face of a server towards one session.

    Requests stay at one server, whose cache holds the conversation. When it is down they move to
    another healthy one, or wait up to `wait_s` for any; then `ServerDownError` is raised.

    Args:
        server: The server chosen for the session.
        others: Servers it may move to; empty keeps it where it is.
        wait_s: Longest wait for a server, in seconds.

    Attributes:
        server: Where the next request goes.
    """

    def __init__(self, server: Any, others: Sequence[Any] = (), *, wait_s: float) -> None:
        self.server = server
        self._others = list(others)
        self._wait_s = wait_s

    @property
    def config(self) -> Any:
        """Settings of the current server."""
        return self.server.config

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the current server, None without one."""
        return getattr(self.server, "tokenizer", None)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return ids and logprobs, and keep them as a sample of the running request."""
        answer: TokensAndLogprobs = await self._call(
            lambda server: server.tokens_and_logprobs_completion(**kwargs)
        )
        samples = SAMPLES.get()
        if samples is not None:
            samples.append(Sample(answer[0], answer[1], answer[2]))
        return answer

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the server's answer to a chat; for servers without token ids."""
        answer: ChatCompletion = await self._call(lambda server: server.chat_completion(**kwargs))
        return answer

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the server's continuation of a prompt; for servers without token ids."""
        answer: Completion = await self._call(lambda server: server.completion(**kwargs))
        return answer

    async def _call(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        deadline = time.monotonic() + self._wait_s
        while True:
            token = RAISE_WHEN_DOWN.set(True)
            try:
                return await call(self.server)
            except ServerDownError:
                has_moved = self._move()
                if not has_moved and time.monotonic() >= deadline:
                    raise
            finally:
                RAISE_WHEN_DOWN.reset(token)
            if not has_moved:
                await asyncio.sleep(_POLL_S)

    def _move(self) -> bool:
        """Change to another healthy server; whether there is one."""
        healthy = [s for s in self._others if s is not self.server and s.server_healthy]
        if healthy:
            self.server = least_loaded(healthy)
        return bool(healthy)
