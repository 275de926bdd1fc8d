"""Which server takes the next request: pure rules over the servers' slots and health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from atroposlib.envs.server_handling.semaphore import AsyncSemWithAdaptiveWeight

__all__ = ["HasSlots", "free_slots", "least_loaded", "parts_of"]


class HasSlots(Protocol):
    """What routing needs to know about a server."""

    server_healthy: bool
    sem: AsyncSemWithAdaptiveWeight
    eval_sem: AsyncSemWithAdaptiveWeight


AnyServer = TypeVar("AnyServer", bound=HasSlots)


def free_slots(server: HasSlots, *, is_training: bool) -> float:
    """Return how many requests of a split may start at a healthy server now.

    While evaluation runs, training leaves it as many slots as evaluation could still use.
    """
    eval_sem = server.eval_sem
    eval_free = max(0.0, eval_sem._value - eval_sem.min_val())
    if not is_training:
        return eval_free
    reserved = eval_free if eval_sem._value != eval_sem.max_val else 0.0
    return max(0.0, (server.sem._value - server.sem.min_val()) - reserved)


def least_loaded(
    servers: Sequence[AnyServer],
    *,
    is_training: bool = True,
    open_sessions: Mapping[int, int] | None = None,
) -> AnyServer:
    """Return the healthy server with most unused slots of a split; the first when none is healthy.

    Args:
        servers: At least one.
        is_training: Whose slots count.
        open_sessions: Sessions per `id(server)`; fewer wins between equally loaded servers, so
            that sessions opened together spread before their first request. The first wins ties.
    """
    sessions = open_sessions or {}
    healthy = [server for server in servers if server.server_healthy]
    if not healthy:
        return servers[0]
    return max(
        healthy,
        key=lambda server: (
            (server.sem if is_training else server.eval_sem)._value,
            -sessions.get(id(server), 0),
        ),
    )


def parts_of(n: int, *, largest: int) -> list[int]:
    """Split `n` completions into requests of at most `largest`: 20 by 8 gives [8, 8, 4]."""
    full, rest = divmod(n, largest)
    return [largest] * full + ([rest] if rest else [])
