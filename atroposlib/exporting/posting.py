"""Posting recorded groups to a service at a given rate."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atroposlib.api.client import TrajectoryApiClient
from atroposlib.errors import GroupError, TrajectoryApiError

__all__ = ["Posted", "PostingStoppedError", "post_groups", "posting_text"]

_REJECTED = (400, 413, 422)
"""Statuses for a group that is malformed or too large."""


@dataclass
class Posted:
    """Counts of posted and rejected groups."""

    num_groups: int = 0
    """Groups accepted by the service."""
    num_sequences: int = 0
    num_rejected: int = 0
    """Groups that are malformed or too large."""
    num_started: int = 0
    """Groups read from the source; at the end each is accepted, rejected or unanswered."""
    num_before_failure: int = 0
    """Groups before the first unanswered one; later ones may have been accepted.

    All of them, if none is unanswered.
    """
    num_late: int = 0
    """Groups sent more than one interval late, because the service is slower than the rate."""
    duration_s: float = 0.0
    longest_s: float = 0.0
    """Longest request."""


class PostingStoppedError(TrajectoryApiError):
    """The service became unreachable or rejects the client; `posted` has the counts until then."""

    def __init__(self, message: str, posted: Posted) -> None:
        super().__init__(message)
        self.posted = posted


async def post_groups(
    client: TrajectoryApiClient,
    groups: Iterator[tuple[str, dict[str, Any]]],
    *,
    groups_per_s: float | None,
    max_in_flight: int = 8,
    notify: Callable[[str], None] = lambda _: None,
    posted: Posted | None = None,
) -> Posted:
    """Post groups in order. Cancelling it cancels the requests.

    Args:
        client: Client of the service.
        groups: The place and the content of each group; `env_id` is not sent.
        groups_per_s: None posts as fast as the service accepts groups.
        max_in_flight: Maximum number of concurrent requests.
        notify: Receives a line for each rejected group.
        posted: Receives the counts, also of a call that is cancelled.

    Raises:
        PostingStoppedError: the service is unreachable or rejects the client.
    """
    posted = Posted() if posted is None else posted
    run = uuid.uuid4().hex
    run_started_at = time.monotonic()
    slots = asyncio.Semaphore(max_in_flight)
    tasks: set[asyncio.Task[None]] = set()
    unanswered: set[int] = set()
    failures: dict[int, TrajectoryApiError] = {}

    async def post(number: int, where: str, group: Mapping[str, Any]) -> None:
        started_at = time.monotonic()
        try:
            await client.post_group(group, key=f"replay-{run}-{number}")
            unanswered.discard(number)
            posted.num_groups += 1
            posted.num_sequences += len(group["tokens"])
        except GroupError as error:
            unanswered.discard(number)
            posted.num_rejected += 1
            notify(f"{where} is malformed: {error}")
        except TrajectoryApiError as error:
            if error.status not in _REJECTED:
                failures[number] = error
                return
            unanswered.discard(number)
            posted.num_rejected += 1
            notify(f"{where} was rejected: {error}")
        finally:
            slots.release()
            posted.longest_s = max(posted.longest_s, time.monotonic() - started_at)

    try:
        for where, group in groups:
            if groups_per_s is not None:
                await _keep_pace(posted, run_started_at, groups_per_s)
            await slots.acquire()
            if failures:
                break
            posted.num_started += 1
            unanswered.add(posted.num_started)
            sent = {name: value for name, value in group.items() if name != "env_id"}
            task = asyncio.create_task(post(posted.num_started, where, sent))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)
        posted.duration_s = time.monotonic() - run_started_at
        posted.num_before_failure = min(unanswered, default=posted.num_started + 1) - 1
    if failures:
        error = next(iter(failures.values()))
        raise PostingStoppedError(str(error), posted) from error
    return posted


async def _keep_pace(posted: Posted, run_started_at: float, groups_per_s: float) -> None:
    delay_s = run_started_at + posted.num_started / groups_per_s - time.monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
    elif delay_s < -1 / groups_per_s:
        posted.num_late += 1


def posting_text(posted: Posted) -> str:
    """Return the counts of posted and rejected groups as text."""
    rate = posted.num_groups / posted.duration_s if posted.duration_s else 0.0
    lines = [
        f"{posted.num_groups} groups, {posted.num_sequences} trajectories posted in "
        f"{posted.duration_s:.1f} s ({rate:.1f} groups/s, the slowest took "
        f"{1000 * posted.longest_s:.0f} ms)"
    ]
    if posted.num_rejected:
        lines.append(f"{posted.num_rejected} groups were rejected")
    if posted.num_late:
        lines.append(f"{posted.num_late} groups were late: the service is slower than --rate")
    return "\n".join(lines)
