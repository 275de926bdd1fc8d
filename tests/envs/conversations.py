"""Conversations and helpers for tests of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import Limits, Rollout, TokenPolicy, play
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from tests.fakes import CharTokenizer, ScriptedEngine

__all__ = ["ScriptedConversation", "play_on", "text_of"]

OPENING = [{"role": "user", "content": "begin"}]


class ScriptedConversation(Conversation):
    """Gives the replies it was made with, and records the turns."""

    unfinished_reward = -5.0

    def __init__(self, replies: Sequence[Reply], *, delay_s: float = 0.0) -> None:
        self.replies = replies
        self.delay_s = delay_s
        self.turns: list[Turn] = []
        self.num_closed = 0
        self.was_asked = asyncio.Event()

    def opening(self) -> Sequence[ChatMessage]:
        return OPENING

    async def reply(self, turn: Turn) -> Reply:
        self.turns.append(turn)
        self.was_asked.set()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return self.replies[turn.index]

    async def close(self) -> None:
        self.num_closed += 1


async def play_on(
    engine: ScriptedEngine,
    conversation: Conversation,
    *,
    tokenizer: Any = None,
    **limits: Any,
) -> Rollout:
    """Play with exact tokens on a scripted engine."""
    tokenizer = tokenizer or CharTokenizer()
    server = VLLMServer(
        APIServerConfig(model_name="m", base_url=engine.base_url, health_check=False)
    )
    try:
        policy = TokenPolicy(ManagedServer(server, tokenizer=tokenizer), tokenizer)
        return await play(conversation, policy, limits=Limits(**{"max_tokens": 4000, **limits}))
    finally:
        await server.close()


def text_of(ids: Sequence[int]) -> str:
    return CharTokenizer().decode(ids)
