"""Reading untrusted JSON field by field, with errors that name the place; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from atroposlib.envs.server_handling.proxy.refusals import bad_request

__all__ = [
    "joined_text",
    "list_at",
    "object_at",
    "read_fields",
    "refuse",
    "text_at",
]

FieldsT = TypeVar("FieldsT", bound=BaseModel)


def refuse(path: str, message: str) -> NoReturn:
    """Raise the refusal of one place of a body, `path` as in `input[2].content`."""
    raise bad_request(f"{path}: {message}", param=path)


def text_at(value: Any, path: str) -> str:
    """Return a text; refuses anything else."""
    if not isinstance(value, str):
        refuse(path, f"expected text, got {_kind_of(value)}")
    return value


def list_at(value: Any, path: str) -> list[Any]:
    """Return a list; refuses anything else."""
    if not isinstance(value, list):
        refuse(path, f"expected a list, got {_kind_of(value)}")
    return value


def object_at(value: Any, path: str) -> Mapping[str, Any]:
    """Return an object; refuses anything else."""
    if not isinstance(value, Mapping):
        refuse(path, f"expected an object, got {_kind_of(value)}")
    return value


def joined_text(value: Any, path: str, *, kinds: Iterable[str], separator: str = "\n") -> str:
    """Return the text of a content: text itself, or a list of parts that hold text.

    Args:
        value: Content as the client sent it; None counts as empty.
        path: Where it was found.
        kinds: Types of parts that are text, the one a client should send first.
        separator: Put between parts.

    Raises:
        ProxyRefusal: a part of another type, such as an image.
    """
    if value is None or isinstance(value, str):
        return value or ""
    known = tuple(kinds)
    texts = []
    for i, entry in enumerate(list_at(value, path)):
        part = object_at(entry, f"{path}[{i}]")
        kind = part.get("type")
        if kind not in known:
            refuse(
                f"{path}[{i}]",
                f"type {kind!r} is not supported: the model reads text; send {known[0]!r}",
            )
        texts.append(text_at(part.get("text", part.get("refusal")), f"{path}[{i}].text"))
    return separator.join(texts)


def read_fields(model: type[FieldsT], body: Mapping[str, Any]) -> FieldsT:
    """Return the fields of a body; the refusal of a bad one names its first bad field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        refuse(_path_of(problem["loc"]), problem["msg"][:1].lower() + problem["msg"][1:])


def _path_of(location: Iterable[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean"}
    if value is None:
        return "nothing"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "a value")
