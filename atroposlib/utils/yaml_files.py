"""YAML files of settings: repeated keys, of which PyYAML keeps the last, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from atroposlib.utils.text import inert_line

__all__ = ["describe_yaml", "load_with_repeats"]

_MAX_KEY_CHARACTERS = 60
_MAX_REASON_CHARACTERS = 100


def load_with_repeats(text: str) -> tuple[Any, list[str]]:
    """Return the content of a YAML document, and its repeated keys as `env in lines 2 and 9`.

    A key is repeated if its mapping has it twice. Keys of merged mappings (`<<`) may be overridden.

    Raises:
        yaml.YAMLError: the text is not YAML.
        RecursionError: it is nested too deeply.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, []
        repeated = list(_repeated_keys(root))  # construction puts merged keys into the mappings
        return loader.construct_document(root), repeated
    finally:
        loader.dispose()


def _repeated_keys(root: yaml.Node) -> Iterator[str]:
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                waiting += (key, value)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if key.value in lines:
                    name = inert_line(key.value, max_characters=_MAX_KEY_CHARACTERS)
                    yield f"{name} in lines {lines[key.value]} and {line}"
                lines[key.value] = line


def describe_yaml(error: Exception) -> str:
    """Return place and reason of an error without the line of the file, which may have a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    mark = error.problem_mark
    reason = inert_line(str(error.problem or ""), max_characters=_MAX_REASON_CHARACTERS)
    return f" in line {mark.line + 1}, column {mark.column + 1}: {reason}"
