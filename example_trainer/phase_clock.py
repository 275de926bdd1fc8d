"""How long the parts of a step's computing take."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

__all__ = ["PhaseClock"]


class PhaseClock:
    """Adds up seconds by phase.

    Args:
        device: Torch device. On CUDA the end of a phase waits for the device: its kernels run
            after the call that started them has returned.
        clock: Monotonic seconds.
    """

    def __init__(
        self, device: str = "cpu", *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._waits = device.startswith("cuda")
        self._device = device
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        started = self._clock()
        yield
        if self._waits:
            import torch

            torch.cuda.synchronize(self._device)
        self._seconds[phase] += self._clock() - started

    def take_metrics(self) -> dict[str, float]:
        """Return `train/<phase>_time` in seconds for each phase since the last call."""
        metrics = {f"train/{phase}_time": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
