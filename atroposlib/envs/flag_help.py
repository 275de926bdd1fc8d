"""The help text of a command: every flag with its default and description."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from atroposlib.envs.flags import Flag
from atroposlib.envs.settings_text import shown_default

__all__ = ["describe_type", "help_text"]

_WIDTH = 100
_INDENT = 6

_GROUP_TITLES = {
    "env": "Environment",
    "openai": "Inference server",
    "teacher": "Teacher's inference server",
    "": "Other",
}


def help_text(flags: Sequence[Flag], *, usage: str, intro: str = "") -> str:
    """Write the help of one command.

    Args:
        flags: What the command takes.
        usage: Line that shows how the command is called.
        intro: Paragraphs between the usage and the flags.
    """
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        prefix, separator, _ = flag.name.partition(".")
        groups.setdefault(prefix if separator else "", []).append(flag)
    blocks = [f"usage: {usage}", *([intro] if intro else [])]
    # Settings without a prefix come last, whatever the order of the fields.
    for prefix in sorted(groups, key=lambda prefix: prefix == ""):
        title = _GROUP_TITLES.get(prefix, prefix)
        names = f" (--{prefix}.*)" if prefix else ""
        blocks.append("\n".join([f"{title}{names}:", *map(_entry, groups[prefix])]))
    return "\n\n".join(blocks) + "\n"


def _entry(flag: Flag) -> str:
    head = f"  --{flag.name} {describe_type(flag.annotation)}"
    default = shown_default(flag.name, flag.default)
    note = "(required)" if default is None else f"(default: {default})"
    body = textwrap.wrap(
        f"{flag.description} {note}".strip(),
        width=_WIDTH,
        initial_indent=" " * _INDENT,
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join([head, *body])


def describe_type(annotation: Any) -> str:
    """What to type for a value, as in `INT`, `TRUE|FALSE`, `TEXT...` or `{openai,vllm}`."""
    origin = get_origin(annotation)
    if origin is Literal:
        return _closed_set(get_args(annotation))
    if origin in (Union, types.UnionType):
        members = [arm for arm in get_args(annotation) if arm is not type(None)]
        return "|".join(dict.fromkeys(describe_type(arm) for arm in members))
    kind = origin or annotation
    if kind is Any or not isinstance(kind, type):
        return "VALUE"
    if issubclass(kind, Enum):
        return _closed_set(member.value for member in kind)
    if issubclass(kind, Mapping | BaseModel):
        return "JSON"
    if issubclass(kind, list | tuple | set | frozenset | Sequence) and kind is not str:
        return f"{describe_type((get_args(annotation) or (str,))[0])}..."
    names = {bool: "TRUE|FALSE", int: "INT", float: "FLOAT", str: "TEXT"}
    return names.get(kind, kind.__name__.upper())


def _closed_set(choices: Iterable[Any]) -> str:
    return "{" + ",".join(str(choice) for choice in choices) + "}"
