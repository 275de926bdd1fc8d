"""What is said at the blackjack table, and the prompt of a decision. Pure.

hands and replies so far ─► without the oldest, where they leave no room ─► text ─► <think>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.single_turn import RESERVED_TOKENS
from atroposlib.envs.tool_conversation import tool_instructions
from environments.game_environments.gymnasium.blackjack.scoring import PREFILL, TAKE_ACTION
from environments.game_environments.gymnasium.blackjack.values import Hand
from environments.shared.games import THINK_FIRST

__all__ = ["Chat", "Prompt", "describe", "fit_prompt", "opening"]

Chat = Sequence[Mapping[str, str]]
"""Messages of the roles `system`, `environment` and `agent`."""

RULES = """You play blackjack: get closer to 21 than the dealer without going over it.
An ace counts 11 where that is not too much, else 1. The dealer takes cards up to 17 or more."""
ONE_CALL = "Answer each hand with one call of take_action."
HAND = "Your hand counts {total}{ace}. The dealer shows {dealer_card}."
TEMPLATE_ROLES = {"system": "system", "environment": "user", "agent": "assistant"}
"""Chat templates know these; the others are those of the records."""
MIN_REPLY_SHARE = 4
"""A reply has at least one such part of the limit, as long as there are old turns to drop."""


class Prompt(NamedTuple):
    """What the policy reads before a decision."""

    chat: list[Mapping[str, str]]
    """The turns that are in it."""
    text: str
    num_tokens: int
    budget: int
    """Tokens the reply may have."""


def describe(hand: Hand) -> str:
    """Return what the player sees, in words."""
    return HAND.format(
        total=hand.total,
        ace=", with an ace that counts 11" if hand.usable_ace else "",
        dealer_card="an ace" if hand.dealer_card == 1 else f"a {hand.dealer_card}",
    )


def opening(hand: Hand, *, thinking_active: bool) -> list[Mapping[str, str]]:
    """Return the rules and the first hand."""
    rules = [RULES, *([THINK_FIRST] if thinking_active else []), ONE_CALL]
    system = "\n".join(rules) + f"\n\n{tool_instructions([TAKE_ACTION])}"
    return [
        {"role": "system", "content": system},
        {"role": "environment", "content": describe(hand)},
    ]


def fit_prompt(chat: Chat, tokenizer: Any, *, limit: int, thinking_active: bool) -> Prompt | None:
    """Render a chat; its oldest turns are left out where they leave a reply too little room.

    Args:
        chat: system message, then hands and replies, a hand last.
        tokenizer: of the policy.
        limit: most tokens of prompt and reply.
        thinking_active: begin the reply with thinking.

    Returns:
        None when not even the last hand leaves room for a reply.
    """
    kept = list(chat)
    while True:
        messages = [{**m, "role": TEMPLATE_ROLES[m["role"]]} for m in kept]
        text = render_messages(tokenizer, messages)
        # Some templates open the thinking themselves.
        if thinking_active and not text.rstrip().endswith("<think>"):
            text += PREFILL
        num_tokens = len(tokenizer.encode(text, add_special_tokens=True))
        budget = limit - num_tokens - RESERVED_TOKENS
        if len(kept) <= 2 or budget * MIN_REPLY_SHARE >= limit:
            return Prompt(kept, text, num_tokens, budget) if budget > 0 else None
        del kept[1:3]  # the oldest hand and the reply to it
