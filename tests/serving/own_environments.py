"""Environments whose episodes do what the turns say; their classes are found by `module:Class`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnv
from atroposlib.envs.single_turn_env import SingleTurnEnv
from atroposlib.envs.tools import ToolCall, ToolConversation

__all__ = [
    "CollectingEnv",
    "EchoEnv",
    "OwnCallsEnv",
    "QuestionEnv",
    "StubbornEnv",
    "ToolsByItemEnv",
]

QUESTIONS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(3)]


class QuestionEnv(SingleTurnEnv):
    """Three sums; a score has two parts.

    The second paragraph is not part of the description.
    """

    name = "questions"

    async def setup(self) -> None:
        self.remaining = list(QUESTIONS)

    async def get_next_item(self) -> Any:
        return self.remaining.pop(0) if self.remaining else None

    def eval_items(self) -> Sequence[Any]:
        return QUESTIONS[:2]

    def prompt(self, item: Any) -> list[ChatMessage]:
        return [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": item["question"]},
        ]

    async def score(self, item: Any, answer: str) -> dict[str, float]:
        return {"right": float(answer == item["answer"]), "short": float(len(answer) == 1)}


class Echo(Conversation):
    """Repeats turns; some words make it fail, hang or end.

    Attributes:
        closed: number of closed conversations of this process.
        opened: number of conversations.
    """

    opened: ClassVar[int] = 0
    closed: ClassVar[int] = 0
    unfinished_reward = -2.0

    def __init__(self, item: int) -> None:
        self.item = item
        self.turns: list[Turn] = []
        Echo.opened += 1

    def opening(self) -> list[ChatMessage]:
        if self.item == 13:
            raise ValueError("/secret/path")
        return [{"role": "user", "content": f"item {self.item}"}]

    async def reply(self, turn: Turn) -> Reply:
        self.turns.append(turn)
        word = turn.answer
        if word == "raise":
            raise ValueError("/secret/path")
        if word == "hang":
            await asyncio.sleep(3600)
        if word == "nothing":
            return None  # type: ignore[return-value]
        if word == "nan":
            return Reply("x", reward=float("nan"))
        if word == "summary":
            return Reply("go on", history=[{"role": "user", "content": "short"}])
        if word == "end":
            return Reply(reward={"won": 1.0, "neat": 0.5}, is_done=True)
        return Reply(f"you said {word}", reward=0.25)

    async def close(self) -> None:
        Echo.closed += 1


class EchoEnv(MultiTurnEnv):
    """Conversations that repeat what they are sent."""

    name = "echo"
    default_settings: ClassVar[dict[str, Any]] = {"max_turns": 3, "reward_weights": {"neat": 2.0}}

    async def setup(self) -> None:
        self.drawn = 0

    async def get_next_item(self) -> int:
        self.drawn += 1
        return self.drawn - 1

    def start_conversation(self, item: int) -> Conversation:
        return Echo(item)


class StubbornEnv(EchoEnv):
    """Its setup fails."""

    async def setup(self) -> None:
        raise RuntimeError("no data")


def double(number: int) -> int:
    """Double a number.

    Args:
        number: Any number.
    """
    return 2 * number


def halve(number: int) -> float:
    """Halve a number."""
    return number / 2


class CalculatorTask(ToolConversation):
    """Asks for a number; the answer is scored."""

    def __init__(self, item: int, tools: Sequence[Any]) -> None:
        super().__init__([{"role": "user", "content": f"double {item}"}], tools)
        self.item = item

    async def score(self, turn: Turn) -> float:
        return float(turn.answer == str(2 * self.item))


class ToolsByItemEnv(EchoEnv):
    """The second item has other tools than the first."""

    def start_conversation(self, item: int) -> Conversation:
        return CalculatorTask(item, [double] if item == 0 else [double, halve])


class OwnCalls(CalculatorTask):
    """Has a format of calls of its own, so its tools cannot be called by name."""

    def find_calls(self, answer: str) -> list[ToolCall]:
        return [ToolCall(name="double", arguments={"number": 4})] if answer == "DOUBLE 4" else []


class OwnCallsEnv(EchoEnv):
    """Tools whose calls are part of the texts."""

    def start_conversation(self, item: int) -> Conversation:
        return OwnCalls(item, [double])


class RescoringEnv(EchoEnv):
    """Changes the rewards of finished conversations."""

    async def collect_trajectory(self, item: Any) -> Any:
        rollout, backlog = await super().collect_trajectory(item)
        rollout.rewards = [0.0 for _ in rollout.rewards]
        return rollout, backlog


class RankingEnv(QuestionEnv):
    """Ranks the answers of a group."""

    def group_scores(self, scores: Sequence[float], trajectories: Sequence[Any]) -> list[float]:
        return [float(rank) for rank, _ in enumerate(scores)]


class CollectingEnv(BaseEnv):
    """Collects its groups itself."""

    async def get_next_item(self) -> int:
        return 0

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return

    async def collect_trajectories(self, item: Any) -> Any:
        return None, []
