"""The help text of a command: every flag with its default and description."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from atroposlib.envs.flags import Flag
from atroposlib.envs.settings_text import shown_default

__all__ = ["describe_type", "help_text", "short_help_text"]

_WIDTH = 100
_INDENT = 6

_GROUP_TITLES = {
    "env": "Environment",
    "openai": "Inference server",
    "teacher": "Teacher's inference server",
    "": "Other",
}


OFTEN_NEEDED = (
    "config",
    *(
        f"env.{name}"
        for name in (
            "tokenizer_name",
            "group_size",
            "max_token_length",
            "total_steps",
            "steps_per_eval",
            "rollout_server_url",
            "use_wandb",
            "include_messages",
            "data_path_to_save_groups",
            "data_dir_to_save_evals",
        )
    ),
    *(f"openai.{name}" for name in ("base_url", "model_name", "api_key", "server_type")),
    *("teacher.base_url", "teacher.model_name"),
    *("quiet", "dataset-path", "json"),
)
"""What the short help shows of the settings that all environments have."""


def short_help_text(
    flags: Sequence[Flag], *, shared: Collection[str], usage: str, intro: str = ""
) -> str:
    """Write the help of one command without what is seldom needed.

    Args:
        flags: What the command takes.
        shared: Names of the flags that every environment has.
        usage: Line that shows how the command is called.
        intro: Paragraphs between the usage and the flags.
    """
    own = [flag for flag in flags if flag.name not in shared]
    by_name = {flag.name: flag for flag in flags if flag.name in shared}
    often = [by_name[name] for name in OFTEN_NEEDED if name in by_name]
    blocks = [f"usage: {usage}", *([intro] if intro else [])]
    if own:
        blocks.append("\n".join(["Settings of this environment:", *map(_entry, own)]))
    blocks.append("\n".join(["Often needed:", *map(_entry, often)]))
    num_others = len(by_name) - len(often)
    blocks.append(
        f"All others, {num_others} of them: --help all. env. and openai. may be left out where the "
        "name is unambiguous."
    )
    return "\n\n".join(blocks) + "\n"


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
