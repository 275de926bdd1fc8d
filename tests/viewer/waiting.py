"""Waiting for what a thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(is_so: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    """Return as soon as something is so; fail when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be so in time"
        time.sleep(0.01)
