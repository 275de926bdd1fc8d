"""Scores for people: sums of tenths without the digits that floating point adds."""

from __future__ import annotations

from typing import Any

__all__ = ["short_score"]


def short_score(score: Any) -> Any:
    """Return a float with six significant digits; anything else as it is."""
    return float(f"{score:.6g}") if isinstance(score, float) else score
