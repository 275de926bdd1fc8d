"""What two rollouts of a group have in common and where they part; pure."""

from __future__ import annotations

import difflib
import re

from atroposlib.viewer.pages.markup import block, empty, folded, score_chip, shown
from atroposlib.viewer.rollouts import Rollout

__all__ = ["compare_page", "difference"]

_WORD = re.compile(r"\s+|\w+|[^\w\s]")
_MAX_PIECES = 2500
"""Comparing takes a time that grows with the square of the number of pieces."""
_SHORTEST_FOLDED = 200


def compare_page(left: Rollout, right: Rollout, left_text: str, right_text: str) -> str:
    """Return the page: both answers beside each other, what only one has in colour."""
    if left.number == right.number:
        return empty("Choose two different rollouts to compare.")
    if left_text == right_text:
        same = '<p class="v-legend">both say exactly the same</p>'
        return _heads(left, right) + same + block(left_text)
    start, pairs, end = difference(left_text, right_text)
    columns = ["", ""]
    for is_same, texts in pairs:
        for side, text in enumerate(texts):
            tag = "span" if is_same else ("del", "ins")[side]
            columns[side] += f"<{tag}>{shown(text)}</{tag}>" if text else ""
    body = "".join(f'<div class="v-text v-diff">{column}</div>' for column in columns)
    return (
        f"{_heads(left, right)}{_shared(start, 'the same beginning')}"
        f'<div class="v-two">{body}</div>{_shared(end, "the same end")}'
    )


def difference(left: str, right: str) -> tuple[str, list[tuple[bool, tuple[str, str]]], str]:
    """Part two texts into a common start, pieces that are the same or not, and a common end.

    Words are compared; lines where there are too many words, and all of it as one piece where
    there are too many lines.
    """
    before, after = _WORD.findall(left), _WORD.findall(right)
    num_start = _num_common(before, after)
    num_end = _num_common(before[num_start:][::-1], after[num_start:][::-1])
    start = "".join(before[:num_start])
    end = "".join(before[len(before) - num_end :])
    before = before[num_start : len(before) - num_end]
    after = after[num_start : len(after) - num_end]
    if max(len(before), len(after)) > _MAX_PIECES:
        before = "".join(before).splitlines(keepends=True)
        after = "".join(after).splitlines(keepends=True)
    if max(len(before), len(after)) > _MAX_PIECES:
        return start, [(False, ("".join(before), "".join(after)))], end
    matcher = difflib.SequenceMatcher(None, before, after)
    pairs = [
        (tag == "equal", ("".join(before[a:b]), "".join(after[c:d])))
        for tag, a, b, c, d in matcher.get_opcodes()
    ]
    return start, pairs, end


def _num_common(left: list[str], right: list[str]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _heads(left: Rollout, right: Rollout) -> str:
    heads = "".join(
        f"<h4>rollout {r.number} {score_chip(r.score)} {len(r):,} tokens</h4>"
        for r in (left, right)
    )
    return f'<div class="v-two">{heads}</div>'


def _shared(text: str, title: str) -> str:
    if not text.strip():
        return ""
    if len(text) < _SHORTEST_FOLDED:
        return block(text)
    return folded(f"{title}, {len(text):,} characters", block(text))
