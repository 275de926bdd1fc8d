"""How long the event loop is held up: by the clock, and by its own work alone.

On a machine with other work the clock also counts what the kernel gave to others; the processor
time of the loop's thread does not.
"""

from __future__ import annotations

import asyncio
import time

__all__ = ["PassWatch"]

TICK_S = 0.001


class PassWatch:
    """Ticks every millisecond and notes how late each tick is."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._busy_s: list[float] = []
        self._planned_at_s = 0.0
        self._cpu_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure."""
        self._planned_at_s, self._cpu_s = time.perf_counter(), time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        late_s = time.perf_counter() - self._planned_at_s - TICK_S
        self._late_s.append(late_s)
        self._busy_s.append(min(late_s, time.thread_time() - self._cpu_s))
        self.start()

    def stop(self) -> tuple[float, float]:
        """Return the longest stall by the clock and by the loop's own work, in milliseconds."""
        if self._timer is not None:
            self._timer.cancel()
        return 1e3 * max(self._late_s, default=0.0), 1e3 * max(self._busy_s, default=0.0)
