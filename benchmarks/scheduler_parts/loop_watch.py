"""What an event loop's process costs between two moments: stalls of the loop, processor time."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import Any

__all__ = ["LoopWatch"]

TICK_S = 0.001


class LoopWatch:
    """Ticks every millisecond and notes how late each tick is; one per event loop."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._cpu_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure, from zero."""
        self.stop()
        self._late_s.clear()
        self._cpu_s = time.process_time()
        self._plan()

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_S
        self._timer = loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._late_s.append(asyncio.get_running_loop().time() - self._due)
        self._plan()

    def stop(self) -> dict[str, Any]:
        """End the measurement and return its figures, in milliseconds and seconds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A tick that is late stands for those that would have come meanwhile.
        late = sorted(s - n * TICK_S for s in self._late_s for n in range(1 + int(s / TICK_S)))
        late = late or [0.0]
        return {
            "ticks": len(self._late_s),
            "stall_p50_ms": 1e3 * late[len(late) // 2],
            "stall_p99_ms": 1e3 * late[int(len(late) * 0.99)],
            "stall_max_ms": 1e3 * late[-1],
            "cpu_s": time.process_time() - self._cpu_s,
        }


async def _watch_until_told() -> None:
    over, watch = asyncio.Event(), LoopWatch()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    watch.start()
    await over.wait()
    print(json.dumps(watch.stop()))


if __name__ == "__main__":
    asyncio.run(_watch_until_told())
