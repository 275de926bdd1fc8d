"""YAML text, with one error for every text that is not a plain document."""

from __future__ import annotations

from typing import IO, Any

import yaml

__all__ = ["read_yaml"]


def read_yaml(text: str | IO[str]) -> Any:
    """Return the value of a document, as `yaml.safe_load`.

    Raises:
        yaml.YAMLError: it is not one. The library itself raises errors of its constructors for
            `2001-13-01`, `!!bool q`, `!!timestamp x` and thousands of brackets.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise yaml.YAMLError("too many levels of keys and lists") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise yaml.YAMLError(f"a value is not one of its type: {error}") from error
