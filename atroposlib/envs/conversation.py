"""What the author of a game or a dialogue writes, and what is handed to it.

    opening ─► the policy writes ─► Turn ─► reply ─► Reply(messages, reward) ─► the policy writes …
                                             └────► Reply(reward, is_done=True) ─► end

The other side of the conversation knows nothing of tokens, servers or groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ChatMessage", "Conversation", "Outcome", "Reply", "Turn", "visible_text"]

ChatMessage = Mapping[str, Any]
"""One entry of a chat: `role` and `content`."""

Outcome = Literal["done", "truncated", "out_of_turns", "timed_out"]
"""How a conversation ended: by a reply that ends it, or at one of the limits."""


def visible_text(text: str) -> str:
    """Return what stands behind the thinking; thinking that was never closed hides the rest.

    A chat template may open the thinking itself, so a lone `</think>` closes it as well.
    """
    before, opened, _ = text.rpartition("</think>")[2].partition("<think>")
    return before.strip() if opened else before.lstrip()


@dataclass(frozen=True)
class Turn:
    """What the policy wrote, and where in the conversation."""

    text: str
    """The whole completion, thinking included."""
    index: int
    """0 for the first turn."""
    messages: Sequence[ChatMessage]
    """The chat the policy has seen, this turn as its last message."""

    @property
    def answer(self) -> str:
        """The completion without its thinking."""
        return visible_text(self.text)


@dataclass(frozen=True)
class Reply:
    """What the environment answers to a turn.

    Example:
        Reply("too low", reward=-0.1)
        Reply(reward=1.0, is_done=True)
    """

    messages: str | Sequence[ChatMessage] = ()
    """What the policy reads next; a text is one user message."""
    reward: float = 0.0
    """Reward of the turn that is answered."""
    is_done: bool = False
    """Whether the conversation is over."""
    history: Sequence[ChatMessage] | None = None
    """Chat that takes the place of everything so far, before `messages`: a summary, a new level.
    The tokens of the turns until now are kept as a sequence of their own."""

    def chat_messages(self) -> list[ChatMessage]:
        """Return `messages` as a list."""
        if isinstance(self.messages, str):
            return [{"role": "user", "content": self.messages}] if self.messages else []
        return list(self.messages)


class Conversation(ABC):
    """One rollout of an item, seen from the other side: a game, a user, a set of tools.

    An instance serves one rollout and may keep its state in attributes. What `opening` or `reply`
    raises fails the rollout.

    Attributes:
        unfinished_reward: added to the last turn when a limit ended the conversation.
    """

    unfinished_reward: float = 0.0

    @abstractmethod
    def opening(self) -> Sequence[ChatMessage]:
        """Return the messages the policy reads first."""

    @abstractmethod
    async def reply(self, turn: Turn) -> Reply:
        """Answer a turn; called after every one that was not cut short by a limit."""

    async def close(self) -> None:
        """Release what the conversation holds; called once, however it ended."""
        return
