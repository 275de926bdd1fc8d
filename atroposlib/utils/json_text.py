"""JSON text: values with NumPy numbers, lines of JSON Lines, and decoding in short steps.

A line is read by msgspec if it is strict JSON, else by Python's tolerant decoder.

`decode_in_steps` returns to the event loop between steps. A decoder holds the interpreter lock
until it ends, also in a thread. For an answer with eight completions of 32k tokens that is 25 ms;
in steps it is 2 ms each, and 5 ms to separate the completions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

__all__ = [
    "STEP_BYTES",
    "decode_in_steps",
    "decode_line",
    "encode_mapping",
    "json_kind",
    "single_number",
    "to_plain",
]

_CALL_VALUES = 4096
"""Longer lists are encoded in several calls, so that other threads can run in between."""


_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}


def json_kind(value: Any) -> str:
    """Return the JSON type of a decoded value, with an article, for error messages."""
    return "null" if value is None else _KINDS.get(type(value), "a number")


_ARRAYS = {"numpy": ("ndarray", "generic"), "torch": ("Tensor",)}
"""Classes of arrays and scalars by package."""


def to_plain(value: Any) -> Any:
    """Convert scalars and arrays of NumPy and torch, as in `json.dumps(..., default=to_plain)`.

    Imports neither of them.

    Raises:
        TypeError: the value has another type, or its numbers cannot be read.
    """
    for package, names in _ARRAYS.items():
        module = sys.modules.get(package)
        kinds: list[Any] = [getattr(module, name, None) for name in names]
        if any(kind is not None and isinstance(value, kind) for kind in kinds):
            try:
                return value.tolist()
            except RuntimeError as error:  # such as a tensor on the device `meta`
                raise TypeError(f"a {type(value).__name__} has no JSON form: {error}") from error
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def single_number(value: Any) -> Any:
    """Return the number of an array or tensor that has one; other values as they are.

    NumPy 2.4 makes no float of an array with dimensions.
    """
    if isinstance(value, list | tuple):
        return value
    try:
        plain = to_plain(value)
    except TypeError:
        return value
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return value if isinstance(plain, list) else plain


def encode_mapping(mapping: Mapping[str, Any], *, allow_nan: bool = False) -> str:
    """Return one line of JSON.

    Args:
        mapping: plain containers, numbers and text; NumPy values are allowed anywhere.
        allow_nan: whether NaN and infinities are written, which strict readers reject.

    Raises:
        ValueError: a value has no JSON form; the message begins with its top-level key.
    """
    dumps = partial(json.dumps, default=to_plain, allow_nan=allow_nan)
    try:
        if not all(isinstance(key, str) for key in mapping):
            return dumps(dict(mapping))
        entries = (f"{dumps(key)}: {_in_pieces(value, dumps)}" for key, value in mapping.items())
        return "{" + ", ".join(entries) + "}"
    except (TypeError, ValueError) as error:
        for key, value in mapping.items():
            try:
                dumps({key: value})
            except (TypeError, ValueError) as cause:
                raise ValueError(f"{key}: {cause}") from error
        raise


def _in_pieces(value: Any, dumps: Callable[[Any], str]) -> str:
    """Return `dumps(value)`; nested lists and long lists are encoded in several calls."""
    if type(value) is not list or not value:
        return dumps(value)
    if type(value[0]) is list:
        return "[" + ", ".join(_in_pieces(row, dumps) for row in value) + "]"
    pieces = (value[i : i + _CALL_VALUES] for i in range(0, len(value), _CALL_VALUES))
    return "[" + ", ".join(dumps(piece)[1:-1] for piece in pieces) + "]"


_decoder = msgspec.json.Decoder()


def decode_line(line: bytes) -> Any:
    """Return the value of one line.

    Also accepts extensions of Python's encoder: NaN, infinities, lone surrogates. Invalid UTF-8
    becomes replacement characters. A byte order mark, with which Windows programs begin a file, is
    skipped.

    Raises:
        ValueError: the line is not JSON; the message has the position.
        RecursionError: it is nested too deeply.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(line.decode("utf-8-sig", errors="replace"))


STEP_BYTES = 2**20
"""Text up to this length is decoded in one step."""

_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])


async def decode_in_steps(
    text: bytes | memoryview, before_step: Callable[[int], Awaitable[object]]
) -> Any:
    """Return `msgspec.json.decode(text)`; long nested values are decoded part by part.

    Args:
        text: the JSON.
        before_step: awaited before every step, with the number of bytes it decodes.

    Raises:
        msgspec.DecodeError: `text` is not JSON.
        UnicodeDecodeError: `text` is not UTF-8.
    """
    await before_step(len(text))
    if len(text) > STEP_BYTES:
        start = bytes(text[:64]).translate(None, b" \t\r\n")
        if start.startswith(b"{"):
            entries = _entries.decode(text).items()
            return {
                key: await decode_in_steps(memoryview(value), before_step) for key, value in entries
            }
        if start.startswith((b"[{", b"[[")):
            return await _decode_elements(_elements.decode(text), before_step)
    return msgspec.json.decode(text)


async def _decode_elements(
    elements: list[msgspec.Raw], before_step: Callable[[int], Awaitable[object]]
) -> list[Any]:
    """Decode the elements of a list: long ones one by one, short ones several per step."""
    values: list[Any] = []
    start, num_bytes = 0, 0
    for end, element in enumerate(elements, start=1):
        num_bytes += len(memoryview(element))
        if num_bytes < STEP_BYTES // 2 and end < len(elements):
            continue
        if end - start == 1:
            values.append(await decode_in_steps(memoryview(element), before_step))
        else:
            await before_step(num_bytes)
            values += msgspec.json.decode(b"[%b]" % b",".join(elements[start:end]))
        start, num_bytes = end, 0
    return values
