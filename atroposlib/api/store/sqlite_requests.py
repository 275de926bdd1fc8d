"""What passes between the event loop and the thread that writes the file of a run."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atroposlib.api.store.base import Payload
from atroposlib.errors import RunStoreError

__all__ = ["Append", "Command", "Done"]


@dataclass(eq=False)
class Append:
    """A record that waits to be written; the future is resolved on the event loop."""

    record: bytes
    payloads: Sequence[Payload]
    fence: int | None
    future: Future[bool]

    @property
    def num_bytes(self) -> int:
        """Bytes it writes."""
        return len(self.record) + sum(len(payload.content) for payload in self.payloads)


@dataclass(eq=False)
class Command:
    """Anything else that writes, in a transaction of its own."""

    run: Callable[[], None]
    future: Future[None]


class Done(NamedTuple):
    """What became of a request."""

    request: Append | Command
    position: int | None = None
    """Place of an append in the log; None: the fence had moved, or the request is a command."""
    error: RunStoreError | None = None
