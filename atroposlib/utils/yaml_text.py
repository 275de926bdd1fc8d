"""YAML text, with one error for every text that is not a plain document."""

from __future__ import annotations

from typing import IO, Any

import yaml

__all__ = ["has_at_most", "read_yaml"]

_MAX_VALUES = 1_000_000
"""With aliases written out; in a longer text, at most the number of its characters."""


def read_yaml(text: str | IO[str]) -> Any:
    """Return the value of a document, as `yaml.safe_load`.

    Raises:
        yaml.YAMLError: it is not one, or its aliases stand for far more values than it has. The
            library itself raises errors of its constructors for `2001-13-01`, `!!bool q`,
            `!!timestamp x` and thousands of brackets.
    """
    try:
        value = yaml.safe_load(text)
    except RecursionError as error:
        raise yaml.YAMLError("too many levels of keys and lists") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise yaml.YAMLError(f"a value is not one of its type: {error}") from error
    limit = max(_MAX_VALUES, len(text) if isinstance(text, str) else 0)
    if not has_at_most(value, limit):
        raise yaml.YAMLError(f"an alias refers to itself, or there are over {limit:,} values")
    return value


def has_at_most(value: Any, limit: int) -> bool:
    """Return whether a value, with its aliases written out, has few enough parts."""
    waiting, num_values = [value], 0
    while waiting and num_values <= limit:
        part = waiting.pop()
        num_values += 1
        if isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, (list, set, tuple)):
            waiting.extend(part)
    return num_values <= limit
