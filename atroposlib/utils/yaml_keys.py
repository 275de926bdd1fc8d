"""YAML files whose keys are looked at: PyYAML keeps the last value of a repeated key silently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

import yaml

from atroposlib.utils.text import inert_line

__all__ = ["load_with_repeats"]

_MAX_KEY_CHARACTERS = 60


def load_with_repeats(source: str | TextIO) -> tuple[Any, list[str]]:
    """Return the content of a YAML document, and its repeated keys as `env in lines 2 and 9`.

    A key is repeated if its mapping has it twice. Keys of merged mappings (`<<`) may be overridden.

    Raises:
        yaml.YAMLError: the text is not YAML.
        RecursionError: it is nested too deeply.
    """
    loader = yaml.SafeLoader(source)
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
