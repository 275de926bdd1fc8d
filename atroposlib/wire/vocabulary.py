"""Types shared by the codecs, negotiation of formats, and the checks of a decoded group; pure.

The format of a body is called `lane` in code: `json` or `msgpack`, the binary format.

`check_layout` applies `scored_data.check_group` to the lengths of rows, because a codec never holds
all numbers of a group at once. The other checks concern errors that only a foreign sender can make:
the outer shape of opaque fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from unicodedata import category

import msgspec

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS, MAX_SCORE, check_group

__all__ = [
    "BODY_NOT_TEXT",
    "BODY_TYPES",
    "MEDIA_TYPES",
    "AcceptedLane",
    "DecodedGroup",
    "Lane",
    "Lengths",
    "Path",
    "StoredPayload",
    "WireError",
    "check_layout",
    "check_opaque",
    "from_group_error",
    "from_validation",
    "is_loose",
    "lane_of",
    "lane_of_accept",
]

Lane = Literal["json", "msgpack"]
"""Format of groups: JSON text, or the binary format of `docs/wire.md`."""

BODY_NOT_TEXT = "There was an error parsing the body"
"""Response of the service, with 400, to a body that is not text."""

Path = tuple[str | int, ...]
"""Keys and indices from the root of a body to one of its values."""


class WireError(GroupError):
    """A body that is not a valid group, with the path of the error.

    Attributes:
        kind: `not_text`, `json_invalid`, `msgpack_invalid`, `missing`, `value_error` or
            `too_large`.
        path: Keys and indices from the root of the body to the invalid value.
    """

    def __init__(self, message: str, *, kind: str, path: Path = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.path = path

    def inside(self, path: Path) -> WireError:
        """Return the same error with a prefix added to its path."""
        return WireError(str(self), kind=self.kind, path=path + self.path)


class DecodedGroup(NamedTuple):
    """A checked group: its canonical bytes, and the attributes that batching uses."""

    payload: bytes
    lane: Lane
    num_sequences: int
    num_tokens: int
    env_id: int | None
    min_score: float
    max_score: float
    policy_version: int | None
    """Version of the policy that sampled it; None if the sender did not set one."""
    is_loose: bool
    """Whether an optional field does not line up with `tokens`: accepted, but counted."""
    is_from_text: bool = False
    """Whether its tokens were made from text, by its own field."""


class StoredPayload(NamedTuple):
    """The canonical bytes of a group, and their format."""

    lane: Lane
    content: bytes


def from_validation(error: msgspec.ValidationError, path: Path = ()) -> WireError:
    """Convert a validation error to a `WireError` with its path.

    Args:
        error: raised while decoding the value at `path`.
        path: keys and indices from the root of the body to that value.
    """
    text, _, where = str(error).partition(" - at `$")
    path = path + _path_of(where.rstrip("`").lstrip("."))
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        path = (*path, missing.group(1))
        return WireError(f"{_dotted(path)}: field required", kind="missing", path=path)
    prefix = f"{_dotted(path)}: " if path else ""
    return WireError(f"{prefix}{text.replace('`', '')}", kind="value_error", path=path)


def from_group_error(error: GroupError) -> WireError:
    """Convert an error whose message starts with a path to one with that path."""
    message = str(error)
    return WireError(message, kind="value_error", path=_path_of(message))


def _path_of(message: str) -> Path:
    """Read `masks[1][2]: ...` as `("masks", 1, 2)`."""
    head = re.match(r"(?:\[\d+\]|\.?[A-Za-z_]\w*)+", message)
    found = re.findall(r"\[(\d+)\]|([A-Za-z_]\w*)", head.group(0)) if head else []
    return tuple(int(index) if index else name for index, name in found)


def _dotted(path: Iterable[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")


MEDIA_TYPES: Mapping[Lane, str] = MappingProxyType(
    {"json": "application/json", "msgpack": "application/msgpack"}
)
"""The media type of each format, for `Content-Type` and `Accept`."""

_LANES: Mapping[str, Lane] = {
    "application/json": "json",
    "text/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
}
BODY_TYPES = frozenset(_LANES)
"""Every accepted `Content-Type`."""


class AcceptedLane(NamedTuple):
    """The format a client reads, and whether it also reads compressed groups."""

    lane: Lane
    accepts_zstd: bool


def lane_of(content_type: str | None) -> Lane | None:
    """Return the format of a body: JSON without a type, None for an unknown type."""
    name, _ = _parts(content_type or "")
    return _LANES.get(name or "application/json")


def lane_of_accept(accept: str | None, default: Lane = "json") -> AcceptedLane:
    """Choose the format of the response.

    Args:
        accept: the `Accept` header; `application/msgpack;zstd=1` also accepts compressed groups.
        default: the format for a client that names none, or accepts any.

    Returns:
        The named format with the highest weight, the first one among equals. A format with weight 0
        is chosen only if no other is left.
    """
    best: AcceptedLane | None = None
    best_weight = 0.0
    for entry in (accept or "").split(","):
        name, parameters = _parts(entry)
        lane = _LANES.get(name) or (default if name in ("*/*", "application/*") else None)
        weight = _weight(parameters.get("q", "1"))
        if lane is not None and weight > best_weight:
            best, best_weight = AcceptedLane(lane, parameters.get("zstd") == "1"), weight
    if best is None:
        return AcceptedLane(default, False)
    return best if best.lane == "msgpack" else AcceptedLane(best.lane, False)


def _parts(entry: str) -> tuple[str, dict[str, str]]:
    name, *parameters = (part.strip().lower() for part in entry.split(";"))
    pairs = (parameter.partition("=") for parameter in parameters)
    return name, {key.strip(): value.strip().strip('"') for key, _, value in pairs}


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


MAX_LABEL_CHARACTERS = 256
"""Maximum length of the name of a reward part, and of a finish reason."""
MAX_REWARD_PARTS = 256
"""Maximum number of parts of one reward."""

Lengths = Sequence[int | None]
"""[G] entries of each row; None for one that is not a row of numbers."""

_ALIGNED_FIELDS = tuple(f for f in GROUP_FIELDS if f.aligned)
_LOOSE_FIELDS = tuple(f for f in GROUP_FIELDS if f.per_trajectory and not f.required)


def check_opaque(name: str, value: Any) -> None:
    """Check the outer shape of an opaque field.

    Raises:
        GroupError: the message has the path.
    """
    if name == "messages":
        _check_messages(value)
    elif name in ("generation_params", "group_overrides"):
        if not isinstance(value, dict):
            raise GroupError(f"{name}: expected an object or null")
    elif name == "overrides":
        if not isinstance(value, list):
            raise GroupError(f"{name}: expected a list of objects or null")
        for i, override in enumerate(value):
            if not isinstance(override, dict):
                raise GroupError(f"{name}[{i}]: expected an object")
    elif name == "reward_parts":
        _check_reward_parts(value)
    elif name == "finish_reasons":
        if not isinstance(value, list):
            raise GroupError(f"{name}: expected a list of strings or null")
        for i, reason in enumerate(value):
            if not isinstance(reason, str | None):
                raise GroupError(f"{name}[{i}]: expected a string or null")
            _check_label(f"{name}[{i}]", reason or "")
    elif name == "tokenized_from_text" and not isinstance(value, bool):
        raise GroupError(f"{name}: expected true, false or null")


def _check_reward_parts(value: Any) -> None:
    if not isinstance(value, list):
        raise GroupError("reward_parts: expected a list of objects or null")
    for i, parts in enumerate(value):
        if not isinstance(parts, dict | None):
            raise GroupError(f"reward_parts[{i}]: expected an object or null")
        if parts is not None and len(parts) > MAX_REWARD_PARTS:
            raise GroupError(f"reward_parts[{i}]: {len(parts)} parts, at most {MAX_REWARD_PARTS}")
        for part, number in (parts or {}).items():
            _check_label(f"reward_parts[{i}]: the name {part!r:.60}", part)
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise GroupError(f"reward_parts[{i}].{part}: expected a number, got {number!r:.60}")


def _check_label(path: str, text: str) -> None:
    """Reject labels that are too long or have control characters; they become names of metrics.

    Raises:
        GroupError: it is too long, or has control characters.
    """
    if len(text) > MAX_LABEL_CHARACTERS:
        raise GroupError(f"{path}: {len(text)} characters, expected at most {MAX_LABEL_CHARACTERS}")
    if not text.isprintable() and any(category(char) in ("Cc", "Zl", "Zp") for char in text):
        raise GroupError(f"{path}: expected no control characters")


def _check_messages(value: Any) -> None:
    if not isinstance(value, list):
        raise GroupError("messages: expected a list with one list of messages per trajectory")
    for i, conversation in enumerate(value):
        # Plain strings are the older form of a conversation; they are stored unchanged.
        if isinstance(conversation, str):
            continue
        if not isinstance(conversation, list):
            raise GroupError(f"messages[{i}]: expected a list of messages")
        for j, message in enumerate(conversation):
            if isinstance(message, str):
                continue
            if not isinstance(message, dict) or not message.keys() >= {"role", "content"}:
                raise GroupError(
                    f"messages[{i}][{j}]: role and content are required in every message"
                )


def check_layout(lengths: Mapping[str, Lengths], scores: Sequence[float]) -> None:
    """Check counts, lengths and scores with `check_group`.

    Args:
        lengths: lengths of the rows of every present field except `scores`, by name.
        scores: [G] the scores.

    Raises:
        GroupError: as `check_group`.
    """
    if _is_right(lengths, scores):  # ten times faster
        return
    rows: dict[str, Any] = {
        name: [_Row(length or 0) for length in of_field] for name, of_field in lengths.items()
    }
    check_group({**rows, "scores": scores})


def _is_right(lengths: Mapping[str, Lengths], scores: Sequence[float]) -> bool:
    tokens = lengths.get("tokens", ())
    return (
        0 < len(tokens) == len(scores)
        and -MAX_SCORE <= min(scores) <= max(scores) <= MAX_SCORE
        and math.isfinite(sum(scores))
        and all(
            lengths.get(field.name, None if field.required else tokens) == tokens
            for field in _ALIGNED_FIELDS
        )
    )


class _Row:
    """Stands for a row of numbers that are already checked."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[float]:
        return iter(())


def is_loose(lengths: Mapping[str, Lengths]) -> bool:
    """Whether an optional field has other counts or lengths than `tokens`; accepted, counted."""
    tokens = lengths["tokens"]
    for field in _LOOSE_FIELDS:
        rows = lengths.get(field.name)
        if not rows:
            continue
        if len(rows) != len(tokens):
            return True
        if any(
            length is not None and length != expected
            for length, expected in zip(rows, tokens, strict=True)
        ):
            return True
    return False
