"""Unix time that never jumps, whatever is done to the clock of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["steady_clock"]


def steady_clock(
    *, unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock that is read from the machine once and runs on by itself from then on.

    Differences of its times are true durations. As dates they are as good as the machine's clock
    was when this one was made.

    Args:
        unix: Unix time in seconds.
        monotonic: seconds that only ever grow.
    """
    begun = unix() - monotonic()
    return lambda: begun + monotonic()
