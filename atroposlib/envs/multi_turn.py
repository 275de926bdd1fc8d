"""Playing conversations: turns until the end or a limit, with the exact tokens of every turn.

    Conversation ─► play ─► Rollout ─┐
    Conversation ─► play ─► Rollout ─┴─► group_of_rollouts ─► tokens, masks, scores, advantages

A conversation belongs to one rollout and is closed when that ends, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.envs.admission import as_number
from atroposlib.envs.conversation import ChatMessage, Conversation, Outcome, Reply, Turn
from atroposlib.envs.turn_policies import Policy, TokenSequence
from atroposlib.envs.turn_rewards import (
    Normalization,
    discounted_return,
    token_advantages,
    turn_advantages,
)
from atroposlib.errors import ConfigError, ContextOverflowError
from atroposlib.scored_data import ScoredDataGroup

__all__ = ["Limits", "Rollout", "group_of_rollouts", "play"]


@dataclass(frozen=True)
class Limits:
    """What ends a conversation that does not end by itself."""

    max_turns: int = 8
    """Turns of the policy."""
    max_tokens: int = 2048
    """Tokens of one whole sequence, prompt included; it stays a little shorter."""
    max_turn_tokens: int | None = None
    """Tokens of one turn; None leaves what is left of `max_tokens`."""
    timeout_s: float | None = None
    """Seconds for the whole conversation; None waits."""


@dataclass
class Rollout:
    """What became of one conversation."""

    sequences: list[TokenSequence] = field(default_factory=list)
    """One, or one for each history; none without exact tokens or without a turn."""
    rewards: list[float] = field(default_factory=list)
    """[T] one per turn."""
    messages: list[ChatMessage] = field(default_factory=list)
    """The chat at the end."""
    outcome: Outcome = "done"
    """How it ended."""
    conversation: Conversation | None = None
    """What was played, in its last state."""


async def play(conversation: Conversation, policy: Policy, *, limits: Limits) -> Rollout:
    """Play a conversation to its end or to a limit.

    A turn cut by a token limit ends it unanswered: half a move is no move. Whatever happens,
    `conversation.close` is awaited. Cancelling is safe.

    Args:
        conversation: used by this call alone.
        policy: writes the turns.
        limits: what ends it.

    Raises:
        TimeoutError: not one turn was written within `limits.timeout_s`.
        Exception: what the conversation or the inference server raised.
    """
    if not isinstance(conversation, Conversation):
        raise TypeError(f"start_conversation returned {conversation!r}; expected a Conversation")
    rollout = Rollout(conversation=conversation)
    playing = asyncio.ensure_future(_play_turns(conversation, policy, limits, rollout))
    try:
        await asyncio.wait({playing}, timeout=limits.timeout_s)
        is_late = not playing.done()
    finally:
        if not playing.done():
            playing.cancel()
            await asyncio.wait({playing})
        await conversation.close()
    rollout.outcome = "timed_out" if is_late else playing.result()
    if not rollout.rewards and is_late:
        raise TimeoutError(f"no turn was written within {limits.timeout_s} s")
    if rollout.outcome != "done" and rollout.rewards:
        rollout.rewards[-1] += conversation.unfinished_reward
    rollout.sequences = policy.sequences()
    return rollout


async def _play_turns(
    conversation: Conversation, policy: Policy, limits: Limits, rollout: Rollout
) -> Outcome:
    rollout.messages = list(conversation.opening())
    for index in range(limits.max_turns):
        budget = policy.budget(rollout.messages, max_tokens=limits.max_tokens)
        if budget < 1:
            return "truncated"
        try:
            written = await policy.write(
                rollout.messages, max_tokens=min(budget, limits.max_turn_tokens or budget)
            )
        except ContextOverflowError:
            if not rollout.rewards:
                raise
            return "truncated"
        rollout.messages = [*rollout.messages, {"role": "assistant", "content": written.text}]
        rollout.rewards.append(0.0)
        if written.is_cut:
            return "truncated"
        reply = await conversation.reply(Turn(written.text, index, tuple(rollout.messages)))
        if not isinstance(reply, Reply):
            raise TypeError(
                f"{type(conversation).__name__}.reply returned {reply!r}; expected a Reply such as "
                'Reply("too low", reward=-0.1) or Reply(reward=1.0, is_done=True)'
            )
        name = type(conversation).__name__
        rollout.rewards[-1] = as_number(reply.reward, f"{name}.reply gave the reward")
        if reply.is_done:
            return "done"
        rollout.messages = _next_chat(rollout.messages, reply, conversation)
    return "out_of_turns"


def _next_chat(
    chat: list[ChatMessage], reply: Reply, conversation: Conversation
) -> list[ChatMessage]:
    added = reply.chat_messages()
    if not added and reply.history is None:
        raise ConfigError(
            f"{type(conversation).__name__}.reply gave neither messages nor is_done=True; "
            "the policy needs something to read, or the end"
        )
    return [*(chat if reply.history is None else reply.history), *added]


def group_of_rollouts(
    rollouts: Sequence[Rollout],
    *,
    discount: float = 1.0,
    normalization: Normalization = "returns",
    generation_params: Mapping[str, Any] | None = None,
    include_messages: bool = False,
) -> ScoredDataGroup:
    """Put the rollouts of one item together, each turn's tokens with its advantage.

    A rollout's score is its discounted return. Rollouts of several sequences give a row for each;
    `group_overrides` then names the number of rows.

    Args:
        rollouts: [G], each with a sequence.
        discount: of later turns, in scores and advantages.
        normalization: see `turn_advantages`.
        generation_params: sampling settings, for the record.
        include_messages: add the chats.
    """
    by_turn = turn_advantages(
        [rollout.rewards for rollout in rollouts], discount=discount, normalization=normalization
    )
    rows = [
        (rollout, sequence, token_advantages(sequence.masks, sequence.spans, advantages))
        for rollout, advantages in zip(rollouts, by_turn, strict=True)
        for sequence in rollout.sequences
    ]
    group: ScoredDataGroup = {
        "tokens": [sequence.tokens for _, sequence, _ in rows],
        "masks": [sequence.masks for _, sequence, _ in rows],
        "scores": [discounted_return(rollout.rewards, discount=discount) for rollout, _, _ in rows],
        "inference_logprobs": [sequence.inference_logprobs for _, sequence, _ in rows],
        "advantages": [advantages for _, _, advantages in rows],
        "generation_params": dict(generation_params or {}),
    }
    if include_messages:
        group["messages"] = [sequence.messages for _, sequence, _ in rows]
    if len(rows) != len(rollouts):
        group["group_overrides"] = {"group_size": len(rows)}
    return group
