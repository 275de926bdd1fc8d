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
    """Ticks every millisecond and notes how late each tick is; one per event loop.

    A tick is also late when other processes take the processor. How long this one computed since
    the tick before says how much of the delay can be of its own making.
    """

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._own_late_s: list[float] = []
        self._cpu_s = 0.0
        self._cpu_at_tick_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure, from zero."""
        self.stop()
        self._late_s.clear()
        self._own_late_s.clear()
        self._cpu_s = self._cpu_at_tick_s = time.process_time()
        self._plan()

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_S
        self._timer = loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late_s, cpu_s = asyncio.get_running_loop().time() - self._due, time.process_time()
        self._late_s.append(late_s)
        self._own_late_s.append(min(late_s, cpu_s - self._cpu_at_tick_s))
        self._cpu_at_tick_s = cpu_s
        self._plan()

    def stop(self) -> dict[str, Any]:
        """End the measurement and return its figures, in milliseconds and seconds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late, own = _with_missed_ticks(self._late_s), _with_missed_ticks(self._own_late_s)
        return {
            "ticks": len(self._late_s),
            "stall_p50_ms": 1e3 * late[len(late) // 2],
            "stall_p99_ms": 1e3 * late[int(len(late) * 0.99)],
            "stall_max_ms": 1e3 * late[-1],
            "own_stall_p99_ms": 1e3 * own[int(len(own) * 0.99)],
            "cpu_s": time.process_time() - self._cpu_s,
        }


def _with_missed_ticks(late_s: list[float]) -> list[float]:
    """Sort; a tick that is late also stands for those that would have come meanwhile."""
    return sorted(s - n * TICK_S for s in late_s for n in range(1 + int(s / TICK_S))) or [0.0]


async def _watch_until_told() -> None:
    over, watch = asyncio.Event(), LoopWatch()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    watch.start()
    await over.wait()
    print(json.dumps(watch.stop()))


if __name__ == "__main__":
    asyncio.run(_watch_until_told())
