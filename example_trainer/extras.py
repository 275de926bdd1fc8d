"""Turn the absence of an optional package into an error that names the extra bringing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atroposlib.errors import MissingExtraError

__all__ = ["require_extra"]


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Import optional packages inside this; a missing one raises `MissingExtraError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", extra=extra) from error
