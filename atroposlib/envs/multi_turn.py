"""Playing conversations: turns until the end or a limit, with the exact tokens of every turn.

    Conversation ─► play ─► Rollout ─┐
    Conversation ─► play ─► Rollout ─┴─► group_of_rollouts ─► tokens, masks, scores, advantages

A conversation belongs to one rollout and is closed when that ends, however it ends.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.envs.conversation import (
    A_CHAT,
    ChatMessage,
    Conversation,
    Outcome,
    Reply,
    Turn,
    checked_chat,
    is_chat,
)
from atroposlib.envs.env_hooks import settle
from atroposlib.envs.reward_parts import complete_parts, weigh
from atroposlib.envs.turn_policies import Policy, TokenSequence
from atroposlib.envs.turn_rewards import (
    Normalization,
    discounted_return,
    token_advantages,
    turn_advantages,
)
from atroposlib.errors import ConfigError, ContextOverflowError
from atroposlib.scored_data import ScoredDataGroup

__all__ = ["Limits", "Rollout", "group_of_rollouts", "parts_of", "play"]


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
    reward_parts: list[dict[str, float]] = field(default_factory=list)
    """[T] named parts of each reward, before they were weighed; empty where it was a number."""
    messages: list[ChatMessage] = field(default_factory=list)
    """The chat at the end."""
    outcome: Outcome = "done"
    """How it ended."""
    conversation: Conversation | None = None
    """What was played, in its last state."""


async def play(
    conversation: Conversation,
    policy: Policy,
    *,
    limits: Limits,
    reward_weights: Mapping[str, float] | None = None,
) -> Rollout:
    """Play a conversation to its end or to a limit.

    A turn cut by a token limit ends it unanswered: half a move is no move. Whatever happens,
    `conversation.close` is awaited. Cancelling is safe.

    Args:
        conversation: used by this call alone.
        policy: writes the turns.
        limits: what ends it.
        reward_weights: of the named parts of rewards; a part without one counts as it is.

    Raises:
        TimeoutError: not one turn was written within `limits.timeout_s`.
        Exception: what the conversation or the inference server raised.
    """
    if inspect.iscoroutine(conversation):
        conversation.close()  # otherwise Python warns that it was never awaited
        raise TypeError(
            "start_conversation is async: write `def start_conversation(self, item)` without async"
        )
    if not isinstance(conversation, Conversation):
        raise TypeError(f"start_conversation returned {conversation!r}; expected a Conversation")
    rollout = Rollout(conversation=conversation)
    weights = reward_weights or {}
    playing = asyncio.ensure_future(_play_turns(conversation, policy, limits, weights, rollout))
    try:
        await asyncio.wait({playing}, timeout=limits.timeout_s)
        is_late = not playing.done()
    finally:
        if not playing.done():
            playing.cancel()
            await asyncio.wait({playing})
        await settle(conversation.close())
    rollout.outcome = "timed_out" if is_late else playing.result()
    if not rollout.rewards and is_late:
        raise TimeoutError(f"no turn was written within {limits.timeout_s} s")
    if rollout.outcome != "done" and rollout.rewards:
        _add_reward(rollout, conversation.unfinished_reward, weights, "unfinished_reward is")
    rollout.sequences = policy.sequences()
    return rollout


async def _play_turns(
    conversation: Conversation,
    policy: Policy,
    limits: Limits,
    weights: Mapping[str, float],
    rollout: Rollout,
) -> Outcome:
    name = type(conversation).__name__
    rollout.messages = list(
        checked_chat(conversation.opening(), f"{name}.opening", signature="def opening(self)")
    )
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
        rollout.reward_parts.append({})
        if written.is_cut:
            return "truncated"
        replying: Any = conversation.reply(Turn(written.text, index, tuple(rollout.messages)))
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
        _add_reward(rollout, reply.reward, weights, "reply gave the reward")
        if reply.is_done:
            return "done"
        rollout.messages = _next_chat(rollout.messages, reply, conversation)
    return "out_of_turns"


def _add_reward(rollout: Rollout, reward: Any, weights: Mapping[str, float], said: str) -> None:
    """Add to the reward of the last turn; `said` is how an error goes on after the class name."""
    weighed = weigh(reward, weights, f"{type(rollout.conversation).__name__}.{said}")
    rollout.rewards[-1] += weighed.total
    parts = rollout.reward_parts[-1]
    for name, value in weighed.parts.items():
        parts[name] = parts.get(name, 0.0) + value


def _next_chat(
    chat: list[ChatMessage], reply: Reply, conversation: Conversation
) -> list[ChatMessage]:
    if not isinstance(reply.messages, str) and reply.messages and not is_chat(reply.messages):
        raise TypeError(
            f"{type(conversation).__name__}.reply gave the messages {reply.messages!r:.100}; "
            f"expected a text or {A_CHAT}"
        )
    added = reply.chat_messages()
    if not added and reply.history is None:
        raise ConfigError(
            f"{type(conversation).__name__}.reply gave neither messages nor is_done=True; "
            "the policy needs something to read, or the end"
        )
    return [*(chat if reply.history is None else reply.history), *added]


def parts_of(rollout: Rollout, *, discount: float) -> dict[str, float]:
    """Return the discounted sum of each named part of a rollout's rewards, before weighing."""
    names = dict.fromkeys(name for parts in rollout.reward_parts for name in parts)
    return {
        name: discounted_return(
            [parts.get(name, 0.0) for parts in rollout.reward_parts], discount=discount
        )
        for name in names
    }


def group_of_rollouts(
    rollouts: Sequence[Rollout],
    *,
    discount: float = 1.0,
    normalization: Normalization = "returns",
    generation_params: Mapping[str, Any] | None = None,
    include_messages: bool = False,
) -> ScoredDataGroup:
    """Put the rollouts of one item together, each turn's tokens with its advantage.

    A rollout's score is its discounted return; the named parts of its rewards are summed likewise.
    Rollouts of several sequences give a row for each; `group_overrides` then names their number.

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
    reasons = [sequence.finish_reason for _, sequence, _ in rows]
    if any(reason is not None for reason in reasons):
        group["finish_reasons"] = reasons
    parts = complete_parts([parts_of(rollout, discount=discount) for rollout, _, _ in rows])
    if parts is not None:
        group["reward_parts"] = parts
    if include_messages:
        group["messages"] = [sequence.messages for _, sequence, _ in rows]
    if len(rows) != len(rollouts):
        group["group_overrides"] = {"group_size": len(rows)}
    return group
