"""Names of models and tokenizers that are paths, as opposed to names on a hub."""

from __future__ import annotations

from pathlib import Path

__all__ = ["missing_folder"]


def missing_folder(name: str) -> str | None:
    """Say that a path has no folder; libraries take it for a malformed name on the hub.

    Args:
        name: of a model or a tokenizer. A name on the hub is NAME or ORGANIZATION/NAME.

    Returns:
        The reason, for a message; None for a folder that is there and for a name on the hub.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")
    if not is_path or Path(name).is_dir():
        return None
    return f"there is no folder {Path(name).absolute()}"
