"""Which requests were stored already: idempotency keys and what was answered to them; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from atroposlib.api.admission import Placement
from atroposlib.errors import GroupError

__all__ = ["MAX_KEY_CHARACTERS", "KeyBook", "KeyEntry", "check_key"]

MAX_KEY_CHARACTERS = 255

_MAX_KEYS = 65_536
_MAX_BYTES = 32 * 1024 * 1024
_ENTRY_BYTES = 256  # about what an entry takes besides its key and its placements


class KeyEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that was stored."""

    digest: int
    """Digest of its body."""
    buffered: tuple[int | None, ...]
    """`Placement.buffered_sequences` of each of its groups."""

    @property
    def placements(self) -> list[Placement]:
        """Where its groups went, as they were told when it was stored."""
        return [Placement(size) for size in self.buffered]


def check_key(key: str) -> None:
    """Refuse a key that is not worth remembering.

    Raises:
        GroupError: the key is empty or longer than `MAX_KEY_CHARACTERS`.
    """
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise GroupError(
            f"the idempotency key has {len(key)} characters, expected 1 to {MAX_KEY_CHARACTERS}; "
            "a random UUID per request does"
        )


class KeyBook:
    """Remembers the newest keys, bounded in number and in bytes."""

    def __init__(self) -> None:
        self._entries: dict[str, KeyEntry] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> KeyEntry | None:
        """Return what is remembered under a key."""
        return self._entries.get(key)

    def items(self) -> Iterable[tuple[str, KeyEntry]]:
        """Every key with its entry, oldest first."""
        return self._entries.items()

    def remember(self, key: str, digest: int, placements: Sequence[Placement]) -> None:
        """Note a request under a key that is not known; the oldest keys make room for it."""
        self.restore([(key, KeyEntry(digest, tuple(p.buffered_sequences for p in placements)))])

    def restore(self, items: Iterable[tuple[str, KeyEntry]]) -> None:
        """Add entries, oldest first."""
        for key, entry in items:
            known = self._entries.pop(key, None)
            self._num_bytes -= _size_of(key, known) if known else 0
            self._entries[key] = entry
            self._num_bytes += _size_of(key, entry)
        while len(self._entries) > _MAX_KEYS or self._num_bytes > _MAX_BYTES:
            oldest = next(iter(self._entries))
            self._num_bytes -= _size_of(oldest, self._entries.pop(oldest))

    def clear(self) -> None:
        """Forget every key."""
        self._entries.clear()
        self._num_bytes = 0


def _size_of(key: str, entry: KeyEntry) -> int:
    return _ENTRY_BYTES + len(key) + 8 * len(entry.buffered)
