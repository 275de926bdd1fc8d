"""An inference server in this process that remembers every id it read and wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.proxy.app import create_app
from atroposlib.envs.server_handling.proxy.sessions import ProxySettings
from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight
from tests.fakes import CharTokenizer, logprob_of

__all__ = ["Call", "Clock", "RecordingEngine", "app_of", "manager_of"]


@dataclass(frozen=True)
class Call:
    """One request as the engine saw it."""

    prompt_ids: list[int]
    completion_ids: list[list[int]]
    options: dict[str, Any]

    @property
    def sequences(self) -> list[list[int]]:
        return [self.prompt_ids + ids for ids in self.completion_ids]


@dataclass
class RecordingEngine:
    """Has what sessions use of a server. Replies come from a list, cycled, or a function."""

    replies: Sequence[str] | Callable[[str], str] = ("one", "two", "three")
    tokenizer: Any = field(default_factory=CharTokenizer)
    base_url: str = "http://engine/v1"
    calls: list[Call] = field(default_factory=list)
    server_healthy: bool = True
    error: Exception | None = None
    gate: asyncio.Event | None = None
    """Requests wait for it; None answers at once."""
    num_waiting: int = 0
    num_cancelled: int = 0

    def __post_init__(self) -> None:
        self.sem = AsyncSemWithAdaptiveWeight(8)
        self.eval_sem = AsyncSemWithAdaptiveWeight(8)
        self.config = APIServerConfig(model_name="engine_model", base_url=self.base_url)
        self._num_replies = 0

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        if self.gate is not None:
            await self._wait(self.gate)
        if self.error is not None:
            raise self.error
        prompt_ids = list(kwargs.pop("input_ids"))
        limit = kwargs.get("max_tokens")
        sampled = [self._sample(prompt_ids, limit) for _ in range(kwargs.get("n", 1))]
        self.calls.append(Call(prompt_ids, [ids for ids, _ in sampled], kwargs))
        logprobs = [[logprob_of(t, j) for j, t in enumerate(ids)] for ids, _ in sampled]
        return prompt_ids, [ids for ids, _ in sampled], logprobs, [end for _, end in sampled]

    async def _wait(self, gate: asyncio.Event) -> None:
        self.num_waiting += 1
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_waiting -= 1

    def _sample(self, prompt_ids: list[int], limit: int | None) -> tuple[list[int], str]:
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=True)
        if callable(self.replies):
            text = self.replies(prompt)
        else:
            text = self.replies[self._num_replies % len(self.replies)]
            self._num_replies += 1
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id]
        if limit is not None and len(ids) > limit:
            return ids[:limit], "length"
        return ids, "stop"

    async def close(self) -> None:
        pass


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def manager_of(*engines: Any) -> Any:
    return SimpleNamespace(servers=list(engines))


def app_of(*engines: RecordingEngine, clock: Clock | None = None, **settings: Any) -> Any:
    """Build the proxy's application in front of engines."""
    return create_app(
        manager_of(*engines),
        engines[0].tokenizer if engines else CharTokenizer(),
        "test_model",
        settings=ProxySettings(**settings),
        clock=clock or Clock(),
    )
