"""The interface of games and dialogues: an author implements `Conversation`.

opening ─► the policy writes ─► Turn ─► reply ─► Reply(messages, reward) ─► the policy writes …
                                         └────► Reply(reward, is_done=True) ─► end
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from atroposlib.envs.reporting import Reward

if TYPE_CHECKING:
    from atroposlib.workspaces.interface import Workspace

__all__ = [
    "ChatMessage",
    "Conversation",
    "Outcome",
    "Reply",
    "Turn",
    "checked_chat",
    "checked_reply",
    "is_chat",
    "visible_text",
]

A_CHAT = 'a list of messages such as [{"role": "user", "content": "..."}]'

ChatMessage = Mapping[str, Any]
"""One entry of a chat: `role` and `content`."""

Outcome = Literal["done", "truncated", "out_of_turns", "timed_out"]
"""The end of a conversation: a reply with `is_done`, or one of the limits."""


def visible_text(text: str) -> str:
    """Return the text after the thinking; open thinking extends to the end of the text.

    A chat template may open the thinking itself, so a lone `</think>` closes it as well.
    """
    before, opened, _ = text.rpartition("</think>")[2].partition("<think>")
    return before.strip() if opened else before.lstrip()


def checked_chat(chat: Any, method: str, *, signature: str) -> Sequence[ChatMessage]:
    """Check that an author's method returned a chat.

    Args:
        chat: the returned value.
        method: class and name of the method, such as `Chain.opening`.
        signature: its signature, such as `def opening(self)`.

    Raises:
        TypeError: the value is not a list of messages, or one for the policy has no content.
    """
    if inspect.isawaitable(chat):
        if inspect.iscoroutine(chat):
            chat.close()  # otherwise Python warns that it was never awaited
        raise TypeError(f"{method} is async: write `{signature}` without async")
    if not is_chat(chat):
        raise TypeError(f"{method} returned {chat!r:.100}; expected {A_CHAT}")
    for message in chat:
        # A template renders it as empty or as "None"; assistant messages may have tool calls only.
        if message["role"] in ("system", "user") and message.get("content") is None:
            raise TypeError(f"{method} returned a message without content: {message!r:.100}")
    return list(chat)


def is_chat(value: Any) -> bool:
    """Whether a value is a non-empty list of messages with roles."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


@dataclass(frozen=True)
class Turn:
    """One completion of the policy in a conversation."""

    text: str
    """The whole completion, including thinking."""
    index: int
    """0 for the first turn."""
    messages: Sequence[ChatMessage]
    """The chat so far, with this turn as its last message."""
    key: str = ""
    """Idempotency key of what the turn causes: unique, and the same if the turn is answered again
    after its environment was killed (`turn_journal`)."""

    @property
    def answer(self) -> str:
        """The completion without its thinking."""
        return visible_text(self.text)


@dataclass(frozen=True)
class Reply:
    """The environment's answer to a turn.

    Example:
        Reply("too low", reward=-0.1)
        Reply(reward=1.0, is_done=True)
        Reply("two letters fit", reward={"letters": 0.4, "format": 0.1})
    """

    messages: str | Sequence[ChatMessage] = ()
    """Next messages for the policy; a string is one user message."""
    reward: Reward = 0.0
    """Reward of the turn: a number, or named parts to be summed with the setting
    `reward_weights`."""
    is_done: bool = False
    """Whether the conversation is over."""
    history: Sequence[ChatMessage] | None = None
    """Chat that replaces the one so far, before `messages`: a summary, a new level. The tokens of
    the turns so far become a separate sequence."""

    def chat_messages(self) -> list[ChatMessage]:
        if isinstance(self.messages, str):
            return [{"role": "user", "content": self.messages}] if self.messages else []
        return list(self.messages)


class Conversation(ABC):
    """The environment's side of one rollout: a game, a user, a set of tools.

    An instance is used for one rollout and may keep state in attributes. An exception of `opening`
    or `reply` fails the rollout.

    Attributes:
        unfinished_reward: added to the last turn if a limit ends the conversation; a number, or
            named parts as in a `Reply`.
        workspace: files that the tools of the conversation change, usually a `LazyWorkspace`; None
            for none. With a `turn_journal`, they are saved after each turn that changed them, and
            loaded after `restore`. `close` is to close it.
    """

    unfinished_reward: Reward = 0.0
    workspace: Workspace | None = None

    @abstractmethod
    def opening(self) -> Sequence[ChatMessage]:
        """Return the first messages for the policy."""

    @abstractmethod
    async def reply(self, turn: Turn) -> Reply:
        """Answer a turn; not called for one that a limit truncated."""

    def state(self) -> Any:
        """Return the state as JSON values, so that another process can continue the conversation.

        Called after `opening` and after each `reply`, if the environment has a `turn_journal`.
        None, the default, means that it cannot be saved: the conversation is then started again.
        """
        return None

    def restore(self, state: Any) -> None:
        """Take over a `state`; called on a new conversation about the same item, before `reply`.

        `opening` is then not called. Attributes that are not in the state, such as
        `unfinished_reward`, are to be set as well. After an exception, the conversation is started
        again.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides state, but not restore")

    async def close(self) -> None:
        """Release resources; called once, also after an error."""
        return


async def checked_reply(conversation: Conversation, turn: Turn) -> Reply:
    """Return the conversation's reply to a turn.

    Raises:
        TypeError: `reply` is not async, or returned another type.
    """
    name = type(conversation).__name__
    replying: Any = conversation.reply(turn)
    if not inspect.isawaitable(replying):
        raise TypeError(
            f"{name}.reply is not async: write `async def reply(self, turn)`; it returned "
            f"{replying!r:.100}"
        )
    reply = await replying
    if not isinstance(reply, Reply):
        raise TypeError(
            f"{name}.reply returned {reply!r}; expected a Reply such as "
            'Reply("too low", reward=-0.1) or Reply(reward=1.0, is_done=True)'
        )
    return reply
