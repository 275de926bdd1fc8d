"""The protocol every payload store implements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from atroposlib.api.queue import QueuedGroup

__all__ = ["GroupStore", "StoredGroup"]


class StoredGroup(NamedTuple):
    """A group as it is written down: its description, so a queue can be rebuilt, and its bytes."""

    entry: QueuedGroup
    payload: bytes


class GroupStore(Protocol):
    """Keeps payloads from the moment a group is acknowledged until its batch is.

    Methods are awaited, so that an implementation may wait for a disk or another machine. They
    are safe to cancel: a cancelled `append` has stored all of its groups or none.
    """

    async def append(self, groups: Sequence[StoredGroup]) -> None:
        """Write groups down, all or none; on return they survive what the store survives."""

    async def fetch(self, group_ids: Sequence[int]) -> list[bytes]:
        """Return payloads in the order asked for.

        Raises:
            KeyError: one of the groups is not in the store.
        """

    async def discard(self, group_ids: Collection[int]) -> None:
        """Forget groups; ids that are not there are skipped."""

    async def clear(self) -> None:
        """Forget every group."""

    async def close(self) -> None:
        """Release what the store holds; called once, when the service stops."""
