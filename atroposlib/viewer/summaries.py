"""What the list of groups knows of each: figures, a line of its text, and text to search; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from atroposlib.utils.text import inert_line
from atroposlib.viewer.rollouts import Group, group_of, text_of_content

__all__ = ["GroupSummary", "searchable_text", "summarise"]

MAX_EXCERPT_CHARACTERS = 160
_STEP_KEYS = ("step", "policy_version")
_ENV_KEYS = ("env_name", "environment", "env_id")


class GroupSummary(NamedTuple):
    """One row of the list."""

    label: str
    """What its source calls it: `line 12`, `group 7`."""
    environment: str
    step: int | None
    """Policy version or step it was made at; None where nobody told."""
    num_rollouts: int
    longest: int
    """Tokens of its longest rollout."""
    num_tokens: int
    scores: tuple[float, ...]
    """[G] those that are numbers."""
    excerpt: str
    """Start of the question, as one harmless line; empty when only tokens are there."""


def summarise(
    fields: Mapping[str, Any],
    *,
    label: str,
    environment: str | None = None,
    step: int | None = None,
) -> GroupSummary:
    """Describe a group.

    Args:
        fields: the decoded group.
        label: what the source calls it.
        environment: its name where the source knows it; else what the group says.
        step: likewise.
    """
    group = group_of(fields)
    lengths = [len(rollout) for rollout in group.rollouts]
    return GroupSummary(
        label=label,
        environment=environment or _environment(fields),
        step=step if step is not None else _step(fields),
        num_rollouts=len(group.rollouts),
        longest=max(lengths, default=0),
        num_tokens=sum(lengths),
        scores=tuple(group.scores),
        excerpt=_excerpt(group),
    )


def searchable_text(fields: Mapping[str, Any]) -> str:
    """Return all text of a group's messages, what all rollouts begin with once; may be empty."""
    group = group_of(fields)
    num_shared = group.num_shared_messages
    texts: list[str] = []
    for i, rollout in enumerate(group.rollouts):
        for message in rollout.chat[num_shared if i else 0 :]:
            texts.append(text_of_content(message.get("content")))
            texts += [str(message[key]) for key in ("reasoning_content", "tool_calls")
                      if message.get(key)]  # fmt: skip
    return "\n".join(texts)


def _excerpt(group: Group) -> str:
    if not group.rollouts:
        return ""
    chat = group.rollouts[0].chat
    asked = [message for message in chat if message.get("role") == "user"] or chat
    text = text_of_content(asked[0].get("content")) if asked else ""
    return inert_line(text, max_characters=MAX_EXCERPT_CHARACTERS)


def _environment(fields: Mapping[str, Any]) -> str:
    for key in _ENV_KEYS:
        value = fields.get(key)
        if isinstance(value, str) and value:
            return inert_line(value, max_characters=60)
        if isinstance(value, int) and not isinstance(value, bool):
            return f"env {value}"
    return ""


def _step(fields: Mapping[str, Any]) -> int | None:
    for key in _STEP_KEYS:
        value = fields.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
