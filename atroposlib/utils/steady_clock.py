"""Unix time that does not jump when the system clock is changed."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["steady_clock"]


def steady_clock(
    *, unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock that reads Unix time once and then advances with the monotonic clock.

    Differences between its times are durations. Its dates are as accurate as the system clock was
    when this function was called.

    Args:
        unix: Unix time in seconds.
        monotonic: seconds since any fixed point; never decreases.
    """
    offset = unix() - monotonic()
    return lambda: offset + monotonic()
