"""What the codecs of the wire hand around: a decoded group, a stored one, a refusal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from atroposlib.errors import GroupError

__all__ = [
    "BODY_NOT_TEXT",
    "DecodedGroup",
    "Lane",
    "Path",
    "StoredPayload",
    "WireError",
    "from_group_error",
    "from_validation",
]

Lane = Literal["json", "msgpack"]
"""How groups are written: JSON text, or the binary form of `docs/wire.md`."""

BODY_NOT_TEXT = "There was an error parsing the body"
"""What the service answers, with 400, to a body that is not text at all."""

Path = tuple[str | int, ...]
"""Keys and indices from the root of a body to one of its values."""


class WireError(GroupError):
    """A body that is not a group; carries where it went wrong.

    Attributes:
        kind: `not_text`, `json_invalid`, `msgpack_invalid`, `missing`, `value_error` or
            `too_large`.
        path: Keys and indices from the root of the body to the offending value.
    """

    def __init__(self, message: str, *, kind: str, path: Path = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.path = path

    def inside(self, path: Path) -> WireError:
        """Return the same error with a path that starts further out; the message is kept."""
        return WireError(str(self), kind=self.kind, path=path + self.path)


class DecodedGroup(NamedTuple):
    """A checked group: its canonical bytes, and the little that batching needs to know."""

    payload: bytes
    lane: Lane
    num_sequences: int
    num_tokens: int
    env_id: int | None
    min_score: float
    max_score: float
    policy_version: int | None
    """The version of the policy that sampled it, when the sender stamped one."""
    is_loose: bool
    """Whether an optional field does not line up with `tokens`: accepted, but worth counting."""
    is_from_text: bool = False
    """Whether its tokens were made from text, as it says of itself."""


class StoredPayload(NamedTuple):
    """The canonical bytes of a group, and the lane they are written in."""

    lane: Lane
    content: bytes


def from_validation(error: msgspec.ValidationError, path: Path = ()) -> WireError:
    """Name the place of a type error as the service names it.

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
    """Turn a complaint whose message starts with a path into one that carries the path."""
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
