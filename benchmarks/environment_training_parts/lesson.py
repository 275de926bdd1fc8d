"""What one environment needs to be learned by a tiny model: small settings and a poor player.

environment's own items ─► player, who knows the form but not the skill ─► conversations
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.conversation import ChatMessage, Conversation
from atroposlib.envs.multi_turn_env import Limits, TokenSequence, play
from example_trainer.demo.settings import DemoSettings
from example_trainer.launch.report import RewardMetric

__all__ = ["Lesson", "WarmUp", "played_out"]

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class WarmUp:
    """Imitation of the player, which leaves the model about as good as that player is."""

    steps: int
    """Optimiser steps."""

    num_conversations: int = 8_000
    """Conversations the player has."""

    lr: float = 2e-3
    """Learning rate."""

    batch_size: int = 64
    """Conversations per step."""


@dataclass(frozen=True)
class Lesson:
    """One environment with everything chosen for it."""

    settings: DemoSettings
    """Door and settings of the environment, sizes of the model and of the training."""

    evaluation: Mapping[str, Any]
    """Settings of the environment that differ in evaluations."""

    warm_up: WarmUp
    """How the model gets its start."""

    conversations: Callable[[int], Iterator[Messages]]
    """The first so many conversations of the player, in the words of the environment."""

    measure: str
    """What is measured, in words."""

    value: Callable[[float], float]
    """From the score of one episode of an evaluation to what is averaged."""

    reward: RewardMetric
    """What the environment logs while it trains."""


@dataclass(frozen=True)
class _Written:
    text: str
    is_cut: bool = False


class _Player:
    """A policy that is a function of the chat."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self._answer = answer

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        return max_tokens

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> _Written:
        return _Written(self._answer())

    def sequences(self) -> list[TokenSequence]:
        return []


def played_out(
    conversation: Conversation, answer: Callable[[], str], *, max_turns: int
) -> Messages:
    """Play a conversation with answers of a function; returns the chat at its end.

    Args:
        conversation: Not begun.
        answer: Called once per turn.
        max_turns: Turns at most.
    """
    rollout = asyncio.run(play(conversation, _Player(answer), limits=Limits(max_turns=max_turns)))
    return rollout.messages
