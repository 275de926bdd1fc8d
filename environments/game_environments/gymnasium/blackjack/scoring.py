"""What one reply at the blackjack table is worth, and what is kept of it. Pure.

    reply ─► thinking, one call of take_action ─► Q*(hand, action) - V*(hand) + form ─► score

`Q* - V*` is the advantage r + V*(s') - V*(s), averaged over the cards that are still hidden: 0 for
the best action, negative for the other.

    13 against a 6, thought about, "stick", hardly any tokens   0 + 0.2 + 0.2 + 0.01 = 0.41
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from atroposlib.envs.conversation import visible_text
from atroposlib.envs.tools import Tool
from atroposlib.utils.tool_call_parser import parse_tool_call
from environments.game_environments.gymnasium.blackjack.values import (
    ACTIONS,
    Action,
    Hand,
    Rules,
    action_value,
    value,
)

__all__ = [
    "DEFAULT_ACTION",
    "PREFILL",
    "TAKE_ACTION",
    "ScoredReply",
    "form_bonus",
    "read_action",
    "score_reply",
    "shorten_thinking",
]

PREFILL = "<think>\n"
"""What a reply begins with when thinking is asked for; not written by the policy."""
DEFAULT_ACTION: Action = "stick"
"""What an invalid reply plays."""
BONUS = 0.2

THINK_START, THINK_END = "<think>", "</think>"
_PARAGRAPHS = re.compile(r"\n\s*\n")


def take_action(action: Literal["hit", "stick"]) -> None:
    """Play a blackjack hand.

    Args:
        action: hit takes a card, stick ends your turn.
    """


TAKE_ACTION = Tool.of(take_action)


class ScoredReply(NamedTuple):
    """What became of a reply."""

    action: Action | None
    """None when the reply is invalid."""
    score: float

    @property
    def played(self) -> Action:
        """The action that is played."""
        return self.action or DEFAULT_ACTION


def read_action(reply: str) -> Action | None:
    """Return the action of the one call behind the thinking; None without a valid one."""
    answer = visible_text(reply)
    if answer.count("<tool_call>") != 1:
        return None
    _, arguments, is_error = parse_tool_call(answer, [TAKE_ACTION.definition()], ["tool_call"])
    wanted: Any = arguments.get("action") if isinstance(arguments, dict) else None
    if is_error or wanted not in ACTIONS:
        return None
    return "hit" if wanted == "hit" else "stick"


def form_bonus(reply: str, *, is_valid: bool, thinking_active: bool) -> float:
    """Return what the form is worth: a valid call, and thinking where it is asked for.

    Args:
        reply: with the prefill.
        is_valid: whether it has a valid action.
        thinking_active: whether thinking is asked for.
    """
    bonus = BONUS if is_valid else -BONUS
    if not thinking_active:
        return bonus
    _, thinking, _ = _around_thinking(reply)
    if not thinking:
        return bonus - BONUS
    return bonus + (BONUS if thinking.strip() else 0.0)


def score_reply(
    hand: Hand,
    reply: str,
    *,
    rules: Rules,
    thinking_active: bool,
    is_cut: bool,
    length_share: float,
    tiebreak_factor: float,
) -> ScoredReply:
    """Rate one reply to a hand.

    Args:
        hand: what the player sees.
        reply: with the prefill.
        rules: of the game.
        thinking_active: whether thinking is asked for.
        is_cut: whether the token limit ended it; half a move is no move.
        length_share: tokens of the reply, as a share of `max_token_length`.
        tiebreak_factor: what the shortest reply earns more than the longest.
    """
    action = None if is_cut else read_action(reply)
    played = action or DEFAULT_ACTION
    advantage = action_value(hand, played, rules) - value(hand, rules)
    bonus = form_bonus(reply, is_valid=action is not None, thinking_active=thinking_active)
    shortness = tiebreak_factor * (1 - min(1.0, length_share))
    return ScoredReply(action, advantage + bonus + shortness)


def shorten_thinking(reply: str, *, max_chars: int) -> str:
    """Keep the last paragraph of the thinking, and of that the last characters.

    Args:
        reply: a finished reply; one without a closed thinking block is unchanged.
        max_chars: the most characters that stay.
    """
    before, inside, behind = _around_thinking(reply)
    if inside is None:
        return reply
    thinking = inside.strip()
    kept = _PARAGRAPHS.split(thinking)[-1]
    kept = kept[max(0, len(kept) - max_chars) :].strip()
    inner = kept if kept == thinking else f"... {kept}"
    return f"{before}{THINK_START}\n{inner}\n{THINK_END}{behind}"


def _around_thinking(reply: str) -> tuple[str, str | None, str]:
    """Return what stands before, in and behind the first thought; None in it without one.

    Without a pattern: this runs in the event loop, and one would look for the end of the thought
    anew behind each of a thousand opening tags.
    """
    before, opened, rest = reply.partition(THINK_START)
    inside, closed, behind = rest.partition(THINK_END)
    return (before, inside, behind) if opened and closed else (reply, None, "")
