"""Helpers for command lines and configuration files: prefixed models, merging, usage errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from copy import copy
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_cli import FailedExecutionException

from atroposlib.errors import ConfigError

__all__ = [
    "UsageError",
    "adjust_model_defaults",
    "extract_namespace",
    "get_double_dash_flags",
    "get_prefixed_pydantic_model",
    "merge_dicts",
    "refused_values",
]

_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf", re.ASCII)


class UsageError(ConfigError, FailedExecutionException):  # type: ignore[misc]  # an untyped base
    """The command line or a configuration file is invalid; exit code 2."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        FailedExecutionException.__init__(self, exit_code, message)


def get_prefixed_pydantic_model(base_model: type[BaseModel], prefix: str) -> type[BaseModel]:
    """Copy a model, with `prefix` (separator included, such as `env.`) before every field name.

    Annotation, default, default factory and description are kept. Constraints such as ranges are
    not: the original model checks them when it is built from the collected values.
    """
    # Any: pydantic's create_model takes field definitions as loosely typed keywords.
    fields: dict[str, Any] = {
        f"{prefix}{name}": (field.annotation, _bare_field(field))
        for name, field in base_model.model_fields.items()
    }
    return create_model(
        f"{prefix.capitalize()}{base_model.__name__}",
        __config__=ConfigDict(protected_namespaces=()),
        **fields,
    )


def _bare_field(field: FieldInfo) -> Any:
    if field.default_factory is not None:
        return Field(default_factory=field.default_factory, description=field.description)
    return Field(default=field.default, description=field.description)


def adjust_model_defaults(
    model_class: type[BaseModel], defaults: Mapping[str, Any] | BaseModel
) -> type[BaseModel]:
    """Return a subclass `<Name>WithDefaults` of a model with other defaults.

    The changed fields keep annotation and description and lose constraints. Unknown names are
    ignored, and None does not replace a default factory.
    """
    values = defaults.model_dump() if isinstance(defaults, BaseModel) else dict(defaults)
    fields: dict[str, Any] = {}
    for name, field in model_class.model_fields.items():
        if name not in values:
            continue
        keeps_factory = values[name] is None and field.default_factory is not None
        changed = copy(field)
        if not keeps_factory:
            changed.default, changed.default_factory = values[name], None
        fields[name] = (field.annotation, _bare_field(changed))
    return create_model(f"{model_class.__name__}WithDefaults", __base__=model_class, **fields)


def merge_dicts(*dicts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings recursively; later values replace earlier ones.

    None or a scalar replaces a mapping. The arguments are not changed.

    Example:
        merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    """
    merged: dict[str, Any] = {}
    for layer in dicts:
        for key, value in layer.items():
            known = merged.get(key)
            if isinstance(known, Mapping) and isinstance(value, Mapping):
                merged[key] = merge_dicts(known, value)
            else:
                merged[key] = value
    return merged


def extract_namespace(model: Any, prefix: str) -> dict[str, Any]:
    """Return the entries whose key starts with `prefix`, with the prefix removed.

    Raises:
        TypeError: `model` is not a mapping and has neither `model_dump()` nor `to_dict()`.
    """
    if isinstance(model, Mapping):
        values: Mapping[str, Any] = model
    elif callable(dump := getattr(model, "model_dump", None) or getattr(model, "to_dict", None)):
        values = dump()
    else:
        raise TypeError(
            f"cannot read settings from {type(model).__name__}; "
            "expected a dict, or an object with model_dump() or to_dict()"
        )
    return {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}


def get_double_dash_flags() -> dict[str, str | bool | None]:
    """Read the `--flag` words of this process's command line.

    `--k=v` and `--k v` give `"v"`; a flag followed by another flag or by nothing gives True; the
    text `None` gives None. A word that begins with a dash is a value only if it is a number, so
    `--env.total_steps -1` gives `"-1"`.
    """
    words = sys.argv[1:]
    flags: dict[str, str | bool | None] = {}
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        if not name:
            continue
        following = words[position + 1] if position + 1 < len(words) else "--"
        if equals:
            flags[name] = None if value == "None" else value
        elif following.startswith("-") and not _NUMBER.fullmatch(following):
            flags[name] = True
        else:
            flags[name] = None if following == "None" else following
    return flags


def refused_values(error: ValidationError, prefix: str = "") -> UsageError:
    """Convert a validation error to one that names each field, after `prefix`, and its reason."""
    lines = []
    for detail in error.errors(include_url=False):
        path = prefix + ".".join(str(part) for part in detail["loc"])
        reason = detail["msg"][:1].lower() + detail["msg"][1:]
        # An API key may have been given in the wrong place; only plain values are shown.
        shown = isinstance(detail["input"], (str, int, float)) and "key" not in path
        got = f" (got {detail['input']!r})" if shown and detail["type"] != "missing" else ""
        lines.append(f"{path}: {reason}{got}")
    return UsageError("\n".join(lines))
