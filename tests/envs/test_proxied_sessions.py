"""Environments whose tracked sessions live at a proxy, which answers chats only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.multi_turn_env import Conversation, MultiTurnEnv, MultiTurnEnvConfig, Reply
from atroposlib.envs.server_handling.proxy.app import create_app, serving
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from tests.envs.conftest import CharTokenizers
from tests.server_handling.proxy.engine import RecordingEngine, manager_of

SERVERS = [APIServerConfig(base_url="http://unused/v1", server_type="vllm")]
HI: list[Any] = [{"role": "user", "content": "hi"}]


class Talk(Conversation):
    """Three turns; the third one has a new history."""

    def opening(self) -> Any:
        return HI

    async def reply(self, turn: Any) -> Reply:
        if turn.index == 1:
            return Reply("next level", history=[{"role": "system", "content": "level 2"}])
        return Reply("go on") if turn.index == 0 else Reply(reward=1.0, is_done=True)


class TalkEnv(MultiTurnEnv):
    def start_conversation(self, item: Any) -> Conversation:
        return Talk()

    async def get_next_item(self) -> Any:
        return 1


class PrefilledEnv(SingleTurnEnv):
    prefill = "<think>"

    def prompt(self, item: Any) -> Any:
        return HI

    async def score(self, item: Any, answer: str) -> float:
        return float(len(answer))

    async def get_next_item(self) -> Any:
        return 1


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RecordingEngine]:
    """The engine of a proxy at which environments open their sessions."""
    engine = RecordingEngine()
    app = create_app(manager_of(engine), engine.tokenizer, "m")
    monkeypatch.setitem(vars(base), "AutoTokenizer", CharTokenizers)
    async with serving(app, host="127.0.0.1", port=0) as port:
        monkeypatch.setenv("ATROPOS_PROXY_URL", f"http://127.0.0.1:{port}")
        yield engine


async def test_conversation_has_the_tokens_of_the_proxys_engine(engine: RecordingEngine) -> None:
    config = MultiTurnEnvConfig(group_size=1, use_wandb=False, tokenizer_name="c")
    env = TalkEnv(config, SERVERS)

    rollouts, _ = await env.collect_trajectories(1)
    group = await env.postprocess_histories(rollouts)
    await env.server.close()

    calls = engine.calls
    assert group["tokens"] == [calls[1].sequences[0], calls[2].sequences[0]]
    trained = [
        [token for token, mask in zip(tokens, masks, strict=True) if mask != -100]
        for tokens, masks in zip(group["tokens"], group["masks"], strict=True)
    ]
    sampled = [call.completion_ids[0] for call in calls]
    assert trained == [sampled[0] + sampled[1], sampled[2]]


async def test_prefill_is_left_out_at_a_proxy(engine: RecordingEngine) -> None:
    config = SingleTurnEnvConfig(group_size=2, use_wandb=False, tokenizer_name="c")
    env = PrefilledEnv(config, SERVERS)

    group, _ = await env.collect_trajectories(1)
    await env.server.close()

    assert group is not None
    assert group["tokens"] == engine.calls[0].sequences
    assert group["scores"] == [3.0, 3.0]
