"""Garbage collection while a program starts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused(*, freezes: bool = False) -> Iterator[None]:
    """Pause the collection of cyclic garbage, for the imports of large packages.

    Importing torch and transformers makes 400,000 objects that live until the end of the program.
    The collector would visit them again and again while they are made, which is a quarter of the
    CPU time of these imports.

    Args:
        freezes: Whether later collections leave out what exists at the end, and never free it: for
            a program that has not loaded a model or data yet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.freeze()
        if was_enabled:
            gc.enable()
