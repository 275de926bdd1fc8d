"""Garbage collection while a program starts.

Importing torch and transformers makes 400,000 objects that live until the end of the program.
Python's collector of cyclic garbage visits them again and again while they are made, which is a
quarter of the CPU time of these imports, and in each full collection later.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collection of cyclic garbage, for the imports of large packages.

    What exists at the end is never visited again, so that nothing large may be garbage then: load
    models afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
