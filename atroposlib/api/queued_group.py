"""What the queue knows of one group; the store has the rest under its id.

Each payload has an xxh3 checksum. It costs 0.4 ms per 10 MB; crc32 takes ten to twenty times as
long.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from xxhash import xxh3_64_intdigest

__all__ = ["UNKNOWN_VERSION", "QueuedGroup", "checksum_of"]

UNKNOWN_VERSION = -1
"""The version of groups that came without one while no trainer was registered."""


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What batching and inspection know of a group, without its tokens.

    Holds nothing that could refer back to it, so that the garbage collector need not look at it:
    100,000 of them would make every full collection tens of milliseconds longer.
    """

    group_id: int
    env_id: int | None
    """Registered sender; None when nobody registered under the id it gave."""
    num_sequences: int
    num_tokens: int
    num_bytes: int = 0
    """Bytes of the stored payload."""
    lane: Literal["json", "msgpack"] = "json"
    """Encoding of the stored payload."""
    version: int = 0
    """Policy version the sender stamped, else the trainer's at admission; `UNKNOWN_VERSION` where
    there was none, or where that trainer's steps are not those of the present one."""
    received_at: float = 0.0
    """Unix time of admission, in seconds."""
    min_score: float = 0.0
    max_score: float = 0.0
    checksum: int | None = None
    """Checksum of the stored payload (`checksum_of`); None for groups of earlier versions."""

    @property
    def known_version(self) -> int | None:
        """The policy version that the group was sampled under, None when it is not known."""
        return None if self.version == UNKNOWN_VERSION else self.version

    def is_payload(self, content: bytes) -> bool:
        """Whether `content` is the payload that was posted.

        Without a checksum, only a wrong length or invalid JSON is detected.
        """
        if self.checksum is not None:
            return checksum_of(content) == self.checksum
        if self.num_bytes and len(content) != self.num_bytes:
            return False
        if self.lane == "msgpack":
            return True
        try:
            msgspec.json.decode(content, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


def checksum_of(payload: bytes) -> int:
    """Return the 64-bit checksum of a payload."""
    return xxh3_64_intdigest(payload)
