"""What the author of a game or a dialogue writes, and what is handed to it.

    opening ─► the policy writes ─► Turn ─► reply ─► Reply(messages, reward) ─► the policy writes …
                                             └────► Reply(reward, is_done=True) ─► end

The other side of the conversation knows nothing of tokens, servers or groups.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atroposlib.envs.reporting import Reward

__all__ = [
    "ChatMessage",
    "Conversation",
    "Outcome",
    "Reply",
    "Turn",
    "checked_chat",
    "is_chat",
    "visible_text",
]

A_CHAT = 'a list of messages such as [{"role": "user", "content": "..."}]'
"""What errors call a chat."""

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


def checked_chat(chat: Any, method: str, *, signature: str) -> Sequence[ChatMessage]:
    """Return what an author's method gave as a chat.

    Args:
        chat: what it gave.
        method: its class and name, as `Chain.opening`.
        signature: how it is written, as `def opening(self)`.

    Raises:
        TypeError: it is not a list of messages; the text says how to write the method.
    """
    if inspect.isawaitable(chat):
        if inspect.iscoroutine(chat):
            chat.close()  # otherwise Python warns that it was never awaited
        raise TypeError(f"{method} is async: write `{signature}` without async")
    if not is_chat(chat):
        raise TypeError(f"{method} returned {chat!r:.100}; expected {A_CHAT}")
    return list(chat)


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages, at least one, each with a role."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


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
        Reply("two letters fit", reward={"letters": 0.4, "format": 0.1})
    """

    messages: str | Sequence[ChatMessage] = ()
    """What the policy reads next; a text is one user message."""
    reward: Reward = 0.0
    """Reward of the turn that is answered: a number, or named parts that are weighed by the setting
    `reward_weights` and summed."""
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
        unfinished_reward: added to the last turn when a limit ended the conversation; a number,
            or named parts as in a `Reply`.
    """

    unfinished_reward: Reward = 0.0

    @abstractmethod
    def opening(self) -> Sequence[ChatMessage]:
        """Return the messages the policy reads first."""

    @abstractmethod
    async def reply(self, turn: Turn) -> Reply:
        """Answer a turn; called after every one that was not cut short by a limit."""

    async def close(self) -> None:
        """Release what the conversation holds; called once, however it ended."""
        return
