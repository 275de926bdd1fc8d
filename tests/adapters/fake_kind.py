"""An adapter whose episodes do what a test tells them; for the rules of `AdapterEnv` alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import openai
import pytest

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    AgentEndpoint,
    AgentEpisode,
    Episode,
    EpisodeEnd,
)
from atroposlib.adapters.registry import KINDS, Kind
from atroposlib.envs.conversation import ChatMessage, Reply, Turn

__all__ = ["FakeAdapter", "FakeAgent", "FakeEpisode", "add_fake_kind"]

Behaviour = Callable[[Turn], Awaitable[Reply]]


class FakeEpisode(Episode):
    """Answers with a behaviour, and records what was called."""

    def __init__(self, owner: FakeAdapter, number: int) -> None:
        super().__init__()
        self.owner = owner
        self.number = number
        self.calls: list[str] = []

    async def begin(self) -> Sequence[ChatMessage]:
        self.calls.append("begin")
        if self.owner.begin_error is not None:
            raise self.owner.begin_error
        return [{"role": "user", "content": "begin"}]

    async def reply(self, turn: Turn) -> Reply:
        self.calls.append("reply")
        return await self.owner.behaviours[self.number](turn)

    async def truncated(self) -> float:
        self.calls.append("truncated")
        return -3.0

    async def close(self) -> None:
        self.calls.append("close")
        self.metrics["closed"] = 1.0
        if self.owner.close_error is not None:
            raise self.owner.close_error


class FakeAgent(AgentEpisode):
    """Asks the model `num_turns` times through its own client, one conversation."""

    def __init__(self, owner: FakeAdapter, number: int) -> None:
        self.owner = owner
        self.number = number
        self.calls: list[str] = []

    async def run(self, endpoint: AgentEndpoint) -> EpisodeEnd:
        self.calls.append("run")
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        ) as client:
            for _ in range(self.owner.args.num_turns):
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=endpoint.max_tokens
                )
                messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        reward = self.owner.rewards[self.number]
        if isinstance(reward, BaseException):
            raise reward
        return EpisodeEnd(reward, metrics={"num_turns": self.owner.args.num_turns})

    async def close(self) -> None:
        self.calls.append("close")


class FakeArgs(AdapterArgs):
    num_turns: int = 1
    is_agent: bool = False


class FakeAdapter(Adapter):
    """Every episode of the same item; `behaviours` and `rewards` by number of the episode."""

    args_cls = FakeArgs
    made: FakeAdapter | None = None

    def __init__(self, name: str, args: FakeArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.behaviours: Sequence[Behaviour] = ()
        self.rewards: Sequence[Any] = ()
        self.begin_error: Exception | None = None
        self.close_error: Exception | None = None
        self.episodes: list[Any] = []
        self.noted: list[Any] = []
        self.saved: Mapping[str, Any] = {"level": 3}
        self.num_closed = 0
        self._numbers = itertools.count()
        FakeAdapter.made = self

    async def open(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        self.num_closed += 1

    async def item(self, index: int) -> dict[str, Any]:
        return {"index": index, "seed": self.seed}

    async def eval_items(self, limit: int) -> Sequence[dict[str, Any]]:
        return [{"index": -1 - i, "seed": self.seed} for i in range(limit)]

    def start(self, item: dict[str, Any]) -> Any:
        made = FakeAgent if self.args.is_agent else FakeEpisode
        self.episodes.append(made(self, next(self._numbers)))
        return self.episodes[-1]

    def note_rewards(self, item: dict[str, Any], rewards: Sequence[float]) -> None:
        self.noted.append((item["index"], list(rewards)))

    def state(self) -> dict[str, Any]:
        return dict(self.saved)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.saved = state


def add_fake_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Kind("for tests", f"{__name__}:FakeAdapter", "any")
    monkeypatch.setitem(KINDS, "fake", entry)
