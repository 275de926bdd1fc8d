"""Measurements of optimizer steps: durations, peak memory and the first gradient."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["GradientGap", "StepLog", "gradient_gap"]

_SAMPLES_PER_TENSOR = 4096
_MIB = 2**20


class StepLog:
    """Durations of steps and the first gradient; memory is measured from its creation.

    The median of the steps after the first one counts. Memory is that of torch's allocator on
    CUDA, and the resident memory of the process elsewhere.
    """

    def __init__(self, device: str) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.gradient: dict[str, torch.Tensor] = {}
        self._device = device
        self._on_gpu = device.startswith("cuda")
        self._before_mib = self._current_mib()
        self._started = self._cpu_started = 0.0
        self._reset_peak()

    def start(self) -> None:
        """Start the clock of a step."""
        self._synchronize()
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def stop(self, *, excluded_s: float = 0.0, excluded_cpu_s: float = 0.0) -> None:
        """Record a step, without the time for preparing its batch."""
        self._synchronize()
        self.times.append(time.perf_counter() - self._started - excluded_s)
        self.cpu_times.append(time.process_time() - self._cpu_started - excluded_cpu_s)

    def keep_first_gradient(self, model: Any) -> None:
        """Copy entries of every gradient, at equal distances, before the first update."""
        if self.gradient:
            return
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                flat = parameter.grad.detach().flatten()
                stride = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
                self.gradient[name] = flat[::stride].float().cpu()

    def results(self, *, num_tokens: int) -> dict[str, Any]:
        """Return the figures of the steps."""
        step_s = statistics.median(self.times[1:])
        peak_mib = self._peak_mib()
        return {
            "tokens_per_s": num_tokens / step_s,
            "step_s": step_s,
            "fastest_step_s": min(self.times[1:]),
            "step_cpu_s": statistics.median(self.cpu_times[1:]),
            "peak_mib": peak_mib,
            "peak_above_model_mib": peak_mib - self._before_mib,
        }

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _reset_peak(self) -> None:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")

    def _peak_mib(self) -> float:
        if self._on_gpu:
            return float(torch.cuda.max_memory_allocated(self._device)) / _MIB
        if Path("/proc/self/status").exists():
            return _status_mib("VmHWM")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MIB

    def _current_mib(self) -> float:
        if self._on_gpu:
            return float(torch.cuda.memory_allocated(self._device)) / _MIB
        return _status_mib("VmRSS") if Path("/proc/self/status").exists() else 0.0


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


class GradientGap(NamedTuple):
    """Difference of two gradients."""

    max_abs: float
    relative: float
    """Norm of the difference, divided by the norm of the second gradient."""
    num_entries: int


def gradient_gap(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> GradientGap:
    """Compare sampled entries of two gradients of the same model."""
    if ours.keys() != theirs.keys():
        missing = sorted(ours.keys() ^ theirs.keys())[:3]
        raise ValueError(f"gradients of different parameters: {', '.join(missing)}")
    mine, other = (torch.cat([g[name].double() for name in theirs]) for g in (ours, theirs))
    difference = mine - other
    return GradientGap(
        float(difference.abs().max()),
        float(difference.norm() / other.norm().clamp(min=1e-30)),
        difference.numel(),
    )
