"""What the scripted model answers, and how it tells rollouts apart. Pure.

gold answer of the item ──► Script: a reply per role and turn
prompt ──► continues a known text? its role, next turn : the next role in the order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["GARBAGE", "Reply", "Role", "RoleBook", "Script", "make_script"]

Role = Literal["gold", "empty", "garbage", "truncated", "unclosed"]

GARBAGE = "zqxv }{ wkjj ]] plomf (("
"""Answers nothing, holds no digit, and breaks parsers that expect matching brackets."""

THINK_END = "</think>"


class Reply(NamedTuple):
    """One answer of the scripted model."""

    role: Role
    text: str
    is_cut: bool = False
    """Whether the token budget ended it: finish reason `length`, no end-of-turn token."""


class Script(NamedTuple):
    """The replies to the rollouts of one item."""

    order: Sequence[Role]
    """Roles of the first, second, ... rollout; repeated."""
    turns: Sequence[str]
    """The gold answer of each turn, the last one repeated; empty when there is none."""

    def reply(self, role: Role, turn: int) -> Reply:
        """Return the answer of a role at a turn, counted from 0."""
        gold = self.turns[min(turn, len(self.turns) - 1)] if self.turns else GARBAGE
        if role == "gold":
            return Reply(role, gold)
        if role == "empty":
            return Reply(role, "")
        if role == "garbage":
            return Reply(role, GARBAGE)
        if role == "unclosed":
            return Reply(role, gold.replace(THINK_END, ""), is_cut=True)
        return Reply(role, gold[: len(gold) // 2], is_cut=True)


def make_script(gold: str | Sequence[str] | None, *, roles: Sequence[Role] = ()) -> Script:
    """Return the script of one item.

    Args:
        gold: the item's gold answer, or one per turn; None when the environment does not tell.
        roles: who answers, in this order; empty for all that make sense.
    """
    turns = [gold] if isinstance(gold, str) else list(gold or [])
    if roles:
        return Script(roles, turns)
    if not turns:
        return Script(("garbage", "empty", "truncated"), turns)
    order: list[Role] = ["gold", "empty", "garbage"]
    if any(len(turn) > 1 for turn in turns):
        order.append("truncated")
    if any(THINK_END in turn for turn in turns):
        order.append("unclosed")
    return Script(order, turns)


class RoleBook:
    """Remembers who wrote what, so that a rollout of several turns keeps its role."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._known: dict[str, tuple[Role, int]] = {}
        self._num_started = 0

    def replies(self, prompt: str, num_replies: int) -> list[Reply]:
        """Return the answers to a prompt and remember them.

        Args:
            prompt: the whole text the model reads.
            num_replies: `n` of the request.
        """
        continued = [text for text in self._known if prompt != text and prompt.startswith(text)]
        if continued:
            role, turn = self._known[max(continued, key=len)]
            replies = [self.script.reply(role, turn)] * num_replies
        else:
            turn = 0
            replies = [self.script.reply(self._next_role(), turn) for _ in range(num_replies)]
        for reply in replies:
            self._known[prompt + reply.text] = (reply.role, turn + 1)
        return replies

    def _next_role(self) -> Role:
        role = self.script.order[self._num_started % len(self.script.order)]
        self._num_started += 1
        return role
