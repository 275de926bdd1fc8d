"""Place and reason of an error in a YAML file, as part of one line."""

from __future__ import annotations

import yaml

from atroposlib.utils.text import inert_line

__all__ = ["describe_yaml"]

_MAX_CHARACTERS = 100


def describe_yaml(error: Exception) -> str:
    """Return place and reason of an error without the line of the file, which may have a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    mark = error.problem_mark
    reason = inert_line(str(error.problem or ""), max_characters=_MAX_CHARACTERS)
    return f" in line {mark.line + 1}, column {mark.column + 1}: {reason}"
