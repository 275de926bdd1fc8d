r"""Finding the answer that a completion marks: `\boxed{...}` or `<answer>...</answer>`. Pure."""

from __future__ import annotations

import re

__all__ = ["boxed_answer", "tagged_answer"]

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE)
_BOX = "\\boxed{"


def boxed_answer(text: str) -> str | None:
    r"""Return what stands behind the last `\boxed{` as far as the next brace, stripped.

    None when there is no box, or the last one is not closed.
    """
    _, box, rest = text.rpartition(_BOX)
    inside, brace, _ = rest.partition("}")
    return inside.strip() if box and brace else None


def tagged_answer(text: str) -> str | None:
    """Return what stands in the first pair of tags on one line, stripped; None without a pair."""
    found = _TAGS.search(text)
    return found[1].strip() if found else None
