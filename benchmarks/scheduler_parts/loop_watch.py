"""Stalls of an event loop, and the processor time of its process, between two moments.

Run as a script, it measures an idle loop until SIGTERM: the stalls that the machine itself adds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable

__all__ = ["IdleLoop", "LoopWatch"]

TICK_S = 0.001


class LoopWatch:
    """Ticks every millisecond and records the delay of each tick; one per event loop.

    A tick is also late while other processes use the processor. The *own* stall of a tick is its
    delay, limited to the processor time used since the previous tick.

    Args:
        cpu_clock: `time.process_time` counts all threads, `time.thread_time` only the loop's.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self._late_s: list[float] = []
        self._own_late_s: list[float] = []
        self._cpu_s = 0.0
        self._cpu_at_tick_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start a measurement."""
        self.stop()
        self._late_s.clear()
        self._own_late_s.clear()
        self._cpu_s, self._cpu_at_tick_s = time.process_time(), self._cpu_clock()
        self._plan()

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_S
        self._timer = loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late_s, cpu_s = asyncio.get_running_loop().time() - self._due, self._cpu_clock()
        self._late_s.append(late_s)
        self._own_late_s.append(min(late_s, cpu_s - self._cpu_at_tick_s))
        self._cpu_at_tick_s = cpu_s
        self._plan()

    def stop(self) -> dict[str, float]:
        """End the measurement; return its results in milliseconds and seconds."""
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
            "own_stall_max_ms": 1e3 * own[-1],
            "cpu_s": time.process_time() - self._cpu_s,
        }


def _with_missed_ticks(late_s: list[float]) -> list[float]:
    """Sort delays; a late tick also represents the ticks that were due meanwhile."""
    return sorted(s - n * TICK_S for s in late_s for n in range(1 + int(s / TICK_S))) or [0.0]


class IdleLoop:
    """An idle event loop in another process, measured from creation to `stop`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)

    def stop(self) -> dict[str, float]:
        """End the process; return the results of its `LoopWatch`."""
        self._process.send_signal(signal.SIGTERM)
        output, _ = self._process.communicate(timeout=30)
        results: dict[str, float] = json.loads(output)
        return results


async def _watch_until_sigterm() -> None:
    over, watch = asyncio.Event(), LoopWatch()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    watch.start()
    await over.wait()
    print(json.dumps(watch.stop()))


if __name__ == "__main__":
    asyncio.run(_watch_until_sigterm())
