"""The description of a queued group; its payload is in the store under the same id.

Each payload has an xxh3 checksum: 0.4 ms per 10 MB, ten to twenty times faster than crc32.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from xxhash import xxh3_64_intdigest

__all__ = ["UNKNOWN_VERSION", "QueuedGroup", "checksum_of"]

UNKNOWN_VERSION = -1
"""Policy version of groups that were posted without one while no trainer was registered."""


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The attributes of a group that batching and inspection use, without its tokens.

    Excluded from garbage collection, since it holds no references that could form cycles: 100,000
    tracked objects would lengthen every full collection by tens of milliseconds.
    """

    group_id: int
    env_id: int | None
    """Registered sender; None if the sender's id is not registered."""
    num_sequences: int
    num_tokens: int
    num_bytes: int = 0
    """Bytes of the stored payload."""
    lane: Literal["json", "msgpack"] = "json"
    """Encoding of the stored payload."""
    version: int = 0
    """Policy version set by the sender, else that of the trainer at admission. `UNKNOWN_VERSION` if
    there was neither, or if the steps of that trainer are not comparable to the current one's."""
    received_at: float = 0.0
    """Unix time of admission, in seconds."""
    min_score: float = 0.0
    max_score: float = 0.0
    checksum: int | None = None
    """Checksum of the stored payload (`checksum_of`); None for groups of earlier versions."""

    @property
    def known_version(self) -> int | None:
        """The policy version that sampled the group, None if unknown."""
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
