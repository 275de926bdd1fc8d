"""Whether the work grows with the length of its input, measured so that no slow machine fails."""

from __future__ import annotations

import time
from collections.abc import Callable

FACTOR = 16
"""How much longer the long input is."""
MAX_GROWTH = 4 * FACTOR
"""Work in proportion to the length grows by FACTOR, work with its square by FACTOR squared."""
LEAST_S = 0.002
"""Shorter work is counted as this: its time is mostly that of the call."""


def assert_linear(work: Callable[[int], object]) -> None:
    """Fail if `work(FACTOR)` takes the processor more than `MAX_GROWTH` times as long as `work(1)`.

    The argument is how often the input is repeated. Both are measured in the same process, the
    best of three, so that the ratio depends neither on the machine nor on its load.
    """
    short_s = max(LEAST_S, min(_cpu_seconds(work, 1) for _ in range(3)))
    for _ in range(3):
        long_s = _cpu_seconds(work, FACTOR)
        if long_s <= MAX_GROWTH * short_s:
            return
    raise AssertionError(
        f"an input {FACTOR} times as long takes {long_s / short_s:.0f} times as long: "
        f"{long_s:.3f} instead of {short_s:.3f} CPU s"
    )


def _cpu_seconds(work: Callable[[int], object], times: int) -> float:
    started = time.process_time()
    work(times)
    return time.process_time() - started
