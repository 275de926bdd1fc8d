"""Histograms for a terminal; pure."""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.envs.live_view import score_bars

__all__ = ["histogram_lines"]

_WIDTH = 30
_MAX_BARS = 10


def histogram_lines(values: Sequence[float]) -> list[str]:
    """Draw how values are spread: a line per range, or per value when there are few of them.

    Args:
        values: finite numbers; none give no lines.
    """
    if not values:
        return []
    bars = score_bars(values, max_bars=_MAX_BARS)
    widest = max(len(bar.label) for bar in bars)
    most = max(bar.num_scores for bar in bars)
    return [
        f"{bar.label:>{widest}}  {'#' * -(-_WIDTH * bar.num_scores // most):{_WIDTH}}  "
        f"{bar.num_scores}"
        for bar in bars
    ]
