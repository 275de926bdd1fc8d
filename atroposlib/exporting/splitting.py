"""Where the prompt of a trajectory ends, told by masks and tokens, never by text; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.exporting.groups import ExportGroup
from atroposlib.scored_data import IGNORE_INDEX

__all__ = [
    "Span",
    "common_prefix_length",
    "has_prompt_masks",
    "pair_prompt_length",
    "prompt_lengths",
    "trained_spans",
]


class Span(NamedTuple):
    """A stretch of tokens that are all trained on, or all not."""

    start: int
    end: int
    is_trained: bool


def prompt_lengths(group: ExportGroup) -> list[int | None]:
    """Return how many tokens the prompt of each trajectory has.

    The first trained token ends the prompt. When no mask of the group tells prompt from completion
    (there are none, or all or nothing is trained on), the tokens that all trajectories begin with
    are the prompt, short of the last token of the shortest one; a lone trajectory has none then.

    Returns:
        [G] tokens of the prompt; None for a trajectory of which nothing is trained on while others
        of its group are.
    """
    firsts = _prompt_ends(group)
    if firsts is None:
        shared = common_prefix_length(group.tokens) if len(group.tokens) > 1 else 0
        shortest = min(map(len, group.tokens))
        return [min(shared, max(0, shortest - 1))] * len(group.tokens)
    return firsts


def has_prompt_masks(group: ExportGroup) -> bool:
    """Whether some mask of the group has both trained and other tokens."""
    return any(0 < mask.count(IGNORE_INDEX) < len(mask) for mask in group.masks or ())


def _prompt_ends(group: ExportGroup) -> list[int | None] | None:
    """Return the first trained position of each trajectory; None when no mask tells any."""
    if not group.masks or not has_prompt_masks(group):
        return None
    return [_first_trained(mask) for mask in group.masks]


def common_prefix_length(rows: Sequence[Any]) -> int:
    """Return how many entries all rows begin with; rows are lists of tokens, or texts."""
    if not rows:
        return 0
    first, last = min(rows), max(rows)
    for i, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return i
    return min(len(first), len(last))


def pair_prompt_length(
    chosen: Sequence[int], rejected: Sequence[int], *, chosen_prompt: int, rejected_prompt: int
) -> int:
    """Return the tokens that the prompt of a preference pair has.

    Both sides must have been asked the same: the prompt is what both prompts begin with.
    """
    longest = min(chosen_prompt, rejected_prompt)
    return common_prefix_length([chosen[:longest], rejected[:longest]])


def trained_spans(mask: Sequence[int]) -> list[Span]:
    """Cut a trajectory where training begins or ends.

    Args:
        mask: [L].

    Returns:
        Spans that cover the trajectory, in order, trained and not by turns.
    """
    spans: list[Span] = []
    start = 0
    for i in range(1, len(mask) + 1):
        if i == len(mask) or (mask[i] == IGNORE_INDEX) != (mask[start] == IGNORE_INDEX):
            spans.append(Span(start, i, mask[start] != IGNORE_INDEX))
            start = i
    return spans


def _first_trained(mask: list[int]) -> int | None:
    num_masked = mask.count(IGNORE_INDEX)
    if mask[:num_masked].count(IGNORE_INDEX) == num_masked:  # one prompt, one completion
        return num_masked if num_masked < len(mask) else None
    for i, value in enumerate(mask):
        if value != IGNORE_INDEX:
            return i
    return None
