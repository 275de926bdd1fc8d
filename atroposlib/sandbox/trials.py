"""Programs that run into every limit, to learn whether it holds before another program runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from atroposlib.sandbox.interface import MEBIBYTE, SandboxLimits, SandboxResult

__all__ = ["TRIALS", "Trial"]

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")
LIMITS = SandboxLimits(
    wall_s=60.0,
    cpu_s=30,
    memory_bytes=256 * MEBIBYTE,
    max_processes=8,
    disk_bytes=MEBIBYTE,
    output_bytes=10_000,
)
SPIN = "while True: pass"
ALLOCATE = """
try:
    bytearray(512 * 2**20)
except MemoryError:
    print('held')
"""
FORK = """
import os, signal
signal.alarm(30)
try:
    for _ in range(32):
        if os.fork() == 0:
            signal.pause()
except OSError:
    print('held')
"""
FILL = """
for folder in ('/box', '/tmp', '/dev/shm'):
    try:
        for number in range(4):
            open(f'{folder}/{number}', 'wb').write(bytes(600_000))
    except OSError:
        print('held')
"""


class Trial(NamedTuple):
    """A program that goes beyond a limit."""

    limit: str
    command: tuple[str, ...]
    holds: Callable[[SandboxResult], bool]
    """Whether the limit stopped it."""
    limits: SandboxLimits = LIMITS


TRIALS = (
    Trial("memory", (*PYTHON, ALLOCATE), lambda result: result.stdout == "held\n"),
    Trial("processes", (*PYTHON, FORK), lambda result: result.stdout == "held\n"),
    Trial("disk", (*PYTHON, FILL), lambda result: result.stdout == "held\n" * 3),
    Trial(
        "processor time",
        (*PYTHON, SPIN),
        lambda result: result.ended_by == "cpu_time",
        replace(LIMITS, cpu_s=1),
    ),
)
