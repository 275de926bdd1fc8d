"""The gymnasium package, imported when a game is first played."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from atroposlib.errors import MissingExtraError

__all__ = ["load_gymnasium"]


@lru_cache(maxsize=1)
def load_gymnasium() -> Any:
    """Return the package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("gymnasium", extra="examples") from error
    return gymnasium
