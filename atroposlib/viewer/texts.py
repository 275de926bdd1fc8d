"""What a rollout says, from its messages or else from its tokens: prompt and answer; pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.viewer.rollouts import Group, Rollout, text_of_content
from atroposlib.viewer.token_reader import TokenReader

__all__ = ["RolloutText", "answer_of", "find_common_prefix", "prompt_of", "texts_of"]


class RolloutText(NamedTuple):
    """One rollout as text."""

    prompt: str
    answer: str


def find_common_prefix(strings: Sequence[str]) -> str:
    """Return the text all strings begin with; empty without strings."""
    if not strings:
        return ""
    first, last = min(strings), max(strings)  # what these two share, all in between share as well
    length = next((i for i, c in enumerate(first) if last[i : i + 1] != c), len(first))
    return first[:length]


def texts_of(group: Group, reader: TokenReader) -> list[RolloutText]:
    """Return prompt and answer of every rollout."""
    return [
        RolloutText(prompt_of(group, rollout, reader), answer_of(group, rollout, reader))
        for rollout in group.rollouts
    ]


def prompt_of(group: Group, rollout: Rollout, reader: TokenReader) -> str:
    """Return what the model read before its first token."""
    if rollout.chat:
        return _spell(rollout.chat[: group.num_shared_messages])
    return reader.text(rollout.tokens[: rollout.first_trained])


def answer_of(group: Group, rollout: Rollout, reader: TokenReader) -> str:
    """Return what came then, turns of tools and users included."""
    if rollout.chat:
        rest = rollout.chat[group.num_shared_messages :]
        is_single = len(rest) == 1 and not any(rest[0].get(key) for key in _FURTHER)
        return text_of_content(rest[0].get("content")) if is_single else _spell(rest)
    return reader.text(rollout.tokens[rollout.first_trained :])


_FURTHER = ("reasoning_content", "tool_calls")


def _spell(messages: Sequence[dict[str, Any]]) -> str:
    parts = []
    for message in messages:
        role = str(message.get("role") or "text")
        parts.append(f"[{role}] {text_of_content(message.get('content'))}")
        for key in _FURTHER:
            if message.get(key):
                value = message[key]
                spelled = value if isinstance(value, str) else json.dumps(value, default=str)
                parts.append(f"[{role}, {key}] {spelled}")
    return "\n\n".join(parts)
