"""The trajectories of a group as recipes see them; those that cannot be used are counted; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.splitting import has_prompt_masks, prompt_lengths
from atroposlib.scored_data import IGNORE_INDEX, has_placeholder_tokens

__all__ = ["UNKNOWN_ENDS", "Trajectory", "TrajectoryReader", "TruncationRule"]

NOTHING_TRAINED = "nothing of it is trained on"
TRUNCATED = "cut before its end"
PLACEHOLDERS = "placeholder tokens of ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


class TruncationRule(NamedTuple):
    """How to tell whether a completion was cut, and what to do then."""

    end_ids: Collection[int] = ()
    """Special tokens, one of which ends every whole completion; none when that is not known."""
    drops: bool = False


UNKNOWN_ENDS = TruncationRule()
"""Nothing is taken for truncated."""


class Trajectory(NamedTuple):
    """A trajectory that was picked."""

    tokens: list[int]
    mask: list[int] | None
    prompt_length: int
    messages: Any
    score: float
    position: int
    is_truncated: bool


class TrajectoryReader:
    """Reads trajectories of a group: prompts, chats, truncation; refuses unusable ones."""

    def __init__(self, truncation: TruncationRule, *, needs_messages: bool) -> None:
        self._end_ids = frozenset(truncation.end_ids)
        self._drops = truncation.drops
        self._needs_messages = needs_messages

    def read(self, group: ExportGroup) -> tuple[dict[int, Trajectory], dict[str, int]]:
        """Return usable trajectories by position, and how many are not, by reason."""
        masks = group.masks if has_prompt_masks(group) else None
        sides: dict[int, Trajectory] = {}
        refused: Counter[str] = Counter()
        for i, prompt_length in enumerate(prompt_lengths(group)):
            messages = group.messages[i] if group.messages else None
            reason = self._why_not(prompt_length, messages)
            if has_placeholder_tokens(group.tokens[i]):
                reason = PLACEHOLDERS  # its messages too may be made of them
            mask = masks[i] if masks else None
            is_cut = reason is None and self._is_cut(group.tokens[i], mask)
            if is_cut and self._drops:
                reason = TRUNCATED
            if reason is not None:
                refused[reason] += 1
                continue
            sides[i] = Trajectory(
                group.tokens[i], mask, prompt_length or 0, messages, group.scores[i], i, is_cut
            )
        return sides, dict(refused)

    def _why_not(self, prompt_length: int | None, messages: Any) -> str | None:
        if self._needs_messages:
            return None if messages else "no messages"
        return NOTHING_TRAINED if prompt_length is None else None

    def _is_cut(self, ids: list[int], mask: list[int] | None) -> bool:
        if not self._end_ids or not ids:
            return False
        last = len(ids) - 1
        while mask and last > 0 and mask[last] == IGNORE_INDEX:
            last -= 1
        return ids[last] not in self._end_ids
