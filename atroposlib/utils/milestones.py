"""When something that repeats is told in the log: at first, then ever more rarely. Pure."""

from __future__ import annotations

__all__ = ["is_milestone"]


def is_milestone(count: int, *, added: int = 1) -> bool:
    """Whether a count has reached 1, 10, 100, ... by what was added to it last.

    Example:
        [n for n in range(1, 200) if is_milestone(n)] == [1, 10, 100]
    """
    before = count - added
    return count > 0 and (before <= 0 or len(str(count)) > len(str(before)))
