"""Posting recorded groups to a service at a chosen rate."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atroposlib.api.client import TrajectoryApiClient
from atroposlib.errors import GroupError, TrajectoryApiError

__all__ = ["PostingStoppedError", "post_groups", "posting_text"]

_REFUSED = (400, 413, 422)


@dataclass
class Posted:
    """Counts of posted and refused groups."""

    num_groups: int = 0
    """Taken by the service."""
    num_sequences: int = 0
    num_refused: int = 0
    """Malformed, or too large; the service said so."""
    num_begun: int = 0
    """Groups read from the record; all of them are posted or refused at the end."""
    num_late: int = 0
    """Groups that left later than the pace asked for, because the service was slower."""
    duration_s: float = 0.0
    longest_s: float = 0.0
    """Longest time one group took."""


class PostingStoppedError(TrajectoryApiError):
    """The service went away; `posted` tells how far it got."""

    def __init__(self, message: str, posted: Posted) -> None:
        super().__init__(message)
        self.posted = posted


async def post_groups(
    client: TrajectoryApiClient,
    groups: Iterator[tuple[str, dict[str, Any]]],
    *,
    groups_per_s: float | None,
    max_in_flight: int = 8,
    tell: Callable[[str], None] = lambda _: None,
    on_posted: Callable[[Posted], None] = lambda _: None,
) -> Posted:
    """Post groups in order.

    Args:
        client: of the service.
        groups: where each was found, and the group; its `env_id` is left out.
        groups_per_s: the pace; None posts as fast as the service takes them.
        max_in_flight: requests that are open at once.
        tell: gets a line for each refused group.
        on_posted: called after each group.

    Raises:
        PostingStoppedError: the service is away or refuses to be written to.
    """
    posted = Posted()
    run = uuid.uuid4().hex
    started = time.monotonic()
    slots = asyncio.Semaphore(max_in_flight)
    tasks: set[asyncio.Task[None]] = set()
    failures: list[TrajectoryApiError] = []

    async def post(number: int, where: str, group: Mapping[str, Any]) -> None:
        began = time.monotonic()
        try:
            await client.post_group(group, key=f"replay-{run}-{number}")
            posted.num_groups += 1
            posted.num_sequences += len(group["tokens"])
        except GroupError as error:
            posted.num_refused += 1
            tell(f"{where} is malformed: {error}")
        except TrajectoryApiError as error:
            if error.status not in _REFUSED:
                failures.append(error)
                return
            posted.num_refused += 1
            tell(f"{where} was refused: {error}")
        finally:
            slots.release()
            posted.longest_s = max(posted.longest_s, time.monotonic() - began)
        on_posted(posted)

    try:
        for where, group in groups:
            await _keep_pace(posted, started, groups_per_s)
            await slots.acquire()
            if failures:
                break
            posted.num_begun += 1
            sent = {name: value for name, value in group.items() if name != "env_id"}
            task = asyncio.create_task(post(posted.num_begun, where, sent))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        await asyncio.gather(*tasks)
        posted.duration_s = time.monotonic() - started
    if failures:
        raise PostingStoppedError(str(failures[0]), posted) from failures[0]
    return posted


async def _keep_pace(posted: Posted, started: float, groups_per_s: float | None) -> None:
    if groups_per_s is None:
        return
    due = started + posted.num_begun / groups_per_s
    delay_s = due - time.monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
    elif delay_s < -1 / groups_per_s:
        posted.num_late += 1


def posting_text(posted: Posted) -> str:
    """Write for people what became of the groups."""
    rate = posted.num_groups / posted.duration_s if posted.duration_s else 0.0
    lines = [
        f"{posted.num_groups} groups, {posted.num_sequences} trajectories posted in "
        f"{posted.duration_s:.1f} s ({rate:.1f} groups/s, the slowest took "
        f"{1000 * posted.longest_s:.0f} ms)"
    ]
    if posted.num_refused:
        lines.append(f"{posted.num_refused} groups were refused")
    if posted.num_late:
        lines.append(f"{posted.num_late} groups left late: the service is slower than the pace")
    return "\n".join(lines)
