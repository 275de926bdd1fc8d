"""YAML text, with one error for every text that is not a plain document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import yaml

from atroposlib.utils.text import inert_line

__all__ = ["describe_yaml", "has_at_most", "read_with_repeats", "read_yaml"]

_MAX_VALUES = 1_000_000
"""With aliases written out; in a longer text, at most the number of its characters."""
_MAX_KEY_CHARACTERS = 60
_MAX_REASON_CHARACTERS = 100


def read_yaml(text: str | IO[str]) -> Any:
    """Return the value of a document, as `yaml.safe_load`.

    Raises:
        yaml.YAMLError: it is not one, or its aliases stand for far more values than it has. The
            library itself raises errors of its constructors for `2001-13-01`, `!!bool q`,
            `!!timestamp x` and thousands of brackets.
    """
    return read_with_repeats(text)[0]


def read_with_repeats(text: str | IO[str]) -> tuple[Any, list[str]]:
    """Return the value of a document, and its repeated keys as `env in lines 2 and 9`.

    A key is repeated if its mapping has it twice; the value has the last one. Keys of merged
    mappings (`<<`) may be overridden. Raises like `read_yaml`.
    """
    root, repeated, value = None, [], None
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is not None:
                repeated = list(_repeated_keys(root))  # before merged keys are in the mappings
                value = loader.construct_document(root)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise yaml.YAMLError("too many levels of keys and lists") from error
    except UnicodeDecodeError:
        raise  # of the file
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise yaml.MarkedYAMLError(
            problem="a value is not one of its type", problem_mark=_mark_of_wrong_value(root)
        ) from error
    limit = max(_MAX_VALUES, len(text) if isinstance(text, str) else 0)
    if not has_at_most(value, limit):
        raise yaml.YAMLError(f"an alias refers to itself, or there are over {limit:,} values")
    return value, repeated


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


def _nodes_of(root: yaml.Node) -> Iterator[yaml.Node]:
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            waiting += [each for pair in node.value for each in pair]


def _repeated_keys(root: yaml.Node) -> Iterator[str]:
    for node in _nodes_of(root):
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                name = inert_line(key.value, max_characters=_MAX_KEY_CHARACTERS)
                yield f"{name} in lines {lines[key.value]} and {line}"
            lines[key.value] = line


def _mark_of_wrong_value(root: yaml.Node | None) -> Any:
    """Return the place of a value that cannot be constructed; None if it is not known."""
    for node in _nodes_of(root) if root is not None else ():
        if isinstance(node, yaml.ScalarNode):
            try:
                yaml.SafeLoader("").construct_document(node)
            except yaml.YAMLError:
                continue  # a merge key, which is not a value
            except (ValueError, LookupError, AttributeError, TypeError):
                return node.start_mark
    return None


def describe_yaml(error: Exception) -> str:
    """Return place and reason of an error without the line of the file, which may have a secret."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f": {inert_line(str(error), max_characters=_MAX_REASON_CHARACTERS)}"
    mark = error.problem_mark
    if mark is None:
        return ""
    reason = inert_line(str(error.problem or ""), max_characters=_MAX_REASON_CHARACTERS)
    return f" in line {mark.line + 1}, column {mark.column + 1}: {reason}"
