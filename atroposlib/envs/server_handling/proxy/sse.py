"""Server-sent events from an answer that is already whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse

__all__ = ["Event", "stream_events"]


class Event(NamedTuple):
    """One event."""

    data: dict[str, Any] | str
    """An object, sent as JSON, or literal text without line breaks, as `[DONE]`."""
    name: str | None = None
    """Written as the `event:` line; None leaves the line out."""


def stream_events(events: Iterable[Event]) -> StreamingResponse:
    """Return a `text/event-stream` response of the events."""

    async def lines() -> AsyncIterator[str]:
        for event in events:
            data = event.data if isinstance(event.data, str) else json.dumps(event.data)
            head = "" if event.name is None else f"event: {event.name}\n"
            yield f"{head}data: {data}\n\n"

    return StreamingResponse(
        lines(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
