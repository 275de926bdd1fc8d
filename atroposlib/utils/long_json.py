"""Decode long JSON in short steps, each of which lets other threads have the interpreter.

A decoder keeps the interpreter to itself until it is done. A reply with eight completions of 32k
tokens takes it 25 ms; in steps no thread waits longer than one of them takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["STEP_BYTES", "decode_in_steps"]

STEP_BYTES = 2**18
"""What is no longer is decoded at once."""

_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])


def decode_in_steps(text: bytes | memoryview) -> Any:
    """Return `msgspec.json.decode(text)`, taken apart where it is long and nested.

    Raises:
        msgspec.DecodeError: it is not JSON.
        UnicodeDecodeError: it is not UTF-8.
    """
    if len(text) > STEP_BYTES:
        start = bytes(text[:64]).translate(None, b" \t\r\n")
        if start.startswith(b"{"):
            entries = _entries.decode(text).items()
            return {key: decode_in_steps(memoryview(value)) for key, value in entries}
        if start.startswith((b"[{", b"[[")):
            return [value for part in _parts(_elements.decode(text)) for value in part]
    return msgspec.json.decode(text)


def _parts(elements: list[msgspec.Raw]) -> Iterator[list[Any]]:
    """Decode the elements of a list: long ones one by one, short ones many at a time."""
    start, num_bytes = 0, 0
    for end, element in enumerate(elements, start=1):
        num_bytes += len(memoryview(element))
        if num_bytes >= STEP_BYTES or end == len(elements):
            if end - start == 1:
                yield [decode_in_steps(memoryview(element))]
            else:
                yield msgspec.json.decode(b"[%b]" % b",".join(elements[start:end]))
            start, num_bytes = end, 0
