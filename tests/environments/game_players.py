"""Playing a conversation without a server: a player sees the chat and writes turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atroposlib.envs.conversation import ChatMessage, Conversation, Turn

__all__ = ["Player", "play_game"]

Player = Callable[[Sequence[ChatMessage]], str]


async def play_game(
    conversation: Conversation, player: Player, *, max_turns: int = 40
) -> list[float]:
    """The rewards of a game's turns, with the reward of a game that a limit ended."""
    chat = list(conversation.opening())
    rewards: list[float] = []
    for index in range(max_turns):
        chat.append({"role": "assistant", "content": player(chat)})
        reply = await conversation.reply(Turn(str(chat[-1]["content"]), index, tuple(chat)))
        rewards.append(reply.reward)
        if reply.is_done:
            return rewards
        chat += reply.chat_messages()
    rewards[-1] += conversation.unfinished_reward
    return rewards
