"""Paths of models and tokenizers, as opposed to names on the hub."""

from __future__ import annotations

from pathlib import Path

__all__ = ["missing_folder"]


def missing_folder(name: str) -> str | None:
    """Return an error text if `name` is a path without a folder; None for a name on the hub.

    Names on the hub are NAME or ORGANIZATION/NAME. Libraries report a missing folder as an invalid
    name on the hub.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")
    if not is_path or Path(name).is_dir():
        return None
    return f"there is no folder {Path(name).absolute()}"
