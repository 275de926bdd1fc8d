"""Whether an item changed: its plain data, taken before and compared after."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

__all__ = ["changed_path", "data_of"]

MAX_DEPTH = 12
OPAQUE = "<object>"


def data_of(value: Any, depth: int = 0) -> Any:
    """Return a copy of the plain data in a value.

    Mappings, sequences, sets, dataclasses and pydantic models are followed; other objects, such as
    a game that an item carries, are left out: changing them is what they are for.
    """
    if depth > MAX_DEPTH:
        return OPAQUE
    if isinstance(value, BaseModel):
        value = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): data_of(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [data_of(entry, depth + 1) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(data_of(entry, depth + 1)) for entry in value)
    return value if isinstance(value, str | bytes | int | float | None) else OPAQUE


def changed_path(before: Any, after: Any, path: str = "item") -> str | None:
    """Return what differs between two results of `data_of`, or None."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{path}[{key!r}]"
            if key not in before:
                return f"{place} was added"
            if key not in after:
                return f"{place} was removed"
            changed = changed_path(before[key], after[key], place)
            if changed:
                return changed
        return None
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{path} had {len(before)} entries and has {len(after)}"
        pairs = enumerate(zip(before, after, strict=True))
        changes = (changed_path(old, new, f"{path}[{i}]") for i, (old, new) in pairs)
        return next((change for change in changes if change), None)
    if type(before) is not type(after) or (before != after and before == before):
        return f"{path} was {_short(before)} and is {_short(after)}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
