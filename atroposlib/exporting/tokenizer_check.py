"""Whether a tokenizer is the one groups were made with.

Nothing in a group names its tokenizer. What speaks against one: ids that it does not have; chats
that do not occur in the decoded tokens; prompts whose text it writes with other tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.splitting import prompt_lengths

__all__ = ["TokenizerVerdict", "check_tokenizer"]

_MIN_SHARED = 0.9
_MIN_SAMPLES = 3
_MIN_TOKENS = 4
_QUOTED = 200


class TokenizerVerdict(NamedTuple):
    """What speaks against a tokenizer."""

    is_wrong: bool
    """Whether it cannot be the right one."""
    reason: str | None
    """None when nothing speaks against it."""


def check_tokenizer(tokenizer: Any, groups: Sequence[ExportGroup]) -> TokenizerVerdict:
    """Judge a tokenizer by the first groups of an export.

    Args:
        tokenizer: with `decode`, `encode` and `len`.
        groups: a few.
    """
    highest = max((max(ids, default=0) for group in groups for ids in group.tokens), default=0)
    if highest >= len(tokenizer):
        return TokenizerVerdict(
            True, f"the groups hold token {highest}, the tokenizer has {len(tokenizer)} tokens"
        )
    found = [
        _says(tokenizer.decode(list(ids)), chat)
        for group in groups
        for ids, chat in zip(group.tokens, group.messages or (), strict=False)
    ]
    told = [is_found for is_found in found if is_found is not None]
    if len(told) >= _MIN_SAMPLES:
        if not any(told):
            return TokenizerVerdict(
                True, f"in none of {len(told)} trajectories the tokens decode to their messages"
            )
        return TokenizerVerdict(False, None)
    return _judge_prompts(tokenizer, groups)


def _judge_prompts(tokenizer: Any, groups: Sequence[ExportGroup]) -> TokenizerVerdict:
    prompts = [
        group.tokens[0][: lengths[0]]
        for group in groups
        if (lengths := prompt_lengths(group))[0] is not None
    ]
    shares = [_shared(tokenizer, ids) for ids in prompts if len(ids) >= _MIN_TOKENS]
    if len(shares) >= _MIN_SAMPLES and sum(shares) / len(shares) < _MIN_SHARED:
        return TokenizerVerdict(
            False,
            f"it writes the text of prompts with other tokens ({sum(shares) / len(shares):.0%} "
            "are the same)",
        )
    return TokenizerVerdict(False, None)


def _shared(tokenizer: Any, ids: Sequence[int]) -> float:
    again = tokenizer.encode(tokenizer.decode(list(ids)), add_special_tokens=False)
    common = Counter(ids) & Counter(again)
    return sum(common.values()) / max(len(ids), len(again))


def _says(text: str, chat: Any) -> bool | None:
    """Whether a text holds the last message of a chat; None when there is nothing to look for."""
    try:
        content = chat[-1]["content"]
    except (TypeError, KeyError, IndexError):
        return None
    if not isinstance(content, str) or not content.strip():
        return None
    return content.strip()[:_QUOTED] in text
