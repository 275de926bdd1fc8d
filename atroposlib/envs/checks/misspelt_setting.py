"""Whether the author gave a setting in Python under a name that was meant to be another."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from atroposlib.envs.checks.call_site import is_own_file
from atroposlib.envs.settings import ENV_PREFIX
from atroposlib.utils.cli import near_name

__all__ = ["misspelt_setting"]


def misspelt_setting(env_cls: type[Any], config: BaseModel) -> str | None:
    """Return which undeclared setting resembles a declared one, or None.

    A config keeps undeclared settings, so that an environment may read them; one that its files
    read is the author's own, whatever it resembles.
    """
    known = sorted(f"{ENV_PREFIX}{name}" for name in type(config).model_fields)
    undeclared = config.model_extra or {}
    read = _names_read(env_cls) if undeclared else set()
    for key in undeclared:
        name = f"{ENV_PREFIX}{key}"
        hint = near_name(name, known)
        if hint and key not in read:
            return f"{name}: no such setting{hint}"
    return None


def _names_read(env_cls: type[Any]) -> set[str]:
    """Return the attributes that the author's files of a class and its bases read.

    `config.split` and `getattr(config, "split")` both read `split`.
    """
    names: set[str] = set()
    for base in env_cls.__mro__:
        try:
            file_name = inspect.getfile(base)
        except (TypeError, OSError):
            continue  # built in, or typed at a prompt
        if is_own_file(file_name) and Path(file_name).is_file():
            for node in ast.walk(ast.parse(Path(file_name).read_bytes())):
                names |= _read_by(node)
    return names


def _read_by(node: ast.AST) -> set[str]:
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()):
            return {name}
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return {name}
    return set()
