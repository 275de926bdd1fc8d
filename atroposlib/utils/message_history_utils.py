"""Shortening long conversations to a token limit: shorter thinking, fewer old messages."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.utils.tokenize_for_trainer import UNMASKED_ROLES, tokenize_for_trainer_multistep

__all__ = ["ensure_trajectory_token_limit", "strip_thinking", "truncate_thinking"]

logger = logging.getLogger(__name__)

_OPEN, _CLOSE = "<think>", "</think>"
_REQUIRED_LISTS = ("messages", "tokens", "masks")
_REQUIRED_VALUES = ("seed", "parsed_actions")
_REWRITTEN = ("messages", "tokens", "masks")

Step = dict[str, Any]


def strip_thinking(text: str) -> str:
    """Remove the first thinking block; a text without a well-ordered pair of tags is unchanged."""
    start, end = text.find(_OPEN), text.find(_CLOSE)
    if start < 0 or end < start:
        return text
    return text[:start] + text[end + len(_CLOSE) :]


def truncate_thinking(text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """Shorten the first thinking block to at most `max_think_tokens` tokens, tags not counted.

    The last paragraph is kept if it fits, otherwise the last tokens, after the marker `... `. A
    text without a well-ordered pair of tags, or one that cannot be tokenized, is unchanged.
    """
    start, end = text.find(_OPEN), text.find(_CLOSE)
    if start < 0 or end < start:
        return text
    thinking = text[start + len(_OPEN) : end].strip()
    try:
        kept = _shorten(thinking, tokenizer, max_think_tokens)
    except Exception as error:  # noqa: BLE001 - any tokenizer; the text itself is always usable
        logger.warning("a thinking block could not be shortened: %s", error)
        return text
    inner = f"\n{kept}\n" if kept else ""
    return text[: start + len(_OPEN)] + inner + text[end:]


def _shorten(thinking: str, tokenizer: Any, max_tokens: int) -> str:
    ids = tokenizer.encode(thinking, add_special_tokens=False) if thinking else []
    if len(ids) <= max_tokens:
        return thinking
    if max_tokens <= 0:
        return ""
    paragraph = re.split(r"\n\s*\n", thinking)[-1].strip()
    is_shorter = 0 < len(paragraph) < len(thinking)
    if is_shorter and len(tokenizer.encode(paragraph, add_special_tokens=False)) <= max_tokens:
        return f"... {paragraph}"
    return f"... {tokenizer.decode(ids[-max_tokens:]).strip()}"


def ensure_trajectory_token_limit(
    trajectory: Sequence[Step], tokenizer: Any, max_trajectory_tokens: int
) -> list[Step]:
    """Drop old messages from the steps of a trajectory until every step fits.

    A step has alternatives of one turn: `messages` [A][messages], `tokens` and `masks` [A][L],
    and `seed`, `parsed_actions`. The oldest messages are dropped, the same number from every
    alternative; the first message, the last assistant message and an `environment` message right
    before it are kept. A shortened step trains the last assistant message. Lists with an entry per
    token, such as `advantages`, are cut accordingly, or left out if they cannot be aligned.

    Args:
        trajectory: [T] steps; not changed.
        tokenizer: tokenizer with a chat template.
        max_trajectory_tokens: maximum tokens of an alternative.

    Returns:
        The steps that fit, in order. Other steps are left out with a warning.
    """
    fitting = []
    for number, step in enumerate(trajectory):
        missing = [name for name in _REQUIRED_LISTS if not step.get(name)]
        missing += [name for name in _REQUIRED_VALUES if step.get(name) is None]
        if missing:
            logger.warning("step %d is left out: it has no %s", number, ", ".join(missing))
            continue
        if max(map(len, step["tokens"])) <= max_trajectory_tokens:
            fitting.append(step)
            continue
        try:
            shortened = _shorten_step(step, tokenizer, max_trajectory_tokens)
        except Exception as error:  # noqa: BLE001 - any chat template; the other steps are usable
            logger.warning("step %d is left out: it cannot be rendered: %s", number, error)
            continue
        if shortened is None:
            logger.warning("step %d is left out: too long without a message to drop", number)
        else:
            fitting.append(shortened)
    return fitting


def _shorten_step(step: Step, tokenizer: Any, max_tokens: int) -> Step | None:
    chats = [list(chat) for chat in step["messages"]]
    rows = [{"tokens": t, "masks": m} for t, m in zip(step["tokens"], step["masks"], strict=True)]
    while max(len(row["tokens"]) for row in rows) > max_tokens:
        units = [_removable_unit(chat) for chat in chats]
        count = min((unit for unit in units if unit), default=0)
        if count == 0:
            return None
        for i, unit in enumerate(units):
            if unit:
                del chats[i][1 : 1 + count]
                rows[i] = tokenize_for_trainer_multistep(tokenizer, chats[i])
    shortened = {"messages": chats}
    for name in ("tokens", "masks"):
        shortened[name] = [row[name] for row in rows]
    return _carry_over(step, shortened)


def _removable_unit(chat: Sequence[Mapping[str, Any]]) -> int:
    """Number of messages after the first to remove next: a pair where possible, else one."""
    last = max(
        (i for i, message in enumerate(chat) if message.get("role") in UNMASKED_ROLES),
        default=len(chat) - 1,
    )
    kept_from = last - 1 if last > 0 and chat[last - 1].get("role") == "environment" else last
    removable = max(0, kept_from - 1)
    is_pair = (
        removable >= 2
        and chat[1].get("role") == "environment"
        and chat[2].get("role") in UNMASKED_ROLES
    )
    return 2 if is_pair else min(1, removable)


def _carry_over(step: Step, shortened: Step) -> Step:
    """Add the other fields of a step; those with an entry per token are cut like the tokens."""
    for name, value in step.items():
        if name in _REWRITTEN:
            continue
        if _runs_along(value, step["tokens"]):
            value = _cut(value, step["tokens"], shortened["tokens"])
            if value is None:
                logger.warning("%s of a shortened step is left out: it cannot be aligned", name)
                continue
        shortened[name] = value
    return shortened


def _runs_along(value: Any, tokens: Sequence[Sequence[int]]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(tokens)
        and all(
            isinstance(row, list) and len(row) == len(ids)
            for row, ids in zip(value, tokens, strict=True)
        )
    )


def _cut(
    rows: Sequence[list[Any]], before: Sequence[list[int]], after: Sequence[list[int]]
) -> list[list[Any]] | None:
    """Return the entries of the kept tokens: a head and a tail of each row."""
    cut = []
    for row, old, new in zip(rows, before, after, strict=True):
        tail = 0
        while tail < min(len(old), len(new)) and old[-1 - tail] == new[-1 - tail]:
            tail += 1
        head = len(new) - tail
        if old[:head] != new[:head]:
            return None
        cut.append(row[:head] + row[len(row) - tail :])
    return cut
