"""Lines of the output: their text, their content keys, and what becomes of odd characters; pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

__all__ = ["Line", "content_key", "encode_line", "without_lone_surrogates"]

_SCORE = "score"
_KEY_BYTES = 16
_encoder = msgspec.json.Encoder()
_canonical = msgspec.json.Encoder(order="deterministic")


class Line(NamedTuple):
    """One record as it is written."""

    content: bytes
    """JSON, without the line break."""
    key: bytes
    """Same for records that say the same, whatever their score."""
    is_repaired: bool
    """Whether half characters, which no file can hold, were replaced."""


def encode_line(record: Mapping[str, Any], *, score: float | None) -> Line:
    """Write a record.

    Args:
        record: the fields of its format.
        score: added as the field `score`; None leaves it out.
    """
    is_repaired = False
    try:
        key = content_key(record)
    except UnicodeEncodeError:
        record = without_lone_surrogates(record)
        key, is_repaired = content_key(record), True
    fields = record if score is None else _with_score(record, score)
    return Line(_encoder.encode(fields), key, is_repaired)


def content_key(record: Mapping[str, Any]) -> bytes:
    """Return what tells records apart: a digest of all fields but the score."""
    said = {name: value for name, value in record.items() if name != _SCORE}
    return hashlib.blake2b(_canonical.encode(said), digest_size=_KEY_BYTES).digest()


def without_lone_surrogates(value: Any) -> Any:
    """Return a value in which halves of surrogate pairs are joined, or replaced where alone."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {
            without_lone_surrogates(name): without_lone_surrogates(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [without_lone_surrogates(entry) for entry in value]
    return value


def _with_score(record: Mapping[str, Any], score: float) -> dict[str, Any]:
    """Put the score where it always was: behind the chosen side of a pair, else at the end."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        fields[name] = value
        if name == "pos":
            fields[_SCORE] = score
    fields.setdefault(_SCORE, score)
    return fields
